"""The broker connection loses and doubles no submitted group, no matter how the broker fails."""

from collections import Counter

import anyio
import anyio.lowlevel
import msgspec
import pytest

from atropos_api.client import BrokerRefused, BrokerUnreachable
from atropos_api.wire.groups import Group
from atropos_api.wire.messages import EnvironmentInfo, EnvironmentRequest, Pacing, SubmitAnswer
from environments.sdk.reporting import EQUAL_SCORES, DroppedGroups, Rejection
from environments.sdk.runtime import broker_session
from environments.sdk.runtime.broker_session import BrokerConnection
from environments.sdk.runtime.items import GroupKey, LeasedItem

pytestmark = pytest.mark.anyio


def pacing(revision, *, room=64, step=0, state="run"):
    return Pacing(
        state=state,
        revision=revision,
        current_step=step,
        num_steps=10,
        batch_size=32,
        outstanding_sequences=0,
        room_sequences=room,
        policy_version=1,
        policy_step=step,
    )


class ScriptedClient:
    """A broker client whose failures are scripted; it records accepted groups by idempotency key."""

    def __init__(self, *failures):
        self.failures = list(failures)
        self.taken = {}
        self.registrations = 0
        self.refusals = []

    async def wait_until_ready(self, timeout_seconds, on_wait):
        pass

    async def register_environment(self, request):
        if self.refusals:
            raise self.refusals.pop(0)
        self.registrations += 1
        return EnvironmentInfo(
            environment_id=self.registrations,
            display_name=request.name,
            pacing=pacing(0),
            run_id="r",
            batch_size=32,
            max_token_length=512,
            num_steps=10,
            checkpoint_dir="",
            checkpoint_interval=0,
            wandb_project="",
            wandb_group="",
        )

    async def heartbeat(self, environment_id, *, revision, wait_seconds):
        await anyio.sleep_forever()

    async def submit(self, environment_id, groups, *, idempotency_key, run_id=None):
        failure = self.failures.pop(0) if self.failures else None
        if failure == "lost answer":
            self.taken[idempotency_key] = list(groups)
            raise BrokerUnreachable("gone")
        if callable(failure):
            failure(groups)
        elif failure is not None:
            raise failure
        duplicates = len(groups) if idempotency_key in self.taken else 0
        self.taken[idempotency_key] = list(groups)
        return SubmitAnswer(accepted=len(groups), buffered=0, duplicates=duplicates, pacing=None)


def group(token):
    return Group(tokens=[[token]] * 2, masks=[[token]] * 2, scores=[0.0, 1.0])


async def send_all(client, groups):
    request = EnvironmentRequest(name="e", group_size=2, max_token_length=16)
    link = BrokerConnection(client, request, wait_timeout_seconds=5)
    await link.register()
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(link.keep_submitting)
            for one in groups:
                link.hand_in(one)
                await anyio.lowlevel.checkpoint()
            await link.flush()
            tasks.cancel_scope.cancel()
    assert link.pending_sequences == 0
    return Counter(one.tokens[0][0] for taken in client.taken.values() for one in taken)


async def test_a_lost_answer_is_repeated_under_the_same_key():
    client = ScriptedClient("lost answer", BrokerUnreachable("still away"))
    taken = await send_all(client, [group(n) for n in range(5)])
    assert taken == Counter(range(5))


async def test_a_broker_that_forgot_the_environment_is_registered_with_again():
    forgot = BrokerRefused({"type": "https://x/unknown-environment", "detail": "who?"}, 404)
    client = ScriptedClient(forgot)
    assert await send_all(client, [group(1)]) == Counter([1])
    assert client.registrations == 2


async def test_a_broker_that_ends_again_before_it_registers_an_environment_is_waited_for():
    client = ScriptedClient()
    client.refusals = [BrokerUnreachable("gone again"), BrokerRefused({"detail": "it stops"}, 503)]
    assert await send_all(client, [group(1)]) == Counter([1])
    client.refusals = [BrokerRefused({"type": "x/invalid-request", "detail": "no such weight"}, 422)]
    with pytest.raises(BrokerRefused, match="no such weight"):
        await send_all(client, [])


async def test_a_refused_group_costs_its_neighbours_nothing(caplog):
    def refuse_three(groups):
        if any(one.tokens[0][0] == 3 for one in groups):
            raise BrokerRefused({"type": "x/invalid-group", "detail": "scores[0]: not finite"}, 422)

    client = ScriptedClient(*[refuse_three] * 20)
    taken = await send_all(client, [group(n) for n in range(6)])
    assert taken == Counter([0, 1, 2, 4, 5])
    assert "not finite" in caplog.text


