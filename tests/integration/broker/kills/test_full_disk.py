"""On a full disk the broker answers 503 and is not ready; when there is room, the same process continues."""

import os
import random
import resource
import time

import httpx
import pytest

EVERY = os.environ.get("ATROPOS_KILLS", "") == "all"


def make_body(ident, size):
    tokens = [[ident, 2, 3]] * size
    return {"tokens": tokens, "masks": tokens, "scores": [0.5] * size}


def limit_files(broker, size):
    """Limit the size of the process's files, so that a write fails as on a full disk."""
    resource.prlimit(broker.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.mark.parametrize("mode", ["interval", "always"] if EVERY else ["interval"])
def test_a_full_disk_is_a_503_and_not_ready_until_there_is_room(tmp_path, killed_broker, load, mode):
    broker = killed_broker("--store", str(tmp_path / "store"), "--fsync", mode)
    broker.start()
    assert broker.wait_until(200)
    process = broker.pid
    work = load(broker)
    for _ in range(20 if EVERY else 2):
        work.wait_for_batches(1)
        limit = random.choice([1, 4096, 20_000])
        limit_files(broker, limit)
        assert broker.wait_until(503)
        if limit == 1:
            # New files have room below the other limits.
            refused = httpx.post(broker.url + "/v1/groups", json={"environment_id": 0, "groups": [make_body(0, 4)]})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["type"].endswith("store-unavailable")
        assert httpx.get(broker.url + "/v1/status").status_code == 200
        time.sleep(0.2)
        limit_files(broker, resource.RLIM_INFINITY)
        assert broker.wait_until(200)
        work.check()
    work.wait_for_batches(1)
    assert work.finish()["counters"]["store_failures_total"] >= 2
    assert broker.alive()
    assert broker.pid == process


def test_killed_while_the_disk_is_full_it_starts_again_when_there_is_room(tmp_path, killed_broker, load):
    broker = killed_broker("--store", str(tmp_path / "store"))
    broker.start()
    assert broker.wait_until(200)
    work = load(broker)
    work.wait_for_batches(1)
    limit_files(broker, 1)
    assert broker.wait_until(503)
    broker.kill()
    broker.start()
    assert broker.wait_until(200)
    work.wait_for_batches(1)
    work.finish()
