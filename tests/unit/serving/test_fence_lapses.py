"""Publishes that their trainer does not end: lost answers, lapses at each step, an engine that does not resume."""

from __future__ import annotations

import asyncio

import pytest

from example_trainer.serving.fence import Fence
from example_trainer.serving.problems import Problem
from example_trainer.weight_protocol.shm_header import WriteRefused

from .publishing import begin, publish, reached, refusal_of, slow_resume

pytestmark = pytest.mark.anyio

OURS, OTHER = "a" * 32, "b" * 32


async def kind_of(refused):
    with pytest.raises(Problem) as caught:
        await refused
    return caught.value.kind


async def lapsed(fence):
    assert await reached(lambda: not fence.publishing)


async def test_r41_a_lapse_after_the_whole_write_serves_the_version_that_the_header_names(fence, engine, gate, header):
    await publish(fence, header, 1)
    publish_id = await begin(fence, lease_seconds=0.02)
    header.begin_write(2)
    header.end_write(2)
    await lapsed(fence)
    await gate.enter()
    assert (fence.policy_version, fence.torn, engine.calls[-1]) == (2, False, ("resume", "2"))
    late = await fence.end(publish_id, 2)
    assert late["version"] == 2, "a trainer that resumes gets the answer to its request"
    assert await kind_of(fence.end(publish_id, 3)) == "publish-lapsed"


async def test_r41_an_abort_after_the_whole_write_serves_the_version_that_the_header_names(fence, engine, gate, header):
    await publish(fence, header, 1, in_flight="keep_kv")
    publish_id = await begin(fence, in_flight="keep_kv")
    header.begin_write(2)
    header.end_write(2)
    told = {"publish_id": publish_id, "torn": False, "policy_version": 2}
    assert await fence.abort(publish_id) == told
    assert await fence.abort(publish_id) == told, "asked again, because the answer was lost"
    await gate.enter()
    assert engine.calls[-2:] == [("salt", "policy-2"), ("resume", "2")]


async def test_r41_weights_that_were_torn_are_not_served_by_a_resume_once_they_are_whole(fence, engine, gate, header):
    """The trainer stops in the middle of the write until its lease has ended, and finishes the write afterwards."""
    await publish(fence, header, 1)
    await begin(fence, lease_seconds=0.02)
    header.begin_write(2)
    await lapsed(fence)
    header.end_write(2)
    await fence.release()
    assert await refusal_of(gate) == "weights-torn"
    assert engine.paused
    await begin(fence, lease_seconds=0.02)
    await lapsed(fence)
    await gate.enter()
    assert fence.policy_version == 2


@pytest.mark.parametrize("in_flight", ["finish", "auto", "drain"])
async def test_a_publish_to_torn_weights_does_not_wait_for_requests_that_are_paused_with_them(
    fence, gate, header, in_flight
):
    await publish(fence, header, 1)
    await gate.enter()
    await begin(fence, lease_seconds=0.02)
    header.begin_write(2)
    await lapsed(fence)
    assert fence.torn
    answer = await asyncio.wait_for(publish(fence, header, 3, in_flight=in_flight, drain_seconds=30.0), 1)
    assert (answer["version"], fence.torn, gate.inside) == (3, False, 1), "it goes on under the new version"


async def test_r41_held_by_hand_a_lapse_stamps_the_whole_version_and_stays_paused(fence, engine, gate, header):
    await publish(fence, header, 1)
    await begin(fence, lease_seconds=0.05)
    header.begin_write(2)
    header.end_write(2)
    await fence.hold()
    await lapsed(fence)
    assert (engine.calls[-1], engine.paused) == (("stamp", "2"), True)
    await fence.release()
    await gate.enter()
    assert (fence.policy_version, engine.paused) == (2, False)


async def test_r41_an_end_that_does_not_get_through_can_be_repeated(fence, engine, gate, header):
    publish_id = await begin(fence)
    header.begin_write(1)
    header.end_write(1)
    engine.failing.add("resume")
    with pytest.raises(RuntimeError):
        await fence.end(publish_id, 1)
    assert fence.publishing
    engine.failing.clear()
    assert (await fence.end(publish_id, 1))["version"] == 1
    await gate.enter()


