"""Long polls end when their callers asked for it: those of many callers together, a little early and never late."""

from types import SimpleNamespace

import pytest
from fastapi import Request

from atropos_api.http import streaming
from atropos_api.http.streaming import LONG_WAIT_SECONDS, SHARED_END_SECONDS, LongPoll
from atropos_api.testing import make_memory_app

BEGUN = [100 + sixteenths / 16 for sixteenths in range(16)]
"""Moments over a second, in numbers that floats hold exactly."""


async def ends_of(monkeypatch, seconds):
    """Return when polls of `seconds` end that began at the moments of `BEGUN`, and of which nothing happens."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(streaming, "time", clock)

    async def wait(timeout_seconds, *, until):
        assert until is None
        clock.now += timeout_seconds

    async def end_of(begun):
        clock.now = begun
        poll = LongPoll(request, seconds)
        while await poll.on(SimpleNamespace(wait=wait), at_most=1.0):
            assert clock.now < 200
        return clock.now

    request = Request({"type": "http", "app": make_memory_app()})
    return [await end_of(begun) for begun in BEGUN]


@pytest.mark.anyio
@pytest.mark.parametrize("seconds", [LONG_WAIT_SECONDS, 2.3125, 60.0])
async def test_long_waits_that_began_apart_end_together_and_never_late(monkeypatch, seconds):
    """Their answers share a wake-up of the broker, which costs half of one each."""
    ends = await ends_of(monkeypatch, seconds)
    assert [end % SHARED_END_SECONDS for end in ends] == [0.0] * len(ends)
    early = [begun + seconds - end for begun, end in zip(BEGUN, ends, strict=True)]
    assert 0.0 == min(early) < max(early) < SHARED_END_SECONDS


@pytest.mark.anyio
async def test_a_short_wait_ends_at_its_own_time(monkeypatch):
    assert await ends_of(monkeypatch, 1.9375) == [begun + 1.9375 for begun in BEGUN]
