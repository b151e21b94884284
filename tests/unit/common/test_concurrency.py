"""Blocking work in threads of its own, and waits with a line for the log now and then."""

import threading
from types import SimpleNamespace

import pytest

from atropos_api.common import concurrency
from atropos_api.common.concurrency import Wait, Worker

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


async def test_a_wait_has_a_line_every_ten_seconds_and_one_for_all_the_time_in_which_nobody_asked(monkeypatch):
    """After a publish of ten minutes in the wait for a batch, five lines a second came for twelve seconds."""
    now = 100.0
    monkeypatch.setattr(concurrency, "time", SimpleNamespace(monotonic=lambda: now))
    wait, lines = Wait(), []
    for seconds in (0, 9, 10, 11, 19.5, 20.5, 29, 30, 634, 634.2, 639, 640, 641, 650):
        now = 100.0 + seconds
        if wait.has_line():
            lines.append(seconds)
    assert lines == [10, 20.5, 30, 634, 640, 650]


def _fail(_):
    raise RuntimeError("can't start new thread")
