"""Checks that need an NVIDIA GPU and nothing but torch; skipped, with the reason, where there is none.

What they measure ends up in one table at the end.
"""

from __future__ import annotations

import statistics
import time

import pytest
import torch

_ROWS = pytest.StashKey()


def pytest_collection_modifyitems(config, items):
    here = [item for item in items if item.path.parent.name == "gpu"]
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU: torch.cuda.is_available() is false"))


@pytest.fixture
def report(request):
    """Adds a row to the table: what was looked at, what was found, and what has to hold."""

    def add(what, found, wanted="-"):
        request.config.stash.setdefault(_ROWS, []).append((what, found, wanted))

    return add


@pytest.fixture
def seconds_of():
    """Measures what an action takes on the GPU: the median of five, after one to warm up."""

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


def pytest_terminal_summary(terminalreporter, config):
    rows = config.stash.get(_ROWS, [])
    if not rows:
        return
    terminalreporter.section(f"one {torch.cuda.get_device_name()}, torch {torch.__version__}")
    for line in as_table([("what", "found", "must hold"), *rows]):
        terminalreporter.write_line(line)


def as_table(rows):
    """Markdown, so that it can go into the docs as it is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]
