"""Checkpoints: directories that Hugging Face or PEFT can load and that hold everything a resume needs.

`checkpoint-N/` holds the weights after step N (model.safetensors and config, or an adapter in PEFT's layout; tokenizer;
a card in README.md), `trainer_state.pt` (optimizer, objective and random state) and `trainer_state.json` (step, batch,
policy version, steps by version, settings, and the sizes and checksums of the other files). The learning rate is a
function of the updates counted there. A checkpoint is written under a temporary name, synced and renamed, so that a
directory named `checkpoint-N` is complete; damage after that shows in its checksums. `latest` points to the newest.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError  # torch raises it; the only unpickling is torch.load(weights_only=True)
from typing import TYPE_CHECKING, Any

from atropos_api.common.files import move_link, sync_path, write_directory
from example_trainer.checkpoint_model_files import (
    StoredTensors,
    damaged_file,
    file_checksums,
    model_card,
    raising_os_errors,
    write_model,
)
from example_trainer.errors import CheckpointError
from example_trainer.state import ObjectiveState, RandomState, Stateful, TrainerState, restore_random

if TYPE_CHECKING:
    import torch

    from example_trainer.config import TrainingConfig
    from example_trainer.modeling.policy import Policy

logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
TENSOR_STATE_FILE = "trainer_state.pt"
CARD_FILE = "README.md"
BEGUN_FILE = "run.json"
LATEST = "latest"
PREFIX = "checkpoint-"
COURSE_PREFIX = "checkpoint_step_"
COURSE_FINAL = "final_model"
REMEMBERED_VERSIONS = 1000

_NAME = re.compile(rf"{PREFIX}(\d+)")


def save_checkpoint(
    root: Path,
    state: TrainerState,
    policy: Policy,
    optimizer: Stateful,
    random: RandomState,
    *,
    objective: ObjectiveState | None = None,
    keep_last: int = 0,
) -> Path:
    """Write `checkpoint-<step>` under `root` and point `latest` to it; prune to `keep_last` when that is set.

    Raises `CheckpointError` if the files cannot be written; earlier checkpoints are then unchanged.
    """
    target = root / f"{PREFIX}{state.step}"
    tensors = {"optimizer": optimizer.state_dict(), "random": random, "objective": objective}
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root)
        with raising_os_errors(), write_directory(target, synced=True) as partial:
            _write_files(partial, state, policy, tensors)
        move_link(root / LATEST, target.name)
        sync_path(root)
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error}; free the space or set --save-path") from error
    if keep_last:
        _prune(root, keep_last, state.step)
    return target


def link_as_course(root: Path, *, final: str | None = None) -> None:
    """Link the checkpoints under `root` by the CS336 course's names: checkpoint_step_N, and final_model for `final`.

    Raises `CheckpointError` if a link cannot be made; the checkpoints are whole then.
    """
    wanted = {COURSE_PREFIX + path.name.removeprefix(PREFIX): path.name for path in list_checkpoints(root)}
    try:
        for link in root.glob(f"{COURSE_PREFIX}*"):
            if link.is_symlink() and not link.exists():
                link.unlink()  # its checkpoint was pruned
        for name, target in (wanted | ({COURSE_FINAL: final} if final else {})).items():
            move_link(root / name, target)
    except OSError as error:
        raise CheckpointError(
            f"cannot link the checkpoints by the course's names: {error}; free the space, or remove a directory that "
            "has such a name, as a copy that follows links makes it"
        ) from error


def find_checkpoint(resume: str | None, root: Path) -> Path | None:
    """Return the checkpoint for `--resume`: the one at a path, or for `auto` the newest undamaged one of the run.

    `auto` returns None if there is no checkpoint. Raises `CheckpointError`, which names the fault, for a path without
    a checkpoint or with a damaged one, and for `auto` if all are damaged: a new start would need batches that the
    broker no longer has.
    """
    if resume is None:
        return None
    if resume == "auto":
        return _newest_whole(root)
    path = Path(resume)
    path = path if (path / STATE_FILE).exists() else path / LATEST
    if not (path / STATE_FILE).exists():
        raise CheckpointError(f"--resume {resume}: no {STATE_FILE} there; name a checkpoint-N directory, or auto")
    path = path.resolve()
    if fault := fault_of(path):
        raise CheckpointError(f"--resume {resume}: {path.name} is damaged: {fault}; resume from another, or with auto")
    return path


def continue_at(root: Path, checkpoint: Path) -> None:
    """Point `latest` to the checkpoint of `root` that a run resumes from, as it may be killed before it writes another.

    Without this `--resume auto` would take a checkpoint of a higher step, from which the run had gone back.
    """
    if checkpoint.parent.resolve() != root.resolve():
        return
    link = root / LATEST
    if link.is_dir() and not link.is_symlink():
        raise CheckpointError(
            f"{link} is a directory and not a link, as a copy that follows links makes it; remove it (its files are "
            "those of a checkpoint-N beside it) and resume again"
        )
    try:
        move_link(link, checkpoint.name)
        sync_path(root)
    except OSError as error:
        raise CheckpointError(f"cannot write {link}: {error}; free the space or set --save-path") from error


def note_begun(config: TrainingConfig, run_id: str, version: int) -> None:
    """Record in the checkpoint directory that the run has begun at the broker, and the newest version it has used.

    This is written before a server gets weights under `version`: a trainer and server killed during a publish leave
    tokens of a version that neither the broker nor a checkpoint has recorded.
    """
    root = config.checkpoint_root
    partial = root / f".{BEGUN_FILE}.part"
    content = {"name": config.name, "run_id": run_id, "version": version}
    try:
        root.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(content) + "\n", encoding="utf-8")
        sync_path(partial)
        partial.rename(root / BEGUN_FILE)
        sync_path(root)  # else a power failure could bring back the older record, and the version would be used again
    except OSError as error:
        raise CheckpointError(
            f"cannot write {root / BEGUN_FILE}: {error}; free the space or set --save-path"
        ) from error


def begun_version(config: TrainingConfig) -> int | None:
    """Return the newest version that a run of this name has used here; None if no such run has begun."""
    try:
        begun = json.loads((config.checkpoint_root / BEGUN_FILE).read_text(encoding="utf-8"))
        return int(begun["version"]) if begun["name"] == config.name else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def fault_of(checkpoint: Path) -> str | None:
    """Return the reason why a checkpoint cannot be resumed from, or None if it is undamaged."""
    try:
        state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
        return damaged_file(checkpoint, state["files"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{STATE_FILE} cannot be read ({type(error).__name__}: {error})"


def list_checkpoints(root: Path) -> list[Path]:
    """Return the checkpoint directories under `root`, lowest step first, without checking their content."""
    found = [path for path in root.glob(f"{PREFIX}*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_step_of)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(PREFIX))


def read_state(checkpoint: Path) -> TrainerState:
    try:
        saved = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
        # A field with a default may be missing: it was introduced after the checkpoint was written.
        return TrainerState(**{name: saved[name] for name in TrainerState.__slots__ if name in saved})
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint / STATE_FILE} cannot be read: {error}; resume from another checkpoint"
        ) from error


def restore(
    checkpoint: Path, policy: Policy, optimizer: torch.optim.Optimizer, *, rank: int = 0
) -> ObjectiveState | None:
    """Load weights, optimizer and random state of a checkpoint into a prepared policy.

    Returns the state of the objective, None if the checkpoint has none.
    """
    import torch

    from example_trainer.modeling.loading import refuse_nonfinite
    from example_trainer.modeling.optimizers import load_state

    tensors = policy.by_own_names(StoredTensors(checkpoint))
    refuse_nonfinite(((name, tensors[name]) for name in policy.masters if name in tensors), f"--resume {checkpoint}")
    try:
        saved = torch.load(
            checkpoint / TENSOR_STATE_FILE, map_location="cpu", weights_only=True, mmap=policy.is_sharded
        )
        load_state(optimizer, _as_held(saved["optimizer"], policy, optimizer))
    except UnpicklingError as error:
        raise CheckpointError(
            f"{checkpoint / TENSOR_STATE_FILE} holds more than tensors and numbers, which is not executed; take a "
            "checkpoint from a source that you trust"
        ) from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"the optimizer state in {checkpoint} cannot be loaded ({error}); resume with the --optimizer, the "
            "--master-weights and the trained layers that it was written with"
        ) from error
    policy.load_masters(tensors)  # after all else that may fail, so that served weights are never half replaced
    restore_random(saved["random"], rank=rank)
    objective: ObjectiveState | None = saved.get("objective")
    return objective


def _as_held(state: dict[str, Any], policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a checkpoint's optimizer state as this process needs it: only its shard if the policy is sharded."""
    if not policy.is_sharded:
        return state
    from example_trainer.modeling.shards import shard_optimizer_state

    return shard_optimizer_state(state, optimizer)


