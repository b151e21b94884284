"""Files of the state that an environment saves for a resumed run: a JSON file per saved trainer step.

They are stored next to the trainer's checkpoints, in a folder for each environment process.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from atropos_api.common.files import write_whole
from environments.sdk.errors import EnvironmentsError


class StateUnreadable(EnvironmentsError):
    """The state that an environment saved for a resumed run cannot be read."""


def path_of(checkpoint_dir: Path, name: str, step: int) -> Path:
    return checkpoint_dir / "env_checkpoints" / name / f"step-{step}.json"


def save_state(checkpoint_dir: Path, name: str, step: int, data: dict[str, Any]) -> None:
    """Write the state atomically: the file is complete or absent."""
    path = path_of(checkpoint_dir, name, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(data))


def load_state(checkpoint_dir: Path, name: str, step: int) -> dict[str, Any]:
    """Return the newest state saved at or before `step`; an empty dictionary when there is none."""
    folder = path_of(checkpoint_dir, name, step).parent
    names = (path.stem.removeprefix("step-") for path in folder.glob("step-*.json"))
    steps = sorted(int(name) for name in names if name.isdecimal())  # a copy that someone keeps has another name
    usable = [saved for saved in steps if saved <= step]
    if not usable:
        return {}
    path = path_of(checkpoint_dir, name, usable[-1])
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StateUnreadable(
            f"{path}: the environment's state cannot be read ({error}); remove it to go on without"
        ) from error
    return state
