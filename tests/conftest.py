"""What every test relies on: one thread per process, no hub, no trackers, asyncio as the event loop."""

from __future__ import annotations

import os

import pytest

# Set before any test imports torch: on two cores each further thread only spins.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
