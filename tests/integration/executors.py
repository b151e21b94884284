"""The ways to run vLLM's engine on a CPU: vLLM's own, with asynchronous scheduling, and with workers as processes."""

from __future__ import annotations

import os
from pathlib import Path

DEFAULT = "worker inside the engine"
ASYNCHRONOUS = "asynchronous scheduling"
PROCESSES = "workers as processes"
EXECUTORS = (DEFAULT, ASYNCHRONOUS, PROCESSES)
LONG = os.environ.get("ATROPOS_EXECUTORS") == "all"
PLUGINS = Path(__file__).parent / "vllm_plugins"


def environment(executor: str) -> dict[str, str]:
    """Return the variables with which a server runs its engine in this way."""
    if executor == ASYNCHRONOUS:
        path = os.pathsep.join(filter(None, [str(PLUGINS), os.environ.get("PYTHONPATH")]))
        return {"PYTHONPATH": path}  # vLLM finds the plugin by its metadata there
    if executor == PROCESSES:
        return {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    return {}
