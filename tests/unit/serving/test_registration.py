"""The registration at a broker: the real registry over a clock that the test moves, and a connection that it cuts."""

from __future__ import annotations

import asyncio

import pytest

from atropos_api.broker import Broker, BrokerSettings
from atropos_api.client import BrokerHostUnknown, BrokerRefused, BrokerUnreachable
from atropos_api.errors import BrokerError
from atropos_api.http.problems import STATUS_BY_KIND
from atropos_api.store.memory import MemoryBodyLog, MemoryLedger
from atropos_api.wire import PolicyUpdate, RunRequest
from example_trainer.serving.admission import AdmissionGate
from example_trainer.serving.config import ServerConfig
from example_trainer.serving.problems import Problem
from example_trainer.serving.registration import PATIENCE_SECONDS, Load, Registration

pytestmark = pytest.mark.anyio

LEASE = 10.0


class Scene:
    """A registry, and the connection of one server to it, by which calls take as long as the test says."""

    def __init__(self):
        self.now = 100.0
        self.connected, self.call_seconds, self.answer_seconds = True, 0.0, 0.0
        self.failure = BrokerUnreachable("nothing answers")
        self.store = MemoryLedger(), MemoryBodyLog()
        self.reports = []
        self.restart()

    def restart(self):
        settings = BrokerSettings(server_lease=LEASE)
        self.inner = Broker(*self.store, settings=settings, clock=lambda: self.now, monotonic=lambda: self.now)
        self.servers = self.inner.state.servers

    async def renew_server(self, server_id, report, *, state=None, wait_seconds=0.0):
        self.reports.append(report)
        lease = self._call(lambda: self.servers.renew(server_id, report, "127.0.0.1"))
        if lease.state == state:
            self.now += wait_seconds
            lease.state = self.servers.state_of(server_id, report.lease_id)
        return lease

    async def remove_server(self, server_id, *, lease_id=None):
        self._call(lambda: self.servers.remove(server_id, lease_id))

    def _call(self, call):
        if not self.connected:
            raise self.failure
        self.now += self.call_seconds
        try:
            answer = call()
        except BrokerError as error:
            raise BrokerRefused({"type": error.kind, "detail": str(error)}, STATUS_BY_KIND[error.kind]) from error
        self.now += self.answer_seconds
        return answer

    def begin(self):
        self.run = self.inner.begin_run(RunRequest(name="r", batch_size=4, max_token_length=9, num_steps=9))

    def prove(self, version, *registrations):
        update = PolicyUpdate(
            run_id=self.run.run_id,
            version=version,
            step=version,
            published_at=0.0,
            servers=[one.lease_id for one in registrations],
        )
        self.inner.update_policy(update)

    @property
    def state(self):
        (server,) = self.servers.select().servers
        return server.state


@pytest.fixture
def scene():
    made = Scene()
    made.begin()
    return made


@pytest.fixture
def make(scene):
    def make_one(*flags, look=None, **hooks):
        config = ServerConfig.model_validate({"model": "m", "broker_url": "http://b:8000", **dict(flags)})
        identity = config.identify("boot", {}, encrypted=False)

        async def answer():
            return Load(version=3, running=2, waiting=1, kv_free=0.5)

        return Registration(scene, identity, look or answer, clock=lambda: scene.now, **hooks)

    return make_one


def refusal(registration, *headers):
    try:
        registration.check_unless_trainer(headers)
    except Problem as problem:
        return problem.status, problem.kind
    return None


async def test_a_server_answers_only_what_a_trainer_has_proven(scene, make):
    server = make()
    assert refusal(server) == (503, "no-lease"), "before it has registered"
    await server.renew()
    assert (scene.state, refusal(server)) == ("joining", (503, "joining"))
    scene.prove(1, server)
    assert refusal(server) == (503, "joining"), "until it is told"
    await server.renew()
    assert (scene.state, refusal(server)) == ("serving", None)


