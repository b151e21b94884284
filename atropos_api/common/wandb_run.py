"""One W&B run for all programs of a launch: the trainer begins it, and the environments join it.

The launcher names the run in variables that W&B reads itself. Several processes may write one run in W&B's shared mode.
Without a network (`WANDB_MODE=offline`) each process writes a directory of its own, and all have the same run id; they
are sent one after the other. W&B's own step only increases, and in shared mode it cannot be set, so the trainer's step
is a metric in such a run, and the axis of all others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from atropos_api.common.metric_names import STEP

MODE, RUN_ID = "WANDB_MODE", "WANDB_RUN_ID"
DEFAULT_PROJECT = "atropos-grpo"
_SHARED = "shared"
_PRIMARY, _DIRECTORY = "WANDB__PRIMARY", "WANDB_DIR"
_NETWORK_MODES = frozenset({"", "online", _SHARED})
_FIRST_WITH_SHARED_MODE = (0, 19, 9)


def variables(run_id: str, *, project: str | None, label: str, is_primary: bool, directory: Path) -> dict[str, str]:
    """Return the variables by which one program writes this run; none if the installed W&B has no shared mode.

    Each program needs a directory of its own: offline runs of one id that begin in the same second have one path.
    """
    mode = os.environ.get(MODE, "")
    is_online = mode in _NETWORK_MODES
    if is_online and not has_shared_mode():
        return {}
    found = {RUN_ID: run_id, "WANDB_PROJECT": project or DEFAULT_PROJECT, "WANDB_RESUME": "allow"}
    found |= {_PRIMARY: str(is_primary).lower(), "WANDB__LABEL": label, _DIRECTORY: str(directory)}
    if is_online:
        # The run ends with the trainer, not with an environment.
        found |= {MODE: _SHARED, "WANDB__UPDATE_FINISH_STATE": str(is_primary).lower()}
    return found


def has_shared_mode() -> bool:
    """Return True if the installed W&B can write one run from several processes."""
    try:
        version = metadata.version("wandb")
    except metadata.PackageNotFoundError:
        return False
    numbers = [int(part) if part.isdigit() else 0 for part in version.split(".")[:3]]
    return tuple(numbers) >= _FIRST_WITH_SHARED_MODE


def arguments(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `wandb.init`: `own` if this process begins the run, else none, since the run has them."""
    if os.environ.get(_PRIMARY) != "false":
        return dict(own)
    if directory := os.environ.get(_DIRECTORY):
        Path(directory).mkdir(parents=True, exist_ok=True)  # W&B would use a temporary directory instead
    return {}


def prepare(run: Any) -> None:
    """Make the step the axis of all metrics, if several programs write the run."""
    if _has_several_writers():
        run.define_metric("*", step_metric=STEP)


def log(run: Any, metrics: Mapping[str, Any], step: int, *, newest: int = 0) -> None:
    """Log metrics of a step. W&B drops those of an earlier step than the `newest` logged: they are logged at that one,
    and name their own.
    """
    if _has_several_writers():
        run.log({**metrics, STEP: step})
    elif step < newest:
        run.log({**metrics, STEP: step}, step=newest)
    else:
        run.log(dict(metrics), step=step)


def _has_several_writers() -> bool:
    return _PRIMARY in os.environ
