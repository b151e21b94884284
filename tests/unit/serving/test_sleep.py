"""A sleeping server serves nothing and takes no weights; it wakes up unchanged, also after a failed sleep."""

from __future__ import annotations

from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI

from example_trainer.serving.bridge_routes import make_bridge_router, make_broadcast_router, make_lora_router
from example_trainer.serving.config import ServerConfig
from example_trainer.serving.problems import Problem
from example_trainer.serving.state import ServerState

from .publishing import begin

pytestmark = pytest.mark.anyio


class SleepingEngine:
    """An engine with the two calls of vLLM's client that sleep needs."""

    def __init__(self):
        self.asked, self.fails = [], False

    async def sleep(self, level, *, mode):
        self.asked.append(("sleep", level, mode))
        if self.fails:
            raise RuntimeError("no memory on the host")

    async def wake_up(self):
        self.asked.append("wake_up")


@pytest.fixture
def state(fence, gate):
    config = ServerConfig(model="m", enable_sleep_mode=True)
    engine = SimpleNamespace(async_llm=SleepingEngine())
    return ServerState(
        config=config,
        boot_id="boot",
        bridge_token="t",
        hostname="h",
        vllm_version="0",
        engine=engine,
        fence=fence,
        gate=gate,
        adapters=SimpleNamespace(),
    )


async def test_a_sleeping_server_is_paused_and_refuses_new_weights_until_it_wakes(state, engine):
    await state.sleep(1)
    await state.sleep(1)
    assert (state.sleeping, engine.paused, state.fence.paused) == (True, True, True)
    with pytest.raises(Problem) as caught:
        state.check_awake()
    assert (caught.value.status, caught.value.kind) == (409, "asleep")
    await state.wake_up()
    await state.wake_up()
    state.check_awake()
    assert (state.sleeping, engine.paused, state.fence.paused) == (False, False, False)
    assert state.engine.async_llm.asked == [("sleep", 1, "abort"), "wake_up"]


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # in vLLM's imports
@pytest.mark.parametrize(
    "path",
    [
        "/bridge/publish/begin",
        "/bridge/broadcast/join",
        "/bridge/broadcast/receive",
        "/bridge/broadcast/load",
        "/lora/upload?version=1",
        "/lora/load",
        "/lora/check",
        "/lora/load_lora_adapter",
        "/bridge/resume",
    ],
)
async def test_no_route_that_touches_weights_reaches_the_engine_of_a_sleeping_server(state, path):
    """Its memory is unmapped: an adapter that was sent then, a broadcast, or a resume, would have ended the engine."""
    app = FastAPI()
    app.state.atropos = state
    for make in (make_bridge_router, make_broadcast_router, make_lora_router):
        app.include_router(make())
    await state.sleep(1)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post(path, json=BODIES.get(path, {}), headers={"Authorization": "Bearer t"})
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:atropos:problem:asleep")
    assert state.fence.paused


BODIES = {
    "/bridge/broadcast/join": {"address": "h", "port": 1, "rank": 1, "world_size": 2, "group_id": "g"},
    "/bridge/broadcast/receive": {"buckets": [], "transfer_id": "t"},
    "/bridge/broadcast/load": {"publish_id": "p", "version": 1},
    "/lora/load": {"name": "n", "path": "p"},
    "/lora/check": {"name": "n"},
    "/lora/load_lora_adapter": {"lora_name": "n", "lora_path": "p"},
}


async def test_a_server_that_cannot_fall_asleep_goes_on_serving(state, engine):
    state.engine.async_llm.fails = True
    with pytest.raises(RuntimeError, match="no memory"):
        await state.sleep(1)
    assert (state.sleeping, engine.paused, state.fence.paused) == (False, False, False)


async def test_a_level_that_loses_the_weights_is_refused(state):
    with pytest.raises(Problem) as caught:
        await state.sleep(2)
    assert (caught.value.status, caught.value.kind) == (422, "bad-sleep-level")
    assert state.engine.async_llm.asked == []


async def test_under_a_publish_no_server_falls_asleep(state, fence):
    await begin(fence)
    with pytest.raises(Problem, match="a publish is under way"):
        await state.sleep(1)
    assert not state.sleeping


async def test_a_server_started_without_the_option_says_so(state):
    state.config = ServerConfig(model="m")
    with pytest.raises(Problem, match="started without --enable-sleep-mode"):
        await state.sleep(1)
