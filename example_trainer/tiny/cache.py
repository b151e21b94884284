"""Base models are found here: that of the demo comes with the package, others are made once and cached.

A cached model is found by a key over everything that shapes it: the sources of this package and of the tasks, the
versions of the libraries that train it, the task and the seed. It is made next to its place and renamed, under a lock,
so that two processes that want the same one make it once.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from environments.tasks.arithmetic import TaskName
from example_trainer.errors import TrainerError

SHIPPED_BASES = Path(__file__).parent / "bases"
"""Folder of the models that come with the package, each in a folder `TASK-SEED`."""
REPORT_FILE = "base.json"
WEIGHTS_FILE = "model.safetensors"
THREADS = 2  # fixed, because the last digits of the weights depend on it


@dataclass(frozen=True, slots=True)
class BaseReport:
    """The figures of a made base model, written into its folder as `base.json`."""

    task: str
    seed: int
    weights_sha256: str
    pass_rate: float
    greedy_accuracy: float
    mean_length_tokens: float
    seconds: float
    recipe: str
    """The key of the recipe that made it; see `recipe_key`."""


class BaseNotWritten(TrainerError):
    """A folder for the base model cannot be written."""


def find_base(task: TaskName, seed: int = 0, cache_dir: Path | None = None) -> Path | None:
    """Return the folder of the base model for `task` and `seed`, if the package or the cache has it."""
    shipped = SHIPPED_BASES / f"{task}-{seed}"
    if is_complete(shipped):
        return shipped
    target = _place_of(task, seed, cache_dir)
    return target if is_complete(target) else None


def ensure_base(task: TaskName, seed: int = 0, cache_dir: Path | None = None) -> Path:
    """Return the folder of the base model for `task` and `seed`, made now if it does not exist yet."""
    found = find_base(task, seed, cache_dir)
    if found is not None:
        return found
    target = _place_of(task, seed, cache_dir)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(target.parent / f"{target.name}.lock"):
            if not is_complete(target):
                _make(task, seed, target)
    except OSError as error:
        raise BaseNotWritten(
            f"the cache {target.parent} cannot be written ({error}); name another with --cache-dir or $ATROPOS_CACHE"
        ) from error
    return target


def copy_base(source: Path, directory: Path) -> None:
    """Copy a cached model into `directory`, which may be empty or hold a base of an earlier call."""
    try:
        if directory.exists() and any(directory.iterdir()) and not is_complete(directory):
            raise BaseNotWritten(f"--out {directory}: holds other files; name a new or an empty folder")
        shutil.copytree(source, directory, dirs_exist_ok=True)
    except OSError as error:
        raise BaseNotWritten(f"--out {directory}: cannot be written ({error}); name another folder") from error


def read_report(directory: Path) -> BaseReport:
    return BaseReport(**json.loads((directory / REPORT_FILE).read_text()))


def write_report(directory: Path, report: BaseReport) -> None:
    (directory / REPORT_FILE).write_text(json.dumps(asdict(report), indent=2) + "\n")


def is_complete(directory: Path) -> bool:
    return (directory / REPORT_FILE).is_file() and (directory / WEIGHTS_FILE).is_file()


def default_cache_dir() -> Path:
    """Return the folder of all made models; raise `BaseNotWritten` if this user has no home directory for it."""
    try:
        return Path(os.environ.get("ATROPOS_CACHE") or "~/.cache/atropos").expanduser()
    except RuntimeError as error:
        raise BaseNotWritten(f"the cache has no place ({error}); name one with --cache-dir or $ATROPOS_CACHE") from None


def content_key(task: TaskName, seed: int) -> str:
    """Return a short hash over everything that shapes a model: task, seed, recipe and libraries."""
    libraries = [f"{name}=={version(name)}" for name in ("torch", "transformers", "tokenizers")]
    return sha256("/".join([task, str(seed), *libraries, recipe_key()]).encode()).hexdigest()[:12]


def recipe_key() -> str:
    """Return a short hash over the sources that make a model."""
    digest = sha256()
    for source in _recipe_sources():
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


def _place_of(task: TaskName, seed: int, cache_dir: Path | None) -> Path:
    return (cache_dir or default_cache_dir()) / "tiny" / f"{task}-{seed}-{content_key(task, seed)}"


def _recipe_sources() -> list[Path]:
    here = Path(__file__).parent
    modules = [here / f"{name}.py" for name in ("make", "model", "muon", "teacher", "tokenizer", "warmup")]
    import environments.tasks.arithmetic as tasks

    return [*modules, Path(tasks.__file__)]


def _make(task: TaskName, seed: int, target: Path) -> None:
    """Make the model in a process of its own: its thread settings must be set before torch is loaded."""
    # Threads that spin while they wait cost five times the time on a machine that is busy with something else.
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "OMP_WAIT_POLICY": "PASSIVE"}
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        made = Path(scratch) / "base"
        command = [sys.executable, "-m", "example_trainer.tiny.make", task, str(seed), str(made)]
        subprocess.run(command, env=environment, check=True, stdout=sys.stderr)
        if target.exists():
            shutil.rmtree(target)
        made.rename(target)


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
