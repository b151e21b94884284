"""The trainer's metrics for Prometheus: last step's values in base units, and counters over all steps."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from example_trainer.monitoring.health import HealthEvent
from example_trainer.monitoring.prometheus import PrometheusTracker, template_of, templates

SIGN = HealthEvent(sign="kl", step=3, value=1.5, message="KL 1.50 is above 1", advice="lower --lr")


@pytest.fixture
def tracker() -> Iterator[PrometheusTracker]:
    opened = PrometheusTracker("127.0.0.1", 0)
    yield opened
    opened.close()


def samples(tracker: PrometheusTracker) -> dict[tuple[str, str], float]:
    """Return all values by sample name and value of the only label."""
    text = httpx.get(f"http://127.0.0.1:{tracker.port}/metrics").text
    return {
        (sample.name.removeprefix("atropos_trainer_"), next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("atropos_trainer_")
    }


def test_values_of_the_last_step_are_in_base_units_and_families_have_a_label(tracker: PrometheusTracker) -> None:
    tracker.log(1, {"time/train": 9.0})
    tracker.log(
        2,
        {
            "time/train": 2.0,
            "perf/host_memory_gb": 1.5,
            "reward/mean": 0.25,
            "data/sequences": 8.0,
            "data/overlong": 3.0,
            "train/loss": -0.5,
            "train/loss_kl": 0.1,
            "staleness/age_4_to_7": 0.75,
            "env/3/reward_mean": 1.0,
            "mine/own": 1.0,
        },
    )
    found = samples(tracker)
    expected = {
        ("step", ""): 2,
        ("time_train_seconds", ""): 2.0,
        ("perf_host_memory_bytes", ""): 1.5 * 2**30,
        ("reward_mean", ""): 0.25,
        ("data_sequences", ""): 8,
        ("data_cause", "overlong"): 3,
        ("train_loss", ""): -0.5,
        ("train_loss_term", "kl"): 0.1,
        ("staleness_age_steps", "4_to_7"): 0.75,
        ("env_id_reward_mean", "3"): 1,
    }
    assert {key: found.get(key) for key in expected} == expected
    assert not [key for key in found if "own" in key[0]]


def test_counters_add_up_over_steps(tracker: PrometheusTracker) -> None:
    assert samples(tracker)["steps_total", ""] == 0
    for step in (1, 2):
        tracker.log(step, {"time/step": 3.0, "time/train": 2.0, "time/sync": 9.0, "data/trained_tokens": 100.0})
    tracker.event(SIGN)
    found = samples(tracker)
    assert found["steps_total", ""] == 2
    assert found["trained_tokens_total", ""] == 200
    assert found["health_signs_total", "kl"] == 1
    parts = {part: value for (name, part), value in found.items() if name == "seconds_total"}
    assert parts == {"step": 6.0, "train": 4.0, "fetch": 0.0, "sync_wait": 0.0}


def test_every_name_is_found_again_by_its_template() -> None:
    for template in templates():
        name = template.replace("{id}", "7").replace("{cause}", "overlong").replace("{term}", "policy")
        found = template_of(name.replace("{steps}", "0"))
        assert found is not None
        assert found[0] == template
