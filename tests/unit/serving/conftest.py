"""Fixtures that join a fence, a stub engine and a real header as the server does."""

from __future__ import annotations

import pytest

from example_trainer.serving.admission import AdmissionGate
from example_trainer.serving.fence import Fence
from example_trainer.serving.testing import StubEngine
from example_trainer.weight_protocol.shm_header import SegmentHeader


@pytest.fixture
def header(tmp_path):
    path = tmp_path / "header"
    path.write_bytes(bytes(SegmentHeader.nbytes()))
    return SegmentHeader.initialise(path)


@pytest.fixture
async def engine():
    return StubEngine()


@pytest.fixture
def gate():
    return AdmissionGate()


@pytest.fixture
async def fence(engine, gate, header):
    return Fence(engine, gate, header=header)
