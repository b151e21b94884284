"""An environment's servers as they are registered at the broker: they come, drain, fall silent and go while it asks."""

import asyncio
import contextlib
import logging
import socket

import anyio
import pytest

from atropos_api.client import BrokerRefused
from atropos_api.common import concurrency
from atropos_api.common.cliconfig import ConfigError
from atropos_api.testing import memory_broker
from atropos_api.wire import ServerReport, ServerSet
from environments.sdk.config import APIServerConfig
from environments.sdk.errors import InferenceUnavailable
from environments.sdk.inference import registered
from environments.sdk.inference.pool import MARGIN
from environments.sdk.inference.sampling import Sampling
from environments.sdk.runtime.cli import _unless_stopped
from environments.sdk.runtime.stopping import StopRequest
from environments.sdk.server_manager import ServerManager
from environments.sdk.testing import FakeInference, InProcess

pytestmark = pytest.mark.anyio

CHAT = [{"role": "user", "content": "How many now?"}]
LEASE_SECONDS = 0.6


class Farm:
    """Servers by host name; those in `silent` take requests and answer none, those in `refusing` answer 503."""

    def __init__(self, end, **delays):
        self.fakes = {
            name: FakeInference(lambda *_: [7, 8, 9, end], end=end, delay_seconds=delay, event_seconds=0.05)
            for name, delay in delays.items()
        }
        self.silent, self.refusing, self.asked = set(), set(), []
        self.lookups_to_fail = 0

    async def request(self, method, url, body, *, on_piece=None):
        name = url.split("/")[2]
        if self.lookups_to_fail:
            self.lookups_to_fail -= 1
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        if url.endswith("/generate"):
            self.asked.append(name)
        if name in self.silent:
            await anyio.sleep_forever()
        self.fakes[name].problem = (503, "joining") if name in self.refusing else None
        return await InProcess(self.fakes[name]).request(method, url, body, on_piece=on_piece)

    async def aclose(self):
        pass


class Scene:
    """A broker, a farm of servers that register there, and an environment's manager that follows them."""

    def __init__(self, tokenizer, farm, **options):
        self.app, self.broker = memory_broker(server_lease=LEASE_SECONDS)
        self.farm = farm
        template = APIServerConfig(server_type="vllm", policy="default", num_max_requests_at_once=512)
        self.manager = ServerManager([template], load_tokenizer=lambda: tokenizer, transport=farm, **options)
        self.pool, self.registered = self.manager.pool, self.manager.registered
        self._leases = {}

    @contextlib.asynccontextmanager
    async def following(self):
        async with self.broker, anyio.create_task_group() as group:
            group.start_soon(self.registered.follow, self.broker)
            with anyio.fail_after(20):
                yield group
            group.cancel_scope.cancel()

    async def register(self, *names):
        for name in names:
            self._leases[name] = scope = anyio.CancelScope()
            await self.broker.renew_server(name, self.report(name))
            self.group.start_soon(self._renew, name, scope)

    async def _renew(self, name, scope):
        with scope:
            while True:
                await anyio.sleep(LEASE_SECONDS / 3)
                await self.broker.renew_server(name, self.report(name))

    def report(self, name, **fields):
        lease_id = fields.pop("lease_id", f"lease-{name}-1")
        return ServerReport(lease_id=lease_id, boot_id=name, mode="fixed", url=f"http://{name}", **fields)

    def fall_silent(self, name):
        """Stop a server as SIGSTOP does: it renews no lease and answers nothing."""
        self._leases[name].cancel()
        self.farm.silent.add(name)

    async def until(self, *names):
        """Wait until exactly these are asked."""
        while sorted(server.config.base_url.split("/")[2] for server in self.pool.servers) != sorted(names):
            await self.registered.changed.wait()

    async def ask(self, count=1):
        for _ in range(count):
            await self.manager.chat_completion(messages=CHAT)


@pytest.fixture
async def scene(request, tokenizer):
    delays = getattr(request, "param", {"one": 0.0, "two": 0.0, "three": 0.0})
    made = Scene(tokenizer, Farm(tokenizer.eos_token_id, **delays))
    async with made.following() as made.group:
        yield made