@pytest.mark.parametrize("way", ["end", "abort", "lapse", "pause"])
async def test_r41_while_the_engine_does_not_go_on_the_publish_is_open_and_goes_on_by_itself_later(
    fence, engine, gate, header, way
):
    await publish(fence, header, 1)
    publish_id = await begin(fence, lease_seconds=0.05)
    header.begin_write(2)
    header.end_write(2)
    engine.failing.add("resume")
    if way == "pause":
        engine.failing.add("pause")
        await reached(lambda: fence._publish.abandoned)
        with pytest.raises(RuntimeError, match="does not pause"):
            await begin(fence, lease_seconds=0.05)
    elif way != "lapse":
        with pytest.raises(RuntimeError, match="does not resume"):
            await (fence.end(publish_id, 2) if way == "end" else fence.abort(publish_id))
    await asyncio.sleep(0.2)
    entering = asyncio.ensure_future(gate.enter())
    await asyncio.sleep(0)
    assert (fence.publishing, entering.done(), engine.paused) == (True, False, True)
    engine.failing.clear()
    await asyncio.wait_for(entering, 2)
    assert (fence.policy_version, engine.calls[-1]) == (2, ("resume", "2"))


async def test_r41_a_begin_supersedes_a_publish_whose_lease_has_run_out_though_the_engine_did_not_go_on(
    fence, engine, gate, header
):
    await publish(fence, header, 1)
    await begin(fence, lease_seconds=0.02)
    engine.failing.add("resume")
    assert await reached(lambda: fence._publish.abandoned)
    second = await begin(fence)
    engine.failing.clear()
    await asyncio.sleep(0.1)
    assert fence._publish.publish_id == second, "the one before does not end it"
    header.begin_write(2)
    header.end_write(2)
    await fence.end(second, 2)
    await gate.enter()
    assert fence.policy_version == 2


async def test_a_begin_before_the_lease_has_run_out_is_told_for_how_long_it_lasts(fence):
    await begin(fence, lease_seconds=20.0)
    with pytest.raises(Problem, match="lapses in 20 s") as caught:
        await begin(fence)
    assert (caught.value.status, caught.value.retry_after_seconds) == (409, 20)


async def test_a_begin_whose_answer_was_lost_is_asked_for_again_by_its_id(fence, engine, gate, header):
    await publish(fence, header, 1)
    await gate.enter()
    asked = [asyncio.ensure_future(begin(fence, publish_id=OURS, in_flight="finish")) for _ in range(2)]
    await asyncio.sleep(0.02)
    gate.leave()
    assert await asyncio.gather(*asked) == [OURS, OURS]
    assert await begin(fence, publish_id=OURS) == OURS
    assert engine.calls.count(("pause", True)) == 2, "one for each publish"
    assert await kind_of(begin(fence, publish_id=OTHER)) == "publish-in-progress"


async def test_a_begin_that_arrives_after_its_publish_is_over_opens_nothing(fence, header):
    for way in ("end", "abort", "lapse"):
        version = (fence.policy_version or 0) + 1
        publish_id = await begin(fence, publish_id=OURS + way, lease_seconds=0.05)
        if way == "abort":
            await fence.abort(publish_id)
        else:
            header.begin_write(version)
            header.end_write(version)
            if way == "end":
                await fence.end(publish_id, version)
        await lapsed(fence)
        assert await kind_of(begin(fence, publish_id=OURS + way)) == "publish-lapsed"
        assert not fence.publishing


async def test_a_trainer_that_dies_while_the_server_drains_holds_it_up_no_longer_than_its_lease(
    fence, engine, gate, header
):
    await publish(fence, header, 1)
    await gate.enter()
    beginning = asyncio.ensure_future(begin(fence, publish_id=OURS, in_flight="finish", lease_seconds=0.05))
    await asyncio.sleep(0.01)
    await asyncio.wait_for(gate.enter(), 1)
    assert not fence.publishing
    gate.leave()
    gate.leave()
    assert await kind_of(beginning) == "publish-lapsed"
    assert not engine.paused