async def test_a_joiner_answers_the_trainer_that_proves_it(scene, make):
    server = make(is_trainer=lambda headers: (b"authorization", b"Bearer t") in list(headers))
    await server.renew()
    assert refusal(server, (b"authorization", b"Bearer t")) is None
    assert refusal(server, (b"authorization", b"Bearer x")) == (503, "joining")


async def test_a_server_of_fixed_weights_answers_from_its_registration(make):
    server = make(("policy_version", 4), ("policy", "teacher"))
    await server.renew()
    assert refusal(server) is None


async def test_what_it_reports_is_its_identity_and_its_load(scene, make):
    server = make(("enable_lora", True), ("policy", "student"), ("server_id", "a"), ("port", 9003))
    await server.renew()
    report = scene.reports[-1]
    assert (report.mode, report.policy, report.url, report.boot_id) == (
        "adapters",
        "student",
        "http://127.0.0.1:9003",
        "boot",
    )
    assert (report.version, report.running, report.waiting, report.kv_free) == (3, 2, 1, 0.5)


async def serving(scene, server):
    await server.renew()
    scene.prove(1, server)
    await server.renew()
    assert refusal(server) is None


async def test_renewals_keep_it_serving_for_ever_and_one_may_be_lost(scene, make):
    server = make()
    await serving(scene, server)
    for lost in (False, False, True) * 10:
        scene.connected = not lost
        before = scene.now
        await server.renew()
        scene.now += 0.5 if lost else 0.0
        assert scene.now - before <= LEASE / 2
        assert refusal(server) is None
    assert len({report.lease_id for report in scene.reports}) == 1


async def test_a_broker_whose_answers_are_always_late_is_warned_of_once_until_one_is_in_time(scene, make, caplog):
    server, in_time = make(), scene.renew_server
    await serving(scene, server)

    async def late(*words, wait_seconds=0.0, **named):
        if wait_seconds:
            scene.now += wait_seconds
            raise TimeoutError
        return await in_time(*words, **named)

    for warnings in (1, 2):
        scene.renew_server = late
        for _ in range(6):
            await server.renew()
        assert refusal(server) is None
        assert caplog.text.count("the broker does not answer") == warnings
        scene.renew_server = in_time
        for _ in range(2):
            await server.renew()


async def test_cut_off_it_refuses_before_the_broker_lists_it_as_gone(scene, make):
    server = make()
    await serving(scene, server)
    scene.connected = False
    while scene.state == "serving":
        await server.renew()
        scene.now += 0.1
    assert refusal(server) == (503, "no-lease")


async def test_the_lease_counts_from_before_the_call_however_long_its_answer_takes(scene, make):
    server = make()
    await serving(scene, server)
    scene.answer_seconds = 3.0
    sent = scene.now
    await server.renew()
    scene.now = sent + LEASE - 0.01
    assert refusal(server) is None
    scene.now = sent + LEASE
    assert refusal(server) == (503, "no-lease")


async def test_stopped_and_continued_it_refuses_at_once_and_joins_anew(scene, make):
    """SIGSTOP: the clock goes on, nothing runs, and an answer that had arrived before is of no use."""
    server = make()
    await serving(scene, server)
    lease_id = server.lease_id
    scene.now += 30
    assert refusal(server) == (503, "no-lease")
    await server.renew()
    assert (scene.state, refusal(server)) == ("joining", (503, "joining"))
    assert server.lease_id != lease_id
    scene.prove(2, server)
    await server.renew()
    assert refusal(server) is None


async def test_stopped_while_it_waits_for_an_answer_it_does_not_trust_the_answer(scene, make):
    server = make()
    await serving(scene, server)
    scene.answer_seconds = 30.0
    await server.renew()
    scene.answer_seconds = 0.0
    assert refusal(server) == (503, "no-lease")
    await server.renew()
    assert refusal(server) == (503, "joining")


