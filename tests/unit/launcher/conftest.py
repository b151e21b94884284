"""A supervisor of real programs, and the fleet of a launcher."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from example_trainer.launcher.supervisor import Supervisor

from .fleet_scene import Scene


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    with Supervisor(tmp_path) as supervisor:
        yield supervisor


@pytest.fixture
def scene(tmp_path: Path, supervisor: Supervisor) -> Iterator[Scene]:
    scene = Scene(tmp_path, supervisor)
    scene.poll()
    scene.register("vllm")
    yield scene
    scene.fleet.close()
