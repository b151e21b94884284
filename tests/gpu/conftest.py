"""Checks that need an NVIDIA GPU and nothing but torch; skipped, with the reason, where there is none."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(config, items):
    here = [item for item in items if item.path.parent.name == "gpu"]
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU: torch.cuda.is_available() is false"))