async def test_left_out_of_a_publish_it_refuses_as_soon_as_it_is_told(scene, make):
    server, other = make(("server_id", "a")), make(("server_id", "b"))
    await serving(scene, server)
    await other.renew()
    scene.prove(2, other)
    await server.renew()
    assert refusal(server) == (503, "joining")
    scene.prove(3, server, other)
    await server.renew()
    assert refusal(server) is None, "under the lease that it had"


async def test_over_a_restart_of_the_broker_it_goes_on_serving(scene, make):
    server = make()
    await serving(scene, server)
    scene.connected = False
    await server.renew()
    scene.restart()
    scene.connected = True
    scene.now += LEASE / 2
    assert refusal(server) is None
    await server.renew()
    assert (scene.state, refusal(server)) == ("serving", None)


async def test_removed_at_the_broker_it_joins_under_a_new_lease(scene, make):
    server = make()
    await serving(scene, server)
    scene.servers.remove(server.identity.server_id)
    await server.renew()
    await server.renew()
    assert (scene.state, refusal(server)) == ("joining", (503, "joining"))


async def test_an_id_that_another_process_holds_is_waited_for(scene, make, caplog):
    first, second = make(), make()
    second.identity = ServerConfig.model_validate({"model": "m", "broker_url": "http://b"}).identify(
        "other boot", {}, encrypted=False
    )
    await first.renew()
    assert await second.renew() > 0
    assert refusal(second) == (503, "no-lease")
    scene.now += 2
    await second.renew()
    assert caplog.text.count("for another") == 1, "the same reason, with fewer seconds left"
    scene.now += LEASE
    await second.renew()
    assert refusal(second) == (503, "joining")


async def test_told_to_drain_it_takes_no_request_and_ends_when_the_running_ones_have_ended(scene, make):
    drained = []
    server = make(on_drain=lambda: drained.append(scene.now))
    await serving(scene, server)
    scene.servers.drain(server.identity.server_id)
    await server.renew()
    await server.renew()
    assert refusal(server) == (503, "draining")
    assert len(drained) == 1
    await server.leave()
    assert scene.state == "gone"


async def test_a_server_that_ends_tells_so_and_leaves(scene, make):
    drained = []
    server = make(on_drain=lambda: drained.append(1))
    await serving(scene, server)
    await server.drain()
    assert (scene.state, drained) == ("draining", [])
    await server.leave()
    assert scene.state == "gone"
    assert refusal(server) == (503, "no-lease")


@pytest.mark.parametrize("kind", [BrokerUnreachable, BrokerHostUnknown])
async def test_an_end_does_not_wait_for_a_broker_that_is_not_there(scene, make, kind):
    server = make()
    await server.renew()
    scene.connected, scene.failure = False, kind("nothing answers")
    await server.renew()
    async with asyncio.timeout(5):
        await server.drain()
        await server.leave()


async def test_a_server_whose_engine_does_not_answer_gives_up_its_lease(scene, make):
    silent = asyncio.Event()

    async def look():
        if silent.is_set():
            await asyncio.Event().wait()
        return Load()

    server = make(look=look)
    await serving(scene, server)
    silent.set()
    renewals = len(scene.reports)
    await server.renew()
    assert len(scene.reports) > renewals, "a step may take long"
    scene.now += PATIENCE_SECONDS
    renewals = len(scene.reports)
    await server.renew()
    assert len(scene.reports) == renewals
    assert refusal(server) == (503, "no-lease")
    server._looking.cancel()


async def test_a_request_that_waited_at_the_gate_is_asked_about_again(scene, make):
    """A publish holds requests back; a server that was stopped meanwhile must not admit them under its old version."""
    server, gate = make(), AdmissionGate()
    await serving(scene, server)
    gate.close()
    waiting = asyncio.ensure_future(gate.enter(server.check))
    await asyncio.sleep(0)
    scene.now += 30
    gate.open()
    with pytest.raises(Problem, match="no-lease"):
        await waiting
    assert gate.inside == 0
