"""A call of the engine core ends with the engine, answered or not."""

import asyncio
from types import SimpleNamespace

import pytest

from example_trainer.serving.vllm import patches

# Given by vLLM's imports.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


def client_whose_engine_is(*, dead):
    return SimpleNamespace(resources=SimpleNamespace(engine_dead=dead))


@pytest.fixture(autouse=True)
def _look_often(monkeypatch):
    monkeypatch.setattr(patches, "_LIFE_CHECK_SECONDS", 0.01)


def test_a_call_that_waits_when_the_engine_dies_raises_and_its_wait_is_over():
    from vllm.v1.engine.exceptions import EngineDeadError

    client, ended = client_whose_engine_is(dead=False), []

    async def unanswered(_):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def scenario():
        call = asyncio.ensure_future(patches.failing_with_the_engine(unanswered)(client))
        await asyncio.sleep(0.05)
        assert not call.done()
        client.resources.engine_dead = True
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(call, 5)
        await asyncio.sleep(0)
        assert ended

    asyncio.run(scenario())


@pytest.mark.parametrize("dead", [False, True])
def test_an_answer_and_an_error_come_through_however_the_engine_is(dead):
    client = client_whose_engine_is(dead=dead)

    async def answer(_, method, *, engine):
        return method, engine

    async def refuse(_):
        raise ValueError("not that")

    assert asyncio.run(patches.failing_with_the_engine(answer)(client, "add", engine=1)) == ("add", 1)
    with pytest.raises(ValueError, match="not that"):
        asyncio.run(patches.failing_with_the_engine(refuse)(client))


def test_a_call_that_is_cancelled_waits_no_longer():
    ended = []

    async def unanswered(_):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def scenario():
        call = asyncio.ensure_future(patches.failing_with_the_engine(unanswered)(client_whose_engine_is(dead=False)))
        await asyncio.sleep(0.03)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.sleep(0)
        assert ended

    asyncio.run(scenario())