async def test_requests_wait_for_the_first_server_and_go_to_those_that_come(scene):
    scene.group.start_soon(scene.ask)
    await anyio.sleep(0.1)
    assert scene.farm.asked == []
    await scene.register("one")
    await scene.until("one")
    await scene.ask()
    await scene.register("two", "three")
    await scene.until("one", "two", "three")
    async with anyio.create_task_group() as group:
        for _ in range(9):
            group.start_soon(scene.ask)
    assert set(scene.farm.asked) == {"one", "two", "three"}


async def test_without_any_server_a_request_fails_with_the_remedy_after_the_time_allowed(tokenizer):
    scene = Scene(tokenizer, Farm(0), wait_timeout_seconds=0.2)
    async with scene.following():
        with pytest.raises(InferenceUnavailable, match="--broker-url"):
            await scene.ask()


async def test_many_requests_that_wait_for_a_server_log_one_line_together(scene, caplog, monkeypatch):
    monkeypatch.setattr(concurrency, "WAIT_LINE_SECONDS", 0.1)
    caplog.set_level(logging.INFO)
    for _ in range(20):
        scene.group.start_soon(scene.ask)
    monkeypatch.setattr(registered, "LINE_SECONDS", 0.3)
    await anyio.sleep(0.4)
    assert caplog.text.count("waiting for an inference server") in {1, 2, 3}
    await scene.register("one")
    await scene.until("one")


async def test_a_new_servers_name_that_is_not_known_here_yet_is_waited_for(scene):
    scene.farm.lookups_to_fail = 2
    await scene.register("one")
    await scene.until("one")
    await scene.ask()
    assert scene.farm.lookups_to_fail == 0
    assert scene.farm.asked == ["one"]


async def test_joiners_are_not_asked(scene):
    await scene.broker.renew_server("one", ServerReport(lease_id="lease-one", boot_id="b", mode="weights", port=9001))
    await scene.register("two")
    await scene.until("two")


async def test_a_silent_server_is_out_when_its_lease_ends_and_its_requests_succeed_elsewhere(scene):
    await scene.register("one")
    await scene.until("one")
    scene.farm.silent.add("one")
    async with anyio.create_task_group() as asking:
        for _ in range(5):
            asking.start_soon(scene.ask)
        await anyio.sleep(0.1)
        assert scene.pool.servers[0].in_flight == 5
        await scene.register("two")
        await scene.until("one", "two")
        began = anyio.current_time()
        scene.fall_silent("one")
        await scene.until("two")
        assert anyio.current_time() - began < LEASE_SECONDS + 2
    assert scene.farm.asked.count("two") == 5


async def test_a_server_that_comes_back_is_one_of_which_nothing_is_known(scene):
    """Its outage, its requests and its dialect were those of the process before."""
    await scene.register("one", "two")
    await scene.until("one", "two")
    before = next(server for server in scene.pool.servers if "one" in server.config.base_url)
    scene.fall_silent("one")
    await scene.until("two")
    scene.farm.silent.clear()
    await scene.broker.renew_server("one", scene.report("one", lease_id="lease-one-2"))
    await scene.until("one", "two")
    after = next(server for server in scene.pool.servers if "one" in server.config.base_url)
    assert after is not before
    assert after.channel.up


async def test_a_draining_server_ends_what_it_has_and_gets_nothing_new(scene):
    scene.farm.fakes["one"].delay_seconds = 0.5
    await scene.register("one")
    await scene.until("one")
    async with anyio.create_task_group() as asking:
        asking.start_soon(scene.ask)
        await anyio.sleep(0.1)
        await scene.register("two")
        await scene.broker.drain_server("one")
        await scene.until("two")
        await scene.ask(3)
    assert scene.farm.asked == ["one", "two", "two", "two"], "its requests were not repeated"


