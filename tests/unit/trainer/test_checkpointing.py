"""Checkpoints: whole or absent, loadable by anyone, found again, refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from example_trainer import checkpointing
from example_trainer.checkpointing import (
    TrainerState,
    find_checkpoint,
    list_checkpoints,
    random_state,
    read_state,
    remembered,
    restore,
    save_checkpoint,
)
from example_trainer.errors import CheckpointError
from example_trainer.model import Policy


def make_state(step: int) -> TrainerState:
    return TrainerState(
        step=step, updates=step, policy_version=step + 1, highest_version=step + 1, run_id="r", run_name="n", seed=0
    )


def stepped_optimizer(policy: Policy) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(policy.masters.values(), lr=1e-2)
    for master in policy.masters.values():
        master.grad = torch.randn_like(master)
    optimizer.step()
    return optimizer


def save(root: Path, policy: Policy, step: int, *, keep_last: int = 0) -> Path:
    optimizer = stepped_optimizer(policy)
    return save_checkpoint(root, make_state(step), policy, optimizer, random_state(), keep_last=keep_last)


def test_weights_optimizer_and_random_state_come_back_bit_for_bit(policy: Policy, tmp_path: Path) -> None:
    optimizer = stepped_optimizer(policy)
    before = {name: master.detach().clone() for name, master in policy.masters.items()}
    path = save_checkpoint(tmp_path, make_state(3), policy, optimizer, random_state())
    drawn = torch.rand(4)
    fresh = stepped_optimizer(policy)
    restore(path, policy, fresh)
    assert torch.equal(torch.rand(4), drawn)
    assert all(torch.equal(master, before[name]) for name, master in policy.masters.items())
    for left, right in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_write_that_breaks_off_leaves_no_checkpoint_behind(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, policy, 1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpointing, "_write_state", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(tmp_path, policy, 2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-1"]
    assert (tmp_path / "latest").readlink() == Path("checkpoint-1")


def test_latest_follows_and_nothing_is_pruned_unless_asked(policy: Policy, tmp_path: Path) -> None:
    for step in (2, 10, 9):
        save(tmp_path, policy, step)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-9", "checkpoint-10"]
    save(tmp_path, policy, 11, keep_last=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-10", "checkpoint-11"]


def test_a_tokenizer_beside_the_model_is_kept_beside_the_checkpoint(
    policy: Policy, tiny_model: Path, tmp_path: Path
) -> None:
    (tiny_model / "tokenizer_config.json").write_text("{}")
    try:
        path = save(tmp_path, policy, 1)
    finally:
        (tiny_model / "tokenizer_config.json").unlink()
    assert (path / "tokenizer_config.json").read_text() == "{}"
    assert json.loads((path / "config.json").read_text())["dtype"] == "float32"


def test_resume_auto_takes_the_newest_or_none_and_a_path_must_hold_one(policy: Policy, tmp_path: Path) -> None:
    assert find_checkpoint(None, tmp_path) is None
    assert find_checkpoint("auto", tmp_path) is None
    save(tmp_path, policy, 1)
    newest = save(tmp_path, policy, 2)
    assert find_checkpoint("auto", tmp_path) == newest
    assert find_checkpoint(str(tmp_path), tmp_path) == newest
    assert find_checkpoint(str(tmp_path / "checkpoint-1"), tmp_path) == tmp_path / "checkpoint-1"
    with pytest.raises(CheckpointError, match="--resume /nowhere"):
        find_checkpoint("/nowhere", tmp_path)


def test_a_damaged_state_is_one_line(policy: Policy, tmp_path: Path) -> None:
    path = save(tmp_path, policy, 1)
    (path / "trainer_state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_state(path)


def test_another_optimizers_state_is_refused_with_the_flag_to_set(policy: Policy, tmp_path: Path) -> None:
    path = save(tmp_path, policy, 1)
    other = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    with pytest.raises(CheckpointError, match="--optimizer"):
        restore(path, policy, other)


def test_only_the_newest_versions_are_remembered() -> None:
    kept = remembered({version: version - 1 for version in range(1, 1500)})
    assert len(kept) == 1000
    assert kept["1499"] == 1498


def test_a_large_model_is_written_in_several_files_and_read_back(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    whole = huggingface_hub.split_torch_state_dict_into_shards
    monkeypatch.setattr(
        huggingface_hub, "split_torch_state_dict_into_shards", lambda tensors: whole(tensors, max_shard_size=8_000)
    )
    path = save(tmp_path, policy, 1)
    assert len(list(path.glob("*.safetensors"))) > 1
    assert (path / "model.safetensors.index.json").exists()
    before = {name: master.detach().clone() for name, master in policy.masters.items()}
    optimizer = torch.optim.AdamW(policy.masters.values())
    with torch.no_grad():
        for master in policy.masters.values():
            master.zero_()
    restore(path, policy, optimizer)
    assert all(torch.equal(master, before[name]) for name, master in policy.masters.items())