@pytest.mark.parametrize("status", [408, 500, 503])
async def test_a_refusal_that_passes_ends_nothing(status):
    """408: code of the environment blocked the event loop for ten seconds while a request was begun."""
    client = ScriptedClient(BrokerRefused({"detail": "no complete request arrived"}, status))
    assert await send_all(client, [group(1)]) == Counter([1])


async def test_a_broker_that_refuses_the_sender_ends_the_server():
    client = ScriptedClient(BrokerRefused({"type": "x/token-required", "detail": "send a token"}, 401))
    with pytest.raises(ExceptionGroup) as failure:
        await send_all(client, [group(1)])
    assert "send a token" in str(failure.value.exceptions[0])


async def test_older_pacing_does_not_overwrite_newer():
    client = ScriptedClient()
    link = BrokerConnection(
        client, EnvironmentRequest(name="e", group_size=2, max_token_length=16), wait_timeout_seconds=5
    )
    await link.register()
    link._adopt(pacing(5, room=8), authoritative=False)
    link._adopt(pacing(4, room=64), authoritative=False)
    assert link.pacing.room_sequences == 8
    link._adopt(pacing(1, room=16), authoritative=True)
    assert link.pacing.room_sequences == 16


async def test_an_environment_whose_schedule_has_a_smaller_size_at_the_start_of_a_run_is_not_paused_for_ever():
    """It had registered with the size of a later step, of which no group fits a batch of the next run."""
    client = ScriptedClient()
    link = BrokerConnection(
        client, EnvironmentRequest(name="e", group_size=64, max_token_length=16), wait_timeout_seconds=5
    )
    assert not link.stays_paused(64)
    await link.register()
    assert not link.stays_paused(64)
    paused = msgspec.structs.replace(pacing(1, room=0), paused_because="groups of 64 are larger than a batch of 32")
    link._adopt(paused, authoritative=True)
    assert [link.stays_paused(size) for size in (64, 48, 16)] == [True, True, False]


async def test_a_step_of_the_trainer_is_passed_on_once():
    steps = []
    client = ScriptedClient()
    link = BrokerConnection(
        client, EnvironmentRequest(name="e", group_size=2, max_token_length=16), wait_timeout_seconds=5
    )
    link.on_step = lambda now: steps.append(now.current_step)
    await link.register()
    for revision, step in ((1, 0), (2, 1), (3, 1), (4, 3)):
        link._adopt(pacing(revision, step=step), authoritative=True)
    assert steps == [1, 3]


async def test_a_group_for_a_run_that_the_broker_forgot_costs_that_group_and_not_the_server():
    forgot = BrokerRefused({"type": "https://x/unknown-run", "detail": "no run has the id 'run-1'"}, 404)
    client = ScriptedClient(forgot)
    refused, ended = [], []
    link = BrokerConnection(
        client, EnvironmentRequest(name="e", group_size=2, max_token_length=16), wait_timeout_seconds=5
    )
    link.on_refused = lambda one, _: refused.append(one.tokens[0][0])
    link.on_item_group = ended.append
    await link.register()
    items = [LeasedItem("run-1", 0), LeasedItem("run-2", 0)]
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(link.keep_submitting)
            for number, item in enumerate(items):
                link.hand_in(group(number), GroupKey(item, f"{item.run_id}/item-0/0"))
            await link.flush()
            await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
    assert (refused, ended) == ([0], items)
    assert list(client.taken) == ["run-2/item-0/0"]


async def test_a_report_of_dropped_groups_that_is_lost_is_sent_again_without_another_drop(monkeypatch):
    """The broker showed too few drops from then on, of an environment that dropped no more."""
    monkeypatch.setattr(broker_session, "REPORT_SECONDS", 0.0)
    forgotten = BrokerRefused({"type": "https://atropos/problems/unknown-environment"}, 404)
    failures, taken, arrived = [BrokerUnreachable("gone"), forgotten], [], anyio.Event()

    async def report_dropped(_environment_id, report):
        if failures:
            raise failures.pop(0)
        taken.append(report.groups)
        arrived.set()

    client, dropped = ScriptedClient(), DroppedGroups()
    client.report_dropped = report_dropped
    link = BrokerConnection(
        client, EnvironmentRequest(name="e", group_size=2, max_token_length=16), wait_timeout_seconds=5
    )
    await link.register()
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(link.keep_reporting, dropped)
            await anyio.lowlevel.checkpoint()
            dropped.record(Rejection(EQUAL_SCORES, "every score is 0"))
            await arrived.wait()
            tasks.cancel_scope.cancel()
    assert taken == [{EQUAL_SCORES: 1}]
