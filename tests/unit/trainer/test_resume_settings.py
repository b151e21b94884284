"""A resume with other settings, another kind of weights or another base is refused in a line that says how to go on."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from example_trainer.checkpoint_model_files import StoredTensors
from example_trainer.checkpointing import restore, save_checkpoint
from example_trainer.config import TrainingConfig
from example_trainer.errors import CheckpointError
from example_trainer.model import load_policy
from example_trainer.modeling.base_fingerprint import base_fingerprint
from example_trainer.modeling.loading import PolicyOptions
from example_trainer.modeling.optimizers import OptimizerSettings, make_optimizer
from example_trainer.modeling.policy import Policy
from example_trainer.options.modes import BridgeMode
from example_trainer.resume_settings import refuse_changed_settings
from example_trainer.state import random_state
from example_trainer.testing import make_tiny_model

from .test_checkpointing import make_state


@pytest.mark.parametrize(
    ("settings", "changed", "words"),
    [
        ({}, {"optimizer": "adafactor"}, "with --optimizer adamw, this run is with --optimizer adafactor"),
        ({}, {"lora_alpha": 64}, "resume with --lora-alpha 32, or start a new run$"),
        ({}, {"lora_target_modules": ["k_proj"]}, "resume without --lora-target-modules, or"),
        (
            {"lora_target_modules": ["mlp", "attention"]},
            {"lora_target_modules": ["mlp"]},
            "modules mlp attention, ",
        ),
        ({}, {"load_in_4bit": True}, "this run is with --load-in-4bit; resume without --load-in-4bit"),
        ({}, {"master_weights": "none"}, "resume with --master-weights fp32"),
    ],
)
def test_settings_that_the_state_hangs_on_may_not_change_over_a_resume(
    settings: dict[str, object], changed: dict[str, object], words: str
) -> None:
    before = TrainingConfig.model_validate(
        {"model_name": "m", "optimizer": "adamw", "weight_bridge_mode": "lora_restart", **settings}
    )
    state = replace(make_state(3), config=before.model_dump(mode="json"))
    refuse_changed_settings(state, before.model_copy(update={"lr": 1.0}))
    with pytest.raises(CheckpointError, match=words):
        refuse_changed_settings(state, before.model_copy(update=changed))


def test_a_resume_may_say_the_same_modules_in_other_words(tmp_path: Path) -> None:
    before = TrainingConfig(model_name="m", weight_bridge_mode="lora_restart")
    state = replace(make_state(3), config=before.model_dump(mode="json"))
    refuse_changed_settings(state, before.model_copy(update={"lora_target_modules": ["v_proj", "q_proj"]}))


@pytest.mark.parametrize(("written", "resumed"), [("none", "fp32"), ("fp32", "none")])
def test_the_state_of_masters_is_not_that_of_bf16_weights(
    tiny_model: Path, tmp_path: Path, written: str, resumed: str
) -> None:
    """With `--dtype auto` that shows only once the model is loaded."""

    def loaded(masters: str) -> tuple[Policy, torch.optim.Optimizer]:
        options = PolicyOptions(model_name=str(tiny_model), dtype="bfloat16", device="cpu", master_weights=masters)
        policy = load_policy(options)
        return policy, make_optimizer(policy.masters.values(), OptimizerSettings(name="adamw", lr=1e-3))

    policy, optimizer = loaded(written)
    path = save_checkpoint(tmp_path, make_state(1), policy, optimizer, random_state())
    with pytest.raises(CheckpointError, match=r"it belongs to .* stepped .*here\); resume with .*--master-weights"):
        restore(path, *loaded(resumed))


@pytest.mark.parametrize(
    ("written", "resumed"), [("none", "lora_only"), ("lora_restart", "shared_vllm"), ("shared_vllm", "lora_restart")]
)
def test_full_weights_are_not_resumed_as_an_adapter_nor_the_reverse(written: BridgeMode, resumed: BridgeMode) -> None:
    before = TrainingConfig(model_name="m", weight_bridge_mode=written)
    state = replace(make_state(3), config=before.model_dump(mode="json"))
    with pytest.raises(CheckpointError, match=f"resume with --weight-bridge-mode {written}"):
        refuse_changed_settings(state, TrainingConfig(model_name="m", weight_bridge_mode=resumed))
    same_kind: dict[str, BridgeMode] = {"none": "shared_vllm", "shared_vllm": "none", "lora_restart": "lora_only"}
    refuse_changed_settings(state, TrainingConfig(model_name="m", weight_bridge_mode=same_kind[written]))


def test_a_model_of_other_sizes_is_reported_before_it_is_loaded(tmp_path: Path) -> None:
    model, moved = make_tiny_model(tmp_path / "model"), make_tiny_model(tmp_path / "moved", seed=1)
    state = replace(make_state(3), config=TrainingConfig(model_name=str(model)).model_dump(mode="json"))
    refuse_changed_settings(state, TrainingConfig(model_name=str(moved)))
    content = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(content | {"num_hidden_layers": 7}))
    with pytest.raises(CheckpointError, match=f"resume with --model-name {model}"):
        refuse_changed_settings(state, TrainingConfig(model_name=str(moved)))


def test_an_adapter_is_not_resumed_on_another_base_of_the_same_sizes(tmp_path: Path) -> None:
    model, other = make_tiny_model(tmp_path / "model"), make_tiny_model(tmp_path / "other", seed=1)
    copied = shutil.copytree(model, tmp_path / "copied")
    config = TrainingConfig(model_name=str(model), weight_bridge_mode="lora_restart", kl_coef=0.1)
    state = replace(make_state(3), config=config.model_dump(mode="json"), base=base_fingerprint(str(model)))
    refuse_changed_settings(state, config)
    refuse_changed_settings(state, config.model_copy(update={"model_name": str(copied)}))
    with pytest.raises(
        CheckpointError, match=f"an adapter of .*{other} has other weights; resume with --model-name {model}"
    ):
        refuse_changed_settings(state, config.model_copy(update={"model_name": str(other)}))
    shutil.copyfile(other / "model.safetensors", model / "model.safetensors")
    with pytest.raises(CheckpointError, match="whose weights have changed since; put the former ones back"):
        refuse_changed_settings(state, config)


def test_full_weights_need_their_base_only_for_a_reference_and_for_frozen_layers(tmp_path: Path) -> None:
    model, other = make_tiny_model(tmp_path / "model"), make_tiny_model(tmp_path / "other", seed=1)
    for settings, words in (
        ({}, None),
        ({"kl_coef": 0.1, "ref_model": str(model)}, None),
        ({"kl_coef": 0.1}, f"name the reference with --ref-model {model}"),
        ({"train_layer_indices": "0"}, f"some layers of --model-name {model}"),
    ):
        config = TrainingConfig.model_validate({"model_name": str(model), "weight_bridge_mode": "none", **settings})
        state = replace(make_state(3), config=config.model_dump(mode="json"), base=base_fingerprint(str(model)))
        moved = config.model_copy(update={"model_name": str(other)})
        if words is None:
            refuse_changed_settings(state, moved)
        else:
            with pytest.raises(CheckpointError, match=words):
                refuse_changed_settings(state, moved)


def test_a_fingerprint_is_that_of_the_weights_and_not_of_their_files(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    found = base_fingerprint(str(model))
    assert found is not None
    tensors = dict(StoredTensors(model))
    split = shutil.copytree(model, tmp_path / "split")
    (split / "model.safetensors").unlink()
    halves = {"a.safetensors": list(tensors)[::2], "b.safetensors": list(tensors)[1::2]}
    for file, names in halves.items():
        save_file({name: tensors[name] for name in names}, split / file)
    index = {"weight_map": {name: file for file, names in halves.items() for name in names}}
    (split / "model.safetensors.index.json").write_text(json.dumps(index))
    assert base_fingerprint(str(split)) == found
    save_file({name: tensor.clone().mul_(1.01) for name, tensor in tensors.items()}, model / "model.safetensors")
    assert base_fingerprint(str(model)) != found
    assert base_fingerprint(str(tmp_path)) is None
    (model / "model.safetensors").write_bytes(b"short")
    assert base_fingerprint(str(model)) is None
