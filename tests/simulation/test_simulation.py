"""Days of training in seconds, with faults of network, disk and clock: no promise breaks, and planted bugs are found.

`ATROPOS_SIMULATION_EVENTS` asks for more events. A failure names its seed: `python -m tests.simulation.run --seed N`.
"""

from __future__ import annotations

import logging
import os

import pytest

from .oracle import PromiseBroken
from .planted import PLANTS
from .run import Run
from .world import Faults

EVENTS = int(os.environ.get("ATROPOS_SIMULATION_EVENTS", "100000"))
EVENTS_TO_FIND = 900_000
SEEDS_FOUND = (1, 4)
"""Seeds that found a bug: an item leased twice to one process; groups of an ended run in the next one."""


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("seed", [*SEEDS_FOUND, 11, 12])
@pytest.mark.parametrize("epochs", [True, False], ids=["epochs", "stale"])
def test_no_promise_breaks(seed: int, epochs: bool) -> None:
    with Run(seed, epochs=epochs) as run:
        run.go(EVENTS)
    assert run.oracle.runs_finished > EVENTS / 100_000
    assert run.process.restarts > EVENTS / 100_000


def test_no_promise_breaks_though_the_clock_is_set_by_hours_every_minute() -> None:
    with Run(13, faults=Faults(clock_jump_seconds=86_400.0)) as run:
        run.go(EVENTS)
    assert run.oracle.runs_finished > EVENTS / 100_000


def test_a_seed_repeats_a_simulation() -> None:
    with Run(21) as first, Run(21) as second:
        for run in (first, second):
            run.go(20_000)
    assert first.world.now == second.world.now
    assert first.oracle.groups_trained == second.oracle.groups_trained
    assert first.process.disk.writes == second.process.disk.writes


@pytest.mark.parametrize("bug", PLANTS)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTS[bug](monkeypatch)
    found = None
    for seed in range(109, 112):
        try:
            with Run(seed) as run:
                run.go(EVENTS_TO_FIND // 3)
        except (PromiseBroken, LookupError) as error:
            found = error
            break
    assert found is not None, f"{bug} was not found within {EVENTS_TO_FIND} events"
    logging.getLogger(__name__).info("%s: found with seed %d: %s", bug, seed, found)
