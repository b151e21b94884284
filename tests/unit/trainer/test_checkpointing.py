"""Checkpoints: whole or absent, loadable by anyone, found again, refused with a reason."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from example_trainer import checkpointing
from example_trainer.checkpoint_model_files import StoredTensors, read_tensors
from example_trainer.checkpointing import (
    begun_version,
    find_checkpoint,
    list_checkpoints,
    note_begun,
    read_state,
    remembered,
    restore,
    save_checkpoint,
)
from example_trainer.commands.doctor.model_files import OTHER_TOKENIZERS
from example_trainer.config import TrainingConfig
from example_trainer.errors import CheckpointError, NonfiniteWeights, PublishFailed
from example_trainer.model import load_policy
from example_trainer.modeling.loading import PolicyOptions
from example_trainer.modeling.lora import AdapterOptions
from example_trainer.modeling.policy import Policy
from example_trainer.state import TrainerState, random_state, restore_random
from example_trainer.weights.served_model import write_served_checkpoint
from tests.full_disk import files_of_at_most


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

    monkeypatch.setattr(checkpointing, "write_model", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(tmp_path, policy, 2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-1"]
    assert (tmp_path / "latest").readlink() == Path("checkpoint-1")


@pytest.mark.parametrize("room", [0.5, 1.5])
def test_a_disk_that_fills_up_in_the_middle_of_a_file_is_one_line(policy: Policy, tmp_path: Path, room: float) -> None:
    """Safetensors and torch each raise an error of their own for it; the state of Adam is twice the model."""
    size_bytes = sum(master.numel() * master.element_size() for master in policy.masters.values())
    save(tmp_path, policy, 1)
    with files_of_at_most(int(room * size_bytes)):
        with pytest.raises(CheckpointError, match=r"cannot write .*checkpoint-2: .*[Tt]oo large.*; free the space"):
            save(tmp_path, policy, 2)
        if room < 1:
            with pytest.raises(PublishFailed, match=r"cannot write .*too large.*; free the space"):
                write_served_checkpoint(policy, tmp_path / "served")
    assert find_checkpoint("auto", tmp_path) == tmp_path / "checkpoint-1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "latest"], (
        "the part gives its room back"
    )


class Disk:
    """Records the synced and renamed paths, in order."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, str]] = []
        fsync, rename = os.fsync, Path.rename

        def noted_fsync(descriptor: int) -> None:
            place = Path(f"/proc/self/fd/{descriptor}").readlink().relative_to(root)
            self.events.append(("sync", str(place)))
            fsync(descriptor)

        def noted_rename(path: Path, target: Path) -> Path:
            self.events.append(("rename", str(Path(target).relative_to(root))))
            return rename(path, target)

        monkeypatch.setattr(os, "fsync", noted_fsync)
        monkeypatch.setattr(Path, "rename", noted_rename)


def test_every_file_of_a_checkpoint_is_on_the_disk_before_it_has_its_name_and_the_name_after(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a power failure could leave a checkpoint of that name with empty files in it."""
    disk = Disk(tmp_path, monkeypatch)
    path = save(tmp_path, policy, 1)
    renamed = disk.events.index(("rename", "checkpoint-1"))
    beside = ".checkpoint-1.part"
    before = {name for kind, name in disk.events[:renamed] if kind == "sync"}
    assert before == {beside, *(f"{beside}/{file.name}" for file in path.iterdir())}
    assert disk.events[renamed - 1] == ("sync", beside), "the folder's entries last"
    assert disk.events[-2:] == [("rename", "latest"), ("sync", ".")]


def test_the_version_that_is_about_to_be_published_is_on_the_disk_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path, monkeypatch)
    config = TrainingConfig(model_name="m", name="n", run_dir=tmp_path)
    note_begun(config, "r", 7)
    assert disk.events == [("sync", ".run.json.part"), ("rename", "run.json"), ("sync", ".")]
    assert begun_version(config) == 7


class Poison:
    """An object that creates a folder when it is unpickled, as an attacker's would run a program."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return Path.mkdir, (self._folder,)


def test_a_machine_with_fewer_gpus_takes_the_random_states_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda.random, "set_rng_state", lambda state, device: seeded.append((state, device)))
    restore_random({"cpu": torch.get_rng_state(), "cuda": ["first", "second"]})
    assert seeded == [("first", 0)]


