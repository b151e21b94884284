"""The page shows what the trainer computed: curves are its metrics, values at tokens are those of its forward."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from example_trainer.cli import run_reporter

from .conftest import GROUP_SIZE, Workbench


def get(bench: Workbench, path: str, **params: Any) -> Any:
    response = httpx.get(bench.url + path, params=params)
    assert response.status_code == 200, response.text
    return response.json()


def test_curves_and_values_at_tokens_are_those_that_the_trainer_computed(bench: Workbench) -> None:
    config = bench.config(training_steps=3)
    bridge = bench.bridge()
    trainer = bench.trainer(config, bridge, reporter=run_reporter(config))
    trainer.set_up()
    bench.submit(bench.record_groups(6))
    assert trainer.train()
    (run,) = get(bench, "/v1/runs")["runs"]
    path = f"/v1/runs/{run['run_id']}"
    series = get(bench, f"{path}/series", names="reward/mean,train/loss,grpo/mean_ratio")["series"]
    for name, line in series.items():
        assert dict(zip(line["steps"], line["values"], strict=True)) == {
            row["step"]: row[name] for row in bench.metrics(config) if name in row
        }
    first = bench.metrics(config)[0]
    ratios, gaps = [], []
    for group in range(8 // GROUP_SIZE):
        for sample in range(GROUP_SIZE):
            window = get(bench, f"{path}/batches/1/groups/{group}/samples/{sample}")
            assert window["texts"]
            if window["logprobs"] is None:
                continue
            for sampled, now, sampler, advantage in zip(
                window["sampled"], window["logprobs"], window["sampler_logprobs"], window["advantages"], strict=True
            ):
                assert (now is not None) == (advantage is not None)
                if now is not None:
                    assert sampled
                    gaps.append(now - sampler)
                    ratios.append(2.718281828459045 ** (now - sampler))
    assert sum(ratios) / len(ratios) == pytest.approx(first["grpo/mean_ratio"], abs=1e-4)
    assert max(map(abs, gaps)) < 1e-3


def test_the_run_directory_keeps_the_same_values_for_a_run_without_a_broker(bench: Workbench) -> None:
    config = bench.config(training_steps=2)
    trainer = bench.trainer(config, bench.bridge(), reporter=run_reporter(config))
    trainer.set_up()
    bench.submit(bench.record_groups(4))
    assert trainer.train()
    lines = [json.loads(line) for line in (config.required_run_dir / "trained.jsonl").read_text().splitlines()]
    assert [line["number"] for line in lines] == [1, 2]
    path, compared = f"/v1/runs/{lines[0]['run_id']}/batches/1/groups", 0
    for kept in lines[0]["groups"]:
        for index, values in enumerate(kept["samples"]):
            window = get(bench, f"{path}/{kept['group']}/samples/{index}")
            assert window["tokens"] == kept["fields"]["tokens"][index]
            if values is not None:
                assert [window["logprobs"][at] for at in values["positions"]] == values["logprobs"]
                compared += len(values["positions"])
    assert compared > 0
