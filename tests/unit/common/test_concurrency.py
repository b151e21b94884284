"""Blocking work in threads of its own."""

import threading

import pytest

from atropos_api.common.concurrency import Worker

pytestmark = pytest.mark.anyio


async def test_a_worker_whose_thread_could_not_be_started_starts_it_at_the_next_call(monkeypatch):
    """The calls after such a failure waited for ever."""
    worker = Worker()
    with monkeypatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", _fail)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await worker.run(lambda: 1, about="a reward")
    assert worker._thread is None
    assert await worker.run(lambda: 2, about="a reward") == 2


def _fail(_):
    raise RuntimeError("can't start new thread")