@pytest.mark.parametrize("where", ["optimizer", "random"])
def test_a_poisoned_checkpoint_is_refused_and_not_executed(policy: Policy, tmp_path: Path, where: str) -> None:
    path = save(tmp_path, policy, 1)
    saved = torch.load(path / "trainer_state.pt", weights_only=True)
    torch.save(saved | {where: Poison(tmp_path / "executed")}, path / "trainer_state.pt")
    with pytest.raises(CheckpointError, match=r"trainer_state\.pt holds more than tensors and numbers"):
        restore(path, policy, stepped_optimizer(policy))
    assert not (tmp_path / "executed").exists()


def test_latest_follows_and_nothing_is_pruned_unless_asked(policy: Policy, tmp_path: Path) -> None:
    for step in (2, 10, 9):
        save(tmp_path, policy, step)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-9", "checkpoint-10"]
    save(tmp_path, policy, 11, keep_last=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-10", "checkpoint-11"]


def test_experts_that_a_checkpoint_stores_one_by_one_come_back(
    tiny_family: Callable[[str], Path], tmp_path: Path
) -> None:
    """Transformers computes with all experts of a layer in one tensor, which the checkpoint does not have."""
    policy = load_policy(PolicyOptions(model_name=str(tiny_family("mixtral")), dtype="float32", device="cpu"))
    optimizer = stepped_optimizer(policy)
    path = save_checkpoint(tmp_path, make_state(1), policy, optimizer, random_state())
    before = {name: master.detach().clone() for name, master in policy.masters.items()}
    with torch.no_grad():
        for master in policy.masters.values():
            master.zero_()
    restore(path, policy, optimizer)
    assert all(torch.equal(master, before[name]) for name, master in policy.masters.items())
    lost = StoredTensors(path)
    name = next(name for name in lost if ".experts.3." in name)
    with pytest.raises(CheckpointError, match="lacks 1 trained tensors"):
        policy.load_masters(policy.by_own_names({key: lost[key] for key in lost if key != name}))


@pytest.mark.parametrize(("dtype", "master_weights"), [("float32", "fp32"), ("bfloat16", "fp32"), ("bfloat16", "none")])
def test_a_server_gets_the_experts_of_a_mixture_one_by_one(
    tiny_family: Callable[[str], Path], tmp_path: Path, dtype: Any, master_weights: Any
) -> None:
    """They are parts of one tensor of the trainer, whose memory they share if they need no cast."""
    model = tiny_family("mixtral")
    options = PolicyOptions(model_name=str(model), dtype=dtype, device="cpu", master_weights=master_weights)
    served = read_tensors(write_served_checkpoint(load_policy(options), tmp_path / "served"))
    stored = read_tensors(model)
    assert served.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name].to(getattr(torch, dtype))) for name, tensor in served.items())


@pytest.mark.parametrize("name", ["tokenizer_config.json", *OTHER_TOKENIZERS])
def test_a_tokenizer_beside_the_model_is_kept_beside_the_checkpoint(
    policy: Policy, tiny_model: Path, tmp_path: Path, name: str
) -> None:
    """Also one of the forms without a tokenizer.json, with which the doctor is content."""
    (tiny_model / name).write_text("{}")
    try:
        path = save(tmp_path, policy, 1)
    finally:
        (tiny_model / name).unlink()
    assert (path / name).read_text() == "{}"
    assert json.loads((path / "config.json").read_text())["dtype"] == "float32"


