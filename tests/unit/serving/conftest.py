"""A fence with a stub engine and a real header, as the server puts them together."""

from __future__ import annotations

import pytest

from example_trainer.serving.door import Door
from example_trainer.serving.fence import Fence
from example_trainer.serving.testing import StubEngine
from example_trainer.weights.versions import SegmentHeader


@pytest.fixture
def header(tmp_path):
    path = tmp_path / "header"
    path.write_bytes(bytes(SegmentHeader.nbytes()))
    return SegmentHeader.initialise(path)


@pytest.fixture
async def engine():
    return StubEngine()


@pytest.fixture
def door():
    return Door()


@pytest.fixture
async def fence(engine, door, header):
    return Fence(engine, door, header=header)