async def test_a_lease_that_is_renewed_holds_while_the_server_drains_and_nothing_can_be_ended_yet(fence, gate, header):
    await publish(fence, header, 1)
    await gate.enter()
    beginning = asyncio.ensure_future(begin(fence, publish_id=OURS, in_flight="finish", lease_seconds=0.1))
    for _ in range(4):
        await asyncio.sleep(0.05)
        fence.renew(OURS)
    assert await kind_of(fence.end(OURS, 2)) == "publish-not-begun"
    with pytest.raises(WriteRefused):
        header.begin_write(2)
    assert (await fence.abort(OURS))["policy_version"] == 1
    gate.leave()
    assert await kind_of(beginning) == "publish-lapsed"
    await gate.enter()


@pytest.mark.parametrize("moment", ["before the write", "in the write", "after the write"])
async def test_r41_a_resume_by_hand_during_a_publish_changes_nothing(fence, engine, gate, header, moment):
    await publish(fence, header, 1)
    publish_id = await begin(fence)
    calls = list(engine.calls)
    if moment != "before the write":
        header.begin_write(2)
    if moment == "after the write":
        header.end_write(2)
    entering = asyncio.ensure_future(gate.enter())
    await fence.release()
    await asyncio.sleep(0.01)
    assert (engine.calls, fence.torn, entering.done()) == (calls, False, False)
    if moment == "before the write":
        header.begin_write(2)
    if moment != "after the write":
        header.end_write(2)
    await fence.end(publish_id, 2)
    await asyncio.wait_for(entering, 1)


async def test_a_resume_by_hand_lets_go_on_what_a_publish_still_waits_for(fence, engine, gate, header):
    await publish(fence, header, 1)
    await gate.enter()
    await fence.hold()
    beginning = asyncio.ensure_future(begin(fence, in_flight="finish"))
    await asyncio.sleep(0.01)
    await fence.release()
    assert not engine.paused
    gate.leave()
    await asyncio.wait_for(beginning, 1)


async def test_a_resume_by_hand_that_fails_leaves_the_server_held(fence, engine, gate, header):
    await publish(fence, header, 1)
    await fence.hold()
    engine.failing.add("resume")
    with pytest.raises(RuntimeError):
        await fence.release()
    assert await refusal_of(gate) == "paused", "no request waits in a paused engine"
    engine.failing.clear()
    await fence.release()
    await gate.enter()


class SlowChange:
    """A change that takes longer than the lease to restore the old weights."""

    async def keep(self):
        raise AssertionError

    async def restore(self):
        await asyncio.sleep(0.15)
        return True


async def test_an_abort_that_takes_longer_than_the_lease_does_not_lapse_meanwhile(engine, gate):
    fence = Fence(engine, gate, header=None)
    await fence.serve_fixed(1)
    publish_id = await begin(fence, lease_seconds=0.05)
    fence.overwrite(publish_id, 2, SlowChange())
    assert (await fence.abort(publish_id))["torn"] is False
    await gate.enter()
    assert fence.policy_version == 1


