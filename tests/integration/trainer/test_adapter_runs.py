"""Runs that train an adapter learn, agree with their sampler in spite of dropout, and write files that PEFT loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from atropos_api.testing import served_broker
from example_trainer.checkpoint_model_files import read_tensors
from example_trainer.checkpointing import list_checkpoints
from example_trainer.modeling.loading import policy_options
from example_trainer.modeling.lora import adapter_options
from example_trainer.testing import RolloutThread, Sampler, ServingBridge
from example_trainer.training import Learner

from .conftest import GROUP_SIZE, Workbench, even_tokens


def test_an_adapter_learns_from_its_own_rollouts_and_stays_aligned_with_its_sampler(bench: Workbench) -> None:
    """Dropout makes training forwards differ from the sampler's, so the comparison scores without it."""
    import peft
    from transformers import AutoModelForCausalLM

    config = bench.config(
        weight_bridge_mode="lora_only",
        lora_target_modules=["all-linear"],
        lora_dropout=0.1,
        training_steps=28,
        batch_size=16,
        lr=2e-2,
        importance_sampling="truncated",
    )
    bridge = ServingBridge(policy_options(config))
    sampler = Sampler(bench.model, seed=1, adapter=adapter_options(config))
    with RolloutThread(bench.url, bridge, sampler, even_tokens, group_size=GROUP_SIZE) as rollouts:
        assert bench.trainer(config, bridge).run()
    assert rollouts.error is None
    lines: list[dict[str, Any]] = bench.metrics(config)
    assert sum(line["reward/mean"] for line in lines[-5:]) / 5 > 0.85
    measured = [line for line in lines if line.get("alignment/tokens", 0) > 0]
    assert measured
    assert max(line["alignment/diff_max"] for line in measured) < 1e-4

    base = AutoModelForCausalLM.from_pretrained(bench.model)
    stored = peft.get_peft_model_state_dict(peft.PeftModel.from_pretrained(base, config.checkpoint_root / "latest"))
    assert bridge.served is not None
    assert all(torch.equal(stored[name], tensor) for name, tensor in bridge.served[1].items())


def test_a_run_that_is_stopped_amid_a_batch_draws_the_same_dropout_when_it_goes_on(
    bench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = bench.record_groups(6, version=None)
    settings: dict[str, Any] = {
        "training_steps": 3,
        "weight_bridge_mode": "lora_restart",
        "lora_target_modules": ["all-linear"],
        "lora_dropout": 0.3,
        "token_budget": 16,
    }
    with served_broker() as url:
        apart = Workbench(url=url, model=bench.model, directory=tmp_path)
        apart.submit(groups)
        whole = apart.config(run_dir=tmp_path / "whole", **settings)
        assert apart.trainer(whole, ServingBridge(policy_options(whole))).run()
        apart.close()

    bench.submit(groups)
    config = bench.config(run_dir=tmp_path / "stopped", **settings)
    bridge = ServingBridge(policy_options(config))
    backward, amid = Learner._backward, []

    def recorded(self: Learner, *arguments: Any) -> None:
        amid.extend([True] * (len(bridge.published) > 2))
        backward(self, *arguments)

    monkeypatch.setattr(Learner, "_backward", recorded)
    assert not bench.trainer(config, bridge, should_stop=lambda: bool(amid)).run()
    monkeypatch.undo()
    assert [path.name for path in list_checkpoints(config.checkpoint_root)] == ["checkpoint-2"]
    resumed = config.model_copy(update={"resume": "auto"})
    assert bench.trainer(resumed, ServingBridge(policy_options(config))).run()
    expected, found = (read_tensors(each.checkpoint_root / "latest") for each in (whole, config))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
