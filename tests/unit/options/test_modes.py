"""Each weight sync mode has a row with its properties, and a bridge."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import get_args

import pytest

from example_trainer.config import TrainingConfig
from example_trainer.options.modes import MODES, BridgeMode
from example_trainer.weights import factory


def test_every_mode_has_a_row() -> None:
    assert set(MODES) == set(get_args(BridgeMode))
    assert all(mode.name == name for name, mode in MODES.items())


@pytest.mark.parametrize("mode", get_args(BridgeMode))
def test_every_mode_has_a_bridge(mode: str, tmp_path: Path) -> None:
    bridge = factory.make_bridge(TrainingConfig(model_name="m", weight_bridge_mode=mode, run_dir=tmp_path))
    assert not inspect.isabstract(bridge)


@pytest.mark.parametrize(
    ("mode", "nodes", "expected"),
    [("shared_vllm", 0, (True, False)), ("shared_vllm", 2, (False, True)), ("lora_only", 1, (False, False))],
)
def test_only_shared_vllm_without_further_nodes_shares_memory(mode: str, nodes: int, expected: tuple) -> None:
    config = TrainingConfig(model_name="m", weight_bridge_mode=mode, num_inference_nodes=nodes)
    assert (config.shares_memory, config.broadcasts) == expected
