"""The process is killed at every named step between a write and its answer: nothing is lost, doubled or stuck.

The default suite has each step once, in one of the stores and modes; `ATROPOS_KILLS=all` has each in all.
"""

import os
import random

import httpx
import pytest

from atropos_api.store.failpoints import Failpoint

EVERY = os.environ.get("ATROPOS_KILLS", "") == "all"
MODES = ["always", "interval", "never"]
SYNCED = {Failpoint.BODIES_SYNCED, Failpoint.LEDGER_SYNCED}


def steps_for(mode):
    """Return the steps to kill at with one mode each, in turn, or all; mode `never` has no syncs."""
    for place, step in enumerate(Failpoint):
        mine = [mode for mode in MODES if mode != "never" or step not in SYNCED]
        if mode in mine and (EVERY or mine[place % len(mine)] == mode):
            yield step


@pytest.mark.parametrize("mode", MODES)
def test_killed_at_each_step_a_directory_loses_and_duplicates_nothing(tmp_path, killed_broker, load, mode):
    broker = killed_broker("--store", str(tmp_path / "store"), "--fsync", mode)
    kill_at_steps(broker, load, list(steps_for(mode)))


@pytest.mark.parametrize("mode", MODES if EVERY else ["interval"])
def test_a_submission_without_a_key_is_known_again_after_two_kills(tmp_path, killed_broker, mode):
    """R9: the sender repeats it late, after other groups were taken and answered between the kills."""
    broker = killed_broker("--store", str(tmp_path / "store"), "--fsync", mode)
    first, *others = ({"tokens": [[n]], "masks": [[n]], "scores": [0.5], "env_id": 0} for n in range(5))
    broker.start(crash_at=Failpoint.GROUPS_KEPT)
    assert broker.wait_until(200)
    with pytest.raises(httpx.TransportError):
        httpx.post(broker.url + "/scored_data", json=first)
    for pair in (others[:2], others[2:]):
        broker.start()
        assert broker.wait_until(200)
        for other in pair:
            # The second submission's record says that the first was answered.
            assert httpx.post(broker.url + "/scored_data", json=other).status_code == 200
        broker.kill()
    broker.start()
    assert broker.wait_until(200)
    for groups in (5, 6):
        assert httpx.post(broker.url + "/scored_data", json=first).status_code == 200
        assert httpx.get(broker.url + "/v1/status").json()["queue"]["groups"] == groups


def kill_at_steps(broker, load, steps):
    broker.start()
    assert broker.wait_until(200)
    work = load(broker)
    work.wait_for_batches(1)
    broker.kill()
    for step in steps:
        begins = step.startswith(("run-", "store-", "recovered"))
        if step.startswith("run-"):
            work.restart_trainer()
        # Each process has to recover what the one before left, and to reach its own step.
        broker.start(crash_at=f"{step}:{1 if begins else random.randint(1, 3)}")
        assert broker.wait_for_death(30), f"{step} was not reached"
        work.check()
    broker.start()
    work.wait_for_batches(2)
    work.finish()