async def test_a_server_that_refuses_is_left_for_another_at_once(scene):
    """503: it knows that it is fenced before the broker has notified the others."""
    await scene.register("one", "two")
    await scene.until("one", "two")
    scene.farm.refusing.add("one")
    with anyio.fail_after(2):
        await scene.ask(6)
    assert scene.farm.asked.count("two") == 6


async def test_a_session_stays_with_its_server_and_moves_only_beyond_the_margin(scene):
    await scene.register("one", "two")
    await scene.until("one", "two")
    sticky = scene.pool.sticky()
    first = scene.pool.pick(None)
    sticky._chosen = first
    other = next(server for server in scene.pool.servers if server is not first)
    first.in_flight = other.in_flight + MARGIN
    assert scene.pool.pick(first) is first
    first.in_flight += 1
    assert scene.pool.pick(first) is other
    first.in_flight = 0


async def test_a_session_whose_server_is_gone_goes_on_elsewhere_with_its_whole_prefix(scene):
    await scene.register("one")
    await scene.until("one")
    async with scene.manager.managed_server() as session:
        await session.chat_completion(messages=CHAT)
        await scene.register("two")
        await scene.until("one", "two")
        scene.fall_silent("one")
        await scene.until("two")
        (answer, *_), *_ = [(await session.chat_completion(messages=CHAT)).choices]
        assert answer.message.role == "assistant"
    first, second = scene.farm.fakes["one"].requests[-1], scene.farm.fakes["two"].requests[-1]
    assert first["prompt"] == second["prompt"]


async def test_a_stream_that_has_begun_is_not_begun_again_elsewhere(scene):
    await scene.register("one", "two")
    await scene.until("one", "two")
    scene.farm.fakes["one"].event_seconds = scene.farm.fakes["two"].event_seconds = 0.2
    heard = anyio.Event()
    sticky = scene.pool.sticky()

    async def stream():
        with pytest.raises(InferenceUnavailable, match="in the middle of its answer"):
            await sticky.generate([3, 4], Sampling(max_tokens=8), "train", on_tokens=lambda *_: heard.set())

    async with anyio.create_task_group() as group:
        group.start_soon(stream)
        await heard.wait()
        name = sticky._chosen.config.base_url.split("/")[2]
        scene._leases[name].cancel()
        await scene.broker.remove_server(name)


async def test_while_the_broker_restarts_the_servers_stay_until_the_set_is_complete(scene):
    await scene.register("one")
    await scene.until("one")
    scene.registered.adopt(ServerSet(epoch=1, complete=False, lease_seconds=1.0, servers=[]))
    assert len(scene.pool.servers) == 1
    scene.registered.adopt(ServerSet(epoch=2, complete=True, lease_seconds=1.0, servers=[]))
    assert scene.pool.servers == []


async def test_settings_that_change_during_the_run_hold_for_servers_that_come_later(scene):
    scene.manager.update_weight(0.5)
    scene.manager.follow("policy-v7", 7)
    await scene.register("one")
    await scene.until("one")
    (server,) = scene.pool.servers
    assert server.model_name == "policy-v7"
    assert server.channel.limits["train"].free == 256


async def test_a_list_of_servers_beside_the_registered_ones_is_refused(tokenizer):
    configs = [APIServerConfig(server_type="vllm"), APIServerConfig(server_type="vllm", policy="default")]
    with pytest.raises(ConfigError, match="stands for all that are registered"):
        ServerManager(configs, load_tokenizer=lambda: tokenizer)


async def test_work_whose_servers_the_broker_refuses_to_name_has_ended_before_they_are_closed():
    ended = []

    async def work():
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)  # a rollout cleans up
            ended.append("work")

    async def follow():
        await asyncio.sleep(0.01)
        raise BrokerRefused({"detail": "the token is another one now"}, 401)

    async def evaluate():
        async with anyio.create_task_group() as group:
            group.start_soon(follow)
            await _unless_stopped(work(), StopRequest())

    with pytest.raises(ExceptionGroup) as failed:
        await evaluate()
    assert failed.group_contains(BrokerRefused)
    assert ended == ["work"]
