"""`kill -9` at random moments under load: eight environments, two ranks. `ATROPOS_KILLS=all` kills 50 times a mode."""

import os
import random
import time

import pytest

EVERY = os.environ.get("ATROPOS_KILLS", "") == "all"
KILLS = 50 if EVERY else 3


@pytest.mark.parametrize("mode", ["always", "interval", "never"] if EVERY else ["interval"])
def test_killed_at_random_under_load_it_loses_and_duplicates_nothing(tmp_path, killed_broker, load, mode):
    broker = killed_broker("--store", str(tmp_path / "store"), "--fsync", mode)
    broker.start()
    assert broker.wait_until(200)
    work = load(broker, environments=8)
    for _ in range(KILLS):
        time.sleep(random.uniform(0.0, 0.4))
        broker.kill()
        work.check()
        broker.start()
        assert broker.wait_until(200)
    work.wait_for_batches(2)
    work.finish()
