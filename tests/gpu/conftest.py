"""Checks that need an NVIDIA GPU and only torch; without one they are skipped, with the reason.

Each records the values of claims that the documentation makes (`claims.py`) by the fixture `record_claim`.
"""

from __future__ import annotations

import statistics
import time

import pytest
import torch

from tests.gpu.recording import pytest_runtest_logreport, pytest_terminal_summary, record_claim, report

__all__ = ["pytest_runtest_logreport", "pytest_terminal_summary", "record_claim", "report"]


def pytest_collection_modifyitems(config, items):
    here = [item for item in items if item.path.parent.name == "gpu"]
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU: torch.cuda.is_available() is false"))


@pytest.fixture
def seconds_of():
    """Measures the GPU time of an action: the median of five runs, after one to warm up."""

    def measure(action):
        times = []
        for _ in range(6):
            torch.cuda.synchronize()
            started = time.perf_counter()
            action()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])

    return measure
