"""One run in Trackio, of a trainer or an environment: a module of its own, because two packages begin runs in this way.

Trackio itself reads `TRACKIO_SPACE_ID` and `TRACKIO_DIR`; the project is that of `TRACKIO_PROJECT`. A run is found
again by its name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from atropos_api.common.wandb_run import DEFAULT_PROJECT


def begin_run(name: str, *, group: str | None, config: Mapping[str, Any]) -> Any:
    """Begin a run or continue the one of this name; raises `ImportError` without the package, else what it raises."""
    import trackio

    project = os.environ.get("TRACKIO_PROJECT") or DEFAULT_PROJECT
    settings = json.loads(json.dumps(config, default=str))
    return trackio.init(project=project, name=name, group=group, config=settings, resume="allow")