def test_a_hub_that_refuses_its_tokenizer_later_fails_no_checkpoint(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token of a private model may end during a run, and that is no reason to lose its steps."""
    answers = iter([SimpleNamespace(save_pretrained=lambda folder: (folder / "tokenizer.json").write_text("{}"))])
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda _: next(answers))
    monkeypatch.setattr(policy, "tokenizer_name", "owner/a-private-model")
    for step in (1, 2):
        assert (save(tmp_path, policy, step) / "tokenizer.json").exists()


def test_the_model_s_end_tokens_are_in_each_copy_that_a_server_loads(
    policy: Policy, tiny_model: Path, tmp_path: Path
) -> None:
    """A server of a copy without them went on after an end token that config.json does not name."""
    own = tiny_model / "generation_config.json"
    before = own.read_text() if own.exists() else None
    own.write_text('{"eos_token_id": [5, 6]}')
    try:
        copies = [save(tmp_path, policy, 1), write_served_checkpoint(policy, tmp_path / "served")]
        own.unlink()
        without = write_served_checkpoint(policy, tmp_path / "without")
    finally:
        own.unlink(missing_ok=True)
        if before is not None:
            own.write_text(before)
    assert [json.loads((copy / own.name).read_text())["eos_token_id"] for copy in copies] == [[5, 6]] * 2
    assert not (without / own.name).exists()


def test_what_a_killed_writer_left_is_not_a_checkpoint_and_goes_with_the_next_one(
    policy: Policy, tmp_path: Path
) -> None:
    left = tmp_path / ".checkpoint-7.part"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    assert find_checkpoint("auto", tmp_path) is None
    save(tmp_path, policy, 8)
    assert not left.exists()


def test_a_damaged_state_is_one_line(policy: Policy, tmp_path: Path) -> None:
    path = save(tmp_path, policy, 1)
    (path / "trainer_state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_state(path)


def test_a_checkpoint_older_than_a_field_of_its_state_is_read(policy: Policy, tmp_path: Path) -> None:
    path = save(tmp_path, policy, 1)
    saved = json.loads((path / "trainer_state.json").read_text())
    del saved["loss_scale"]
    (path / "trainer_state.json").write_text(json.dumps(saved))
    assert read_state(path).loss_scale is None


def test_a_card_says_what_the_weights_are_and_how_they_were_trained(policy: Policy, tmp_path: Path) -> None:
    config = TrainingConfig(model_name="m", optimizer="adafactor").model_dump(mode="json")
    state = replace(make_state(3), config=config)
    path = save_checkpoint(tmp_path, state, policy, stepped_optimizer(policy), random_state())
    card = (path / "README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    assert (head["library_name"], head["base_model"]) == ("transformers", policy.tokenizer_name)
    assert "step 3" in card
    assert "| optimizer | adafactor |" in card


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


def test_an_adapter_is_stored_as_peft_stores_it_and_comes_back_with_its_optimizer(
    tiny_model: Path, tmp_path: Path
) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    options = PolicyOptions(
        model_name=str(tiny_model), dtype="bfloat16", device="cpu", adapter=AdapterOptions(r=4, dropout=0.1)
    )
    policy = load_policy(options)
    optimizer = stepped_optimizer(policy)
    path = save_checkpoint(tmp_path, make_state(3), policy, optimizer, random_state())
    files = {file.name for file in path.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "trainer_state.json", "README.md"} <= files
    assert not {"model.safetensors", "config.json"} & files
    fresh = load_policy(options)
    other = stepped_optimizer(fresh)
    restore(path, fresh, other)
    assert all(torch.equal(fresh.masters[name], master) for name, master in policy.masters.items())
    assert all(master.dtype == torch.float32 for master in fresh.masters.values())
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    foreign = peft.PeftModel.from_pretrained(base, path)
    stored = peft.get_peft_model_state_dict(foreign)
    assert all(torch.equal(stored[name], master) for name, master in policy.masters.items())


def test_a_checkpoint_with_weights_that_are_not_finite_is_not_resumed_from(policy: Policy, tmp_path: Path) -> None:
    name, master = next(iter(policy.masters.items()))
    with torch.no_grad():
        master.view(-1)[0] = torch.nan
    checkpoint = save(tmp_path, policy, 1)
    with torch.no_grad():
        master.view(-1)[0] = 0.5
    with pytest.raises(NonfiniteWeights, match=rf"--resume .*checkpoint-1: {name} has values"):
        restore(checkpoint, policy, stepped_optimizer(policy))
    assert torch.isfinite(master).all(), "nothing is loaded"
