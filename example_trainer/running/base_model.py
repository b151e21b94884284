"""The model that a run begins with: a directory, a name on the hub, or a base that is made on this machine."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from example_trainer.errors import ModelNotFound
from example_trainer.running.interpreter import python_path
from example_trainer.running.supervisor import ChildSpec

BASE_MODEL = "base-model"


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalBase:
    """A base model that is made on this machine: `tiny/chain`, or `tiny/chain:1` for another seed."""

    task: str
    seed: int

    @property
    def spec(self) -> ChildSpec:
        command = (sys.executable, "-m", "example_trainer.tiny", "--task", self.task, "--seed", str(self.seed))
        # Two threads, as the recipe was measured; nothing else runs meanwhile.
        return ChildSpec(
            name=BASE_MODEL,
            command=command,
            environment={"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "2"},
            ends_by_itself=True,
            watch_descendants=False,
        )


def local_base(model_name: str) -> LocalBase | None:
    """The locally made base that `model_name` means, if it means one."""
    match = re.fullmatch(r"tiny/([a-z]+)(?::(\d+))?", model_name)
    if match is None or Path(model_name).exists():
        return None
    return LocalBase(task=match[1], seed=int(match[2] or 0))


def require_model(model_name: str) -> str:
    """`model_name`, made absolute if it is a directory; refuses a path at which there is no model."""
    path = Path(model_name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"--model-name {model_name}: the directory holds no config.json, so it is no model")
        return str(path.absolute())
    if model_name.startswith(("/", ".", "~")) or model_name.count("/") > 1:
        raise ModelNotFound(f"--model-name {model_name}: no such directory, and not the form of a Hugging Face id")
    return model_name