def remembered(steps_by_version: Mapping[int, int]) -> dict[str, int]:
    """Return the newest 1000 versions with their steps, with string keys as JSON requires."""
    newest = sorted(steps_by_version)[-REMEMBERED_VERSIONS:]
    return {str(version): steps_by_version[version] for version in newest}


def _newest_first(root: Path) -> list[Path]:
    """Return the checkpoints, highest step first; those of higher steps than `latest` points to come after all others.

    Those were left by a resume from an earlier step, or by a kill just before `latest` was moved. The second case costs
    only the steps since the checkpoint before, whose batches the broker still has. The files' times cannot tell the two
    cases apart: a copy of the run has new times, and a clock may be set back.
    """
    found, link = list_checkpoints(root)[::-1], root / LATEST
    last = _NAME.fullmatch(link.readlink().name) if link.is_symlink() else None
    if last is None:
        return found
    left = [path for path in found if _step_of(path) > int(last[1])]
    if left:
        logger.warning("%s points to %s, so %s are not continued", link, last[0], ", ".join(path.name for path in left))
    return [*(path for path in found if path not in left), *left]


def _newest_whole(root: Path) -> Path | None:
    faults: list[str] = []
    for path in _newest_first(root):
        fault = fault_of(path)
        if fault is None:
            return path
        logger.warning("--resume auto skips %s, which is damaged: %s", path.name, fault)
        faults.append(f"{path.name}: {fault}")
    if faults:
        raise CheckpointError(
            f"--resume auto: every checkpoint under {root} is damaged ({'; '.join(faults)}); put an undamaged one "
            "there, or start a new run in another --run-dir"
        )
    return None


def _write_files(directory: Path, state: TrainerState, policy: Policy, tensors: dict[str, Any]) -> None:
    """Write all files of a checkpoint; the state file comes last, since it holds the others' checksums."""
    import torch

    write_model(directory, policy)
    with (directory / TENSOR_STATE_FILE).open("wb") as file:
        torch.save(tensors, file)
    card = model_card(state, policy.tokenizer_name, adapter=policy.has_adapter)
    (directory / CARD_FILE).write_text(card, encoding="utf-8")
    text = json.dumps({**asdict(state), "batch": state.batch, "files": file_checksums(directory)}, indent=2)
    (directory / STATE_FILE).write_text(text + "\n", encoding="utf-8")


def _remove_leftovers(root: Path) -> None:
    """Remove the temporary directories of a process that was killed while it wrote a checkpoint."""
    for path in root.glob(f".{PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def _prune(root: Path, keep_last: int, step: int) -> None:
    """Remove all but the last ones up to `step`; those of higher steps, which a resume left behind, are not counted."""
    reached = [path for path in list_checkpoints(root) if _step_of(path) <= step]
    for path in reached[:-keep_last]:
        shutil.rmtree(path, ignore_errors=True)
        logger.info("removed %s (--keep-last %d)", path, keep_last)
