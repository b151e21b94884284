"""The dashboard, the alerts and the pages about them use only metrics that the programs really export."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from atropos_api.common.prometheus import PROCESS_METRICS, Metric
from atropos_api.routes import metrics as broker
from environments.sdk.runtime import metrics as environment
from example_trainer.monitoring import prometheus as trainer
from example_trainer.serving import metrics as server

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana/atropos.json").read_text(encoding="utf-8"))
ALERTS: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text(encoding="utf-8"))
SCRAPES: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text(encoding="utf-8"))
SELECTOR = re.compile(r"(?<![\w:])((?:atropos_|process_|vllm:)[\w:]*)(?:\{([^}]*)\})?")
LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"")
OF_PROMETHEUS = {"job", "instance"}
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}


def exported() -> dict[str, set[str]]:
    """Return the labels of each sample of our programs by its name."""
    tables: list[tuple[str, tuple[Metric, ...]]] = [
        (broker.PREFIX, broker.METRICS),
        (environment.PREFIX, environment.METRICS),
        (server.PREFIX, server.METRICS),
        (trainer.PREFIX, (*trainer.COUNTERS, *(trainer.spell(name).metric for name in trainer.templates()))),
        ("", PROCESS_METRICS),
    ]
    return {
        f"{prefix}{metric.name}{suffix}": {*metric.labels, *({"le"} if suffix == "_bucket" else ())}
        for prefix, metrics in tables
        for metric in metrics
        for suffix in SUFFIXES.get(metric.kind, ("",))
    }


def expressions() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


EXPRESSIONS = list(expressions())
OURS = exported()


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS, ids=[f"{title}: {e}"[:80] for title, e in EXPRESSIONS])
def test_an_expression_names_metrics_and_labels_that_are_exported(title: str, expression: str) -> None:
    found = SELECTOR.findall(expression)
    assert found or expression.startswith("up{"), title
    for name, selector in found:
        if not name.startswith("vllm:"):  # tests/e2e/test_observed_run.py compares these with a running server
            assert name in OURS, title
            assert set(LABEL.findall(selector)) <= OURS[name] | OF_PROMETHEUS, title
    grouped = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in re.split(r",\s*", group)}
    known = set().union(*(OURS.get(name, set()) for name, _ in found), OF_PROMETHEUS)
    assert grouped <= known, title


def test_a_legend_names_labels_that_are_exported() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            labels = set().union(
                *(OURS.get(name, set()) for name, _ in SELECTOR.findall(target["expr"])), OF_PROMETHEUS
            )
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels, panel["title"]


def test_each_program_of_a_run_has_a_panel_and_a_scrape() -> None:
    used = " ".join(expression for _, expression in EXPRESSIONS)
    for prefix in (
        "atropos_trainer_",
        "atropos_server_",
        "atropos_environment_",
        "atropos_queued",
        "vllm:",
        "process_",
    ):
        assert prefix in used
    jobs = {one["job_name"] for one in SCRAPES["scrape_configs"]}
    assert jobs == {"atropos-broker", "atropos-vllm", "atropos-trainer", "atropos-environment"}
    assert SCRAPES["rule_files"] == ["alerts.yml"]
    named = set(re.findall(r'job="([\w-]+)"', used))
    assert named <= jobs


def test_panels_have_ids_and_places_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells


def test_each_alert_is_explained_by_a_sentence_and_links_to_a_heading_that_is_there() -> None:
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            summary = rule["annotations"]["summary"]
            assert len(summary) > 40, rule["alert"]
            for page in re.findall(r"docs/[\w/-]+\.md", summary):
                assert (ROOT / page).is_file(), rule["alert"]
