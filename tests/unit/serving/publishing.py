"""Short forms of a trainer's calls to a fence, which several test files share."""

from __future__ import annotations

import asyncio

import pytest

from example_trainer.serving.problems import Problem

_LOOK_SECONDS = 0.005


async def begin(fence, **fields):
    wanted = {"lease_seconds": 30.0, "drain_seconds": 0.0, "in_flight": "drain"} | fields
    return (await fence.begin(**wanted))["publish_id"]


async def publish(fence, header, version, **fields):
    publish_id = await begin(fence, **fields)
    header.begin_write(version)
    header.end_write(version)
    return await fence.end(publish_id, version)


async def refusal_of(gate):
    with pytest.raises(Problem) as caught:
        await asyncio.wait_for(gate.enter(), 1)
    return caught.value.kind


async def reached(condition, limit_seconds=2.0):
    """Wait until the condition holds; return True if it did within the limit."""
    for _ in range(int(limit_seconds / _LOOK_SECONDS)):
        if condition():
            return True
        await asyncio.sleep(_LOOK_SECONDS)
    return condition()


def slow_resume(engine):
    """Let the engine take a moment to resume; return the event that is set when it begins."""
    resume, begun = engine.resume, asyncio.Event()

    async def slow(version):
        begun.set()
        await asyncio.sleep(0.05)
        return await resume(version)

    engine.resume = slow
    return begun
