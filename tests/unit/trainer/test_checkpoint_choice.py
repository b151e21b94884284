"""The choice of the checkpoint that a run goes on from: the one written last that is undamaged, or the one named."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from atropos_api.common.files import move_link
from example_trainer.checkpointing import continue_at, find_checkpoint, list_checkpoints
from example_trainer.errors import CheckpointError
from example_trainer.modeling.policy import Policy

from .test_checkpointing import save


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


def truncate(path: Path) -> None:
    with (path / "model.safetensors").open("r+b") as file:
        file.truncate(100)


def flip_a_byte(path: Path) -> None:
    with (path / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))


def lose_the_optimizer(path: Path) -> None:
    (path / "trainer_state.pt").unlink()


def empty_the_state(path: Path) -> None:
    (path / "trainer_state.json").write_text("")


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (truncate, "model.safetensors has 100 of"),
    (flip_a_byte, "model.safetensors has changed since it was written"),
    (lose_the_optimizer, "trainer_state.pt is missing"),
    (empty_the_state, "trainer_state.json cannot be read"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_resume_auto_passes_over_a_damaged_checkpoint_and_says_what_is_wrong_with_it(
    policy: Policy, tmp_path: Path, damage: Callable[[Path], None], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole, damaged = save(tmp_path, policy, 1), save(tmp_path, policy, 2)
    damage(damaged)
    with caplog.at_level(logging.WARNING):
        assert find_checkpoint("auto", tmp_path) == whole
    assert "skips checkpoint-2" in caplog.text
    assert words in caplog.text


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_a_damaged_checkpoint_named_by_path_is_one_line_with_what_is_wrong(
    policy: Policy, tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    path = save(tmp_path, policy, 1)
    damage(path)
    with pytest.raises(CheckpointError, match=words) as caught:
        find_checkpoint(str(path), tmp_path)
    assert "\n" not in str(caught.value)


def test_where_every_checkpoint_is_damaged_nothing_starts_over_quietly(policy: Policy, tmp_path: Path) -> None:
    truncate(save(tmp_path, policy, 1))
    with pytest.raises(CheckpointError, match="every checkpoint under"):
        find_checkpoint("auto", tmp_path)


def test_a_run_that_went_back_keeps_its_own_checkpoints_and_goes_on_from_them(
    policy: Policy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of higher steps were counted as the last ones: --keep-last deleted the checkpoint that it had just made."""
    for step in (3, 6, 9):
        save(tmp_path, policy, step)
    own = [save(tmp_path, policy, step, keep_last=2) for step in (4, 5)]
    assert [path.name for path in list_checkpoints(tmp_path)] == [f"checkpoint-{step}" for step in (4, 5, 6, 9)]
    with caplog.at_level(logging.WARNING):
        assert find_checkpoint("auto", tmp_path) == own[-1]
    assert "latest points to checkpoint-5, so checkpoint-9, checkpoint-6 are not continued" in caplog.text
    truncate(own[-1])
    assert find_checkpoint("auto", tmp_path) == own[0]
    assert save(tmp_path, policy, 6, keep_last=2) == find_checkpoint("auto", tmp_path)
    assert [path.name for path in list_checkpoints(tmp_path)] == [f"checkpoint-{step}" for step in (5, 6, 9)]


def test_a_run_that_was_killed_before_its_first_checkpoint_goes_back_again(policy: Policy, tmp_path: Path) -> None:
    back, *_ = (save(tmp_path, policy, step) for step in (3, 6))
    continue_at(tmp_path, back)
    assert find_checkpoint("auto", tmp_path) == back
    elsewhere = save(tmp_path / "other", policy, 9)
    continue_at(tmp_path, elsewhere)
    assert find_checkpoint("auto", tmp_path) == back


def test_a_copied_run_whose_latest_became_a_directory_says_what_to_remove(policy: Policy, tmp_path: Path) -> None:
    saved = save(tmp_path, policy, 3)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    with pytest.raises(CheckpointError, match=r"latest is a directory and not a link, .*remove it"):
        continue_at(tmp_path, saved)


def test_a_copy_of_a_run_that_went_back_goes_on_from_its_own_checkpoint(policy: Policy, tmp_path: Path) -> None:
    """The files' times decided, which `cp -r` makes anew and a clock that is set back puts in another order."""
    back, *left = (save(tmp_path, policy, step) for step in (3, 6))
    continue_at(tmp_path, back)
    for path in left:
        os.utime(path / "trainer_state.json")
    os.utime(tmp_path / "latest", ns=(0, 0), follow_symlinks=False)
    assert find_checkpoint("auto", tmp_path) == back


def test_a_checkpoint_that_latest_does_not_point_to_yet_is_resumed_if_there_is_no_other(
    policy: Policy, tmp_path: Path
) -> None:
    before, newest = (save(tmp_path, policy, step) for step in (1, 2))
    move_link(tmp_path / "latest", before.name)
    truncate(before)
    assert find_checkpoint("auto", tmp_path) == newest
