"""Checkpoints: a Hugging Face directory that anyone can load, and beside it all that a resume needs.

`checkpoint-N/` holds the weights after step N (model.safetensors, config, tokenizer), `trainer_state.json` (step,
batch, policy version, versions by step) and `trainer_state.pt` (optimizer and random state). It is written beside its
place, synced and renamed, so that a directory of that name is always whole. `latest` points to the newest.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from example_trainer.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from example_trainer.model import Policy

logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
TENSOR_STATE_FILE = "trainer_state.pt"
LATEST = "latest"
PREFIX = "checkpoint-"
COURSE_PREFIX = "checkpoint_step_"
COURSE_FINAL = "final_model"
REMEMBERED_VERSIONS = 1000
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)


RandomState = dict[str, Any]
ObjectiveState = dict[str, Any]
"""What the objective carries from batch to batch: tensors and numbers, as `Objective.state` gives them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerState:
    """The small part of a checkpoint; batch n is step n."""

    step: int
    updates: int
    """Optimizer steps taken; fewer than steps when some had nothing to learn."""
    policy_version: int | None
    """The version that these very weights were published under; null if they were not."""
    highest_version: int
    run_id: str
    run_name: str
    seed: int
    steps_by_version: dict[str, int] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        """The last batch that this checkpoint covers."""
        return self.step


def random_state() -> RandomState:
    """The state of torch's generators now; a checkpoint written in the background must not look at them later."""
    import torch

    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def save_checkpoint(
    root: Path,
    state: TrainerState,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    random: RandomState,
    *,
    objective: ObjectiveState | None = None,
    keep_last: int = 0,
) -> Path:
    """Write `checkpoint-<step>` under `root` and point `latest` to it; prune to `keep_last` when that is set."""
    target = root / f"{PREFIX}{state.step}"
    beside = root / f".{PREFIX}{state.step}.part"
    try:
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        _write_model(beside, policy)
        _write_state(beside, state, {"optimizer": optimizer.state_dict(), "random": random, "objective": objective})
        _sync_tree(beside)
        shutil.rmtree(target, ignore_errors=True)
        beside.rename(target)
        _point(root / LATEST, target.name)
        _sync(root)
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error}; free the space or set --save-path") from error
    if keep_last:
        _prune(root, keep_last)
    return target


def find_checkpoint(resume: str | None, root: Path) -> Path | None:
    """The checkpoint that `--resume` means: `auto` takes the newest under `root`, if any; a path must hold one."""
    if resume is None:
        return None
    if resume != "auto":
        path = Path(resume)
        path = path if (path / STATE_FILE).exists() else path / LATEST
        if not (path / STATE_FILE).exists():
            raise CheckpointError(f"--resume {resume}: no {STATE_FILE} there; name a checkpoint-N directory, or auto")
        return path.resolve()
    found = list_checkpoints(root)
    return found[-1] if found else None


def list_checkpoints(root: Path) -> list[Path]:
    """Whole checkpoints under `root`, oldest step first."""
    found = [path for path in root.glob(f"{PREFIX}*") if (path / STATE_FILE).exists()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(PREFIX)))


def read_state(checkpoint: Path) -> TrainerState:
    try:
        saved = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
        return TrainerState(**{name: saved[name] for name in TrainerState.__slots__})
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{checkpoint / STATE_FILE} cannot be read: {error}") from error


def restore(checkpoint: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> ObjectiveState | None:
    """Load weights, optimizer and random state of a checkpoint into a policy that has been prepared.

    Gives back the state of the objective, None where the checkpoint has none.
    """
    import torch

    policy.load_masters(_read_tensors(checkpoint))
    try:
        saved = torch.load(checkpoint / TENSOR_STATE_FILE, map_location="cpu", weights_only=True)
        optimizer.load_state_dict(saved["optimizer"])
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"the optimizer state in {checkpoint} cannot be loaded ({error}); resume with the --optimizer and the "
            "trained layers that it was written with"
        ) from error
    torch.set_rng_state(saved["random"]["cpu"])
    if torch.cuda.is_available() and saved["random"]["cuda"]:
        torch.cuda.set_rng_state_all(saved["random"]["cuda"])
    objective: ObjectiveState | None = saved.get("objective")
    return objective


def remembered(steps_by_version: Mapping[int, int]) -> dict[str, int]:
    """The newest versions with their steps, as JSON can hold them."""
    newest = sorted(steps_by_version)[-REMEMBERED_VERSIONS:]
    return {str(version): steps_by_version[version] for version in newest}


def _write_model(directory: Path, policy: Policy) -> None:
    tensors = policy.checkpoint_tensors()
    _write_tensors(directory, tensors)
    config = policy.hf_config.to_dict()
    trained = next(iter(policy.masters))
    config["dtype"] = str(tensors.get(trained, next(iter(tensors.values()))).dtype).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    _copy_tokenizer(policy.tokenizer_name, directory)


def _write_tensors(directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """One safetensors file, or several with an index where the model is large."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    split = split_torch_state_dict_into_shards(dict(tensors))
    for file, names in split.filename_to_tensors.items():
        save_file({name: tensors[name] for name in names}, directory / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _copy_tokenizer(name: str, directory: Path) -> None:
    source = Path(name)
    if source.is_dir():
        for file in TOKENIZER_FILES:
            if (source / file).exists():
                shutil.copyfile(source / file, directory / file)
        return
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(name).save_pretrained(directory)


def _write_state(directory: Path, state: TrainerState, tensors: dict[str, Any]) -> None:
    import torch

    torch.save(tensors, directory / TENSOR_STATE_FILE)
    text = json.dumps({**asdict(state), "batch": state.batch}, indent=2)
    (directory / STATE_FILE).write_text(text + "\n", encoding="utf-8")


def _read_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    files = sorted(checkpoint.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{checkpoint} holds no safetensors file")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors |= load_file(file)
    return tensors


def _sync_tree(directory: Path) -> None:
    for path in directory.iterdir():
        _sync(path)
    _sync(directory)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _point(link: Path, target: str) -> None:
    """Make `link` a symbolic link to `target` beside it, in one step."""
    beside = link.with_name(f".{link.name}.part")
    beside.unlink(missing_ok=True)
    beside.symlink_to(target, target_is_directory=True)
    beside.rename(link)


def link_as_course(root: Path, *, final: str | None = None) -> None:
    """Name the checkpoints under `root` as the CS336 course does: checkpoint_step_N, and final_model for `final`."""
    for link in root.glob(f"{COURSE_PREFIX}*"):
        if link.is_symlink() and not link.exists():
            link.unlink()  # pruned
    wanted = {COURSE_PREFIX + path.name.removeprefix(PREFIX): path.name for path in list_checkpoints(root)}
    for name, target in (wanted | ({COURSE_FINAL: final} if final else {})).items():
        _point(root / name, target)


def _prune(root: Path, keep_last: int) -> None:
    for path in list_checkpoints(root)[:-keep_last]:
        shutil.rmtree(path, ignore_errors=True)
        logger.info("removed %s (--keep-last %d)", path, keep_last)