async def test_what_is_decoded_beside_lapses_aborts_and_publishes_is_stamped_with_the_weights_it_is_of(
    fence, engine, gate, header
):
    """The weights are one number, which a step reads; it must not change while the engine runs."""
    weights, wrong, seen = [1], [], set()
    engine._step_seconds = 0.002  # without a pause between its steps a request would end within one version

    async def ask():
        await gate.enter()
        read = []
        spans = await engine.decode(200, lambda start, end: read.extend(weights * (end - start)))
        gate.leave()
        seen.update(stamped for _, _, stamped in spans)
        wrong.extend(read[at] for start, end, stamped in spans for at in range(start, end) if read[at] != stamped)

    await publish(fence, header, 1)
    asking = [asyncio.ensure_future(ask()) for _ in range(4)]
    for version, way in enumerate(["end", "lapse", "abort", "lapse", "end"], 2):
        publish_id = await begin(fence, lease_seconds=0.03)
        header.begin_write(version)
        weights[0] = version
        header.end_write(version)
        if way == "end":
            await fence.end(publish_id, version)
        elif way == "abort":
            await fence.abort(publish_id)
        await lapsed(fence)
        await asyncio.sleep(0.01)
    await asyncio.gather(*asking)
    assert wrong == []
    assert seen >= {2, 3, 4, 5, 6}
    assert fence.policy_version == 6


async def test_held_by_hand_a_lapse_before_the_write_does_not_have_the_engine_go_on(fence, engine, header):
    await publish(fence, header, 1)
    await fence.hold()
    await begin(fence, lease_seconds=0.02)
    await lapsed(fence)
    assert engine.paused


class PausedChange:
    """A change that restores the old weights once it may."""

    def __init__(self):
        self.may_go_on = asyncio.Event()
        self.restored = False

    async def keep(self):
        pass

    async def restore(self):
        await self.may_go_on.wait()
        self.restored = True
        return True


async def test_no_publish_begins_while_an_abort_restores_the_weights(engine, gate):
    """The abort called the weights whole at its end, in the middle of the other publish's load."""
    fence, change = Fence(engine, gate, header=None), PausedChange()
    await fence.serve_fixed(1)
    publish_id = await begin(fence)
    fence.overwrite(publish_id, 2, change)
    aborting = asyncio.ensure_future(fence.abort(publish_id))
    await asyncio.sleep(0.01)
    assert await kind_of(begin(fence)) == "publish-in-progress"
    change.may_go_on.set()
    assert (await aborting)["torn"] is False
    second = await begin(fence)
    fence.overwrite(second, 3)
    await fence.abort(second)
    assert fence.torn


@pytest.mark.parametrize("in_flight", ["finish", "auto", "drain"])
async def test_a_publish_does_not_wait_for_requests_that_the_one_before_has_paused(
    fence, engine, gate, header, in_flight
):
    await publish(fence, header, 1)
    await gate.enter()
    engine.now_running |= {"computed_tokens": [7]}
    await begin(fence, lease_seconds=0.02, in_flight="recompute")
    engine.failing.add("resume")
    assert await reached(lambda: fence._publish.abandoned)
    second = await asyncio.wait_for(begin(fence, in_flight=in_flight, drain_seconds=60.0), 1)
    engine.failing.clear()
    header.begin_write(2)
    await fence.release()
    assert engine.paused, "a resume by hand does not have torn weights computed"
    header.end_write(2)
    await fence.end(second, 2)
    assert not engine.paused


async def test_an_abort_during_the_end_of_a_publish_restores_nothing(engine, gate):
    """The old weights were served under the new version."""
    fence, change = Fence(engine, gate, header=None), PausedChange()
    change.may_go_on.set()
    await fence.serve_fixed(1)
    publish_id = await begin(fence)
    fence.overwrite(publish_id, 2, change)
    resuming = slow_resume(engine)
    ending = asyncio.ensure_future(fence.end(publish_id, 2))
    await resuming.wait()
    assert (await fence.abort(publish_id))["policy_version"] == 2
    assert (await ending)["version"] == 2
    assert not change.restored


async def test_finish_waits_though_the_engine_still_resumes_after_a_publish_that_lapsed(fence, engine, gate, header):
    await publish(fence, header, 1)
    await gate.enter()
    await begin(fence, lease_seconds=0.02, in_flight="recompute")
    resuming = slow_resume(engine)
    await asyncio.wait_for(resuming.wait(), 2)
    finishing = asyncio.ensure_future(begin(fence, in_flight="finish"))
    await asyncio.sleep(0.15)
    assert not finishing.done()
    gate.leave()
    await asyncio.wait_for(finishing, 2)
