"""An environment that waits for a tool, at a real broker in memory: the broker says so, with the oldest item."""

import functools

import anyio
import pytest

from atropos_api.broker import diagnosis, facts
from atropos_api.testing import memory_broker
from environments.sdk.progress import note_event
from environments.sdk.runtime import broker_session
from environments.sdk.runtime.worker import EnvironmentWorker

from .test_serve import ArithmeticEnv, make_env, make_fake, train

pytestmark = pytest.mark.anyio


class StuckInATool(ArithmeticEnv):
    """An environment of which every rollout gets an answer and then waits for something that never ends."""

    async def collect_trajectories(self, item):
        group = await super().collect_trajectories(item)
        note_event("tool sandbox: running")
        await anyio.sleep_forever()
        return group


async def test_a_stall_in_a_tool_is_named_with_the_oldest_item_and_its_last_event(tokenizer_folder, monkeypatch):
    monkeypatch.setattr(broker_session, "ACTIVITY_SECONDS", 0.1)
    monkeypatch.setattr(diagnosis, "IDLE_SECONDS", 0.3)
    monkeypatch.setattr(facts, "WAIT_SECONDS", 0.3)
    fake = make_fake()
    env = make_env(fake, tokenizer_folder, StuckInATool)
    _, client = memory_broker()
    found = {}
    async with client, anyio.create_task_group() as group:
        group.start_soon(functools.partial(train, client, steps=2, batch_size=32, fake=fake))
        group.start_soon(EnvironmentWorker(env, client).serve)
        with anyio.fail_after(15):
            while found.get("rule") != "tool":
                await anyio.sleep(0.1)
                status = await client.status()
                found = status["flow"]["diagnosis"]["finding"]
        group.cancel_scope.cancel()
    assert (found["edge"], found["severity"]) == ("environment-inference", "blocked")
    assert "tool sandbox: running" in found["detail"]
    (environment,) = status["environments"]
    assert environment["activity"]["open_rollouts"] > 0
    assert environment["activity"]["open_requests"] == 0
    (slowest, *_) = environment["activity"]["slowest"]
    assert (slowest["done"], slowest["name"].startswith("DrawnItem")) == (8, False)
    assert environment["activity"]["servers"][0]["requests"] > 0
