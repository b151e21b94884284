"""The fence's states, with an engine that records its calls; expired leases are in `test_fence_lapses`."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from example_trainer.serving import fence as fence_module
from example_trainer.serving.fence import Fence
from example_trainer.serving.problems import Problem
from example_trainer.weight_protocol.shm_header import WriteRefused

from .publishing import begin, publish, reached, refusal_of, slow_resume

pytestmark = pytest.mark.anyio


async def test_r27_a_sharing_server_serves_nothing_before_the_first_publish(fence, gate, header):
    assert await refusal_of(gate) == "no-policy"
    await publish(fence, header, 1)
    await gate.enter()
    assert fence.policy_version == 1


async def test_nothing_is_kept_of_the_requests_that_were_refused(fence, gate):
    """Clients ask again for as long as nothing is served: the prompts of all of them stayed in memory until then."""
    prompts = [Prompt() for _ in range(3)]
    kept = [weakref.ref(prompt) for prompt in prompts]
    while prompts:
        await ask(gate, prompts.pop())
    gc.collect()
    assert [prompt() for prompt in kept] == [None, None, None]


class Prompt:
    """A text of which it can be told whether anything still has it."""


async def ask(gate, prompt):
    with pytest.raises(Problem):
        await gate.enter()


async def test_a_server_that_shares_nothing_serves_at_once(engine, gate):
    fence = Fence(engine, gate, header=None)
    await gate.enter()
    assert fence.policy_version is None
    await fence.serve_fixed(4)
    assert (fence.policy_version, engine.calls) == (4, [("stamp", "4")])


async def test_a_publish_pauses_with_discard_and_resumes_under_the_new_version(fence, engine, header):
    answer = await publish(fence, header, 5)
    assert engine.calls == [("pause", True), ("resume", "5")]
    assert answer["recomputed_tokens"] == 12


async def test_draining_waits_for_those_inside_and_no_longer_than_its_limit(fence, gate, header):
    await publish(fence, header, 1)
    await gate.enter()
    began = asyncio.get_running_loop().time()
    answer = await fence.begin(lease_seconds=30, drain_seconds=0.05, in_flight="drain")
    assert answer["drained"] is False
    assert 0.04 < asyncio.get_running_loop().time() - began < 1


async def test_finish_waits_until_the_last_has_left(fence, gate, header):
    await publish(fence, header, 1)
    await gate.enter()
    await gate.enter()
    beginning = asyncio.ensure_future(begin(fence, in_flight="finish"))
    for _ in range(2):
        await asyncio.sleep(0.03)
        assert not beginning.done()
        gate.leave()
    await asyncio.wait_for(beginning, 1)


ABOUT_TO_END = {
    "computed_tokens": [40],
    "tokens": [40],
    "generated_tokens": [30],
    "token_limits": [32],
    "distinct_tokens": 40,
    "last_lengths": [32],
    "step_seconds": 0.05,
    "prefill_seconds": 0.01,
}


async def test_auto_waits_for_a_request_that_is_about_to_end(fence, gate, engine, header):
    await publish(fence, header, 1)
    await gate.enter()
    engine.now_running |= ABOUT_TO_END
    asyncio.get_running_loop().call_later(0.15, gate.leave)
    began = asyncio.get_running_loop().time()
    begun = await fence.begin(lease_seconds=30, drain_seconds=30.0, in_flight="auto")
    assert begun["drained"]
    assert 0.15 <= asyncio.get_running_loop().time() - began < 5
    assert engine.calls.count(("running", None)) >= 2, "two steps of 0.05 s were not enough, so it asked again"


async def test_auto_pauses_what_turns_out_to_be_long_and_says_what_it_cost(fence, gate, engine, header):
    await publish(fence, header, 1)
    await gate.enter()
    answers = iter([ABOUT_TO_END, ABOUT_TO_END | {"generated_tokens": [33], "token_limits": [10_000]}])

    async def running():
        return engine.now_running | next(answers)

    engine.running = running
    answer = await publish(fence, header, 2, in_flight="auto", drain_seconds=30.0)
    assert answer["expected_loss_seconds"] == pytest.approx(0.0, abs=0.06)
    assert answer["loss_seconds"] == pytest.approx(12 * 0.01, abs=0.02)
    assert (fence.expected_loss_seconds, fence.loss_seconds) == (
        answer["expected_loss_seconds"],
        answer["loss_seconds"],
    )


async def test_auto_asks_nothing_and_loses_nothing_if_nothing_runs(fence, engine, header):
    answer = await publish(fence, header, 1, in_flight="auto", drain_seconds=30.0)
    assert engine.calls == [("pause", True), ("resume", "1")]
    assert answer["expected_loss_seconds"] == answer["loss_seconds"] == 0


async def test_an_engine_that_cannot_say_what_runs_is_resumed(fence, gate, engine, header):
    await publish(fence, header, 1)
    await gate.enter()
    engine.failing.add("running")
    with pytest.raises(RuntimeError):
        await fence.begin(lease_seconds=30, drain_seconds=1.0, in_flight="auto")
    assert await reached(lambda: not fence.publishing)
    await asyncio.wait_for(gate.enter(), 1)


@pytest.mark.parametrize("in_flight", ["finish", "drain"])
async def test_a_request_that_only_waits_for_its_client_holds_up_no_publish(
    fence, gate, engine, header, in_flight, monkeypatch
):
    """A client that read its stream no further, or never sent its body, held up `finish` without end."""
    monkeypatch.setattr(fence_module, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(fence_module, "QUIET_SECONDS", 0.1)
    await publish(fence, header, 1)
    await gate.enter()
    engine.now_running |= {"waiting": 1}
    beginning = asyncio.ensure_future(begin(fence, in_flight=in_flight, drain_seconds=60.0))
    await asyncio.sleep(0.3)
    assert not beginning.done(), "the engine has not computed it yet"
    engine.now_running |= {"waiting": 0}
    await asyncio.wait_for(beginning, 1)


async def test_finish_waits_for_a_request_that_calls_the_engine_again_and_again(
    fence, gate, engine, header, monkeypatch
):
    """A beam search asks for one token at a time: a look between two of its calls finds no request in the engine."""
    monkeypatch.setattr(fence_module, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(fence_module, "QUIET_SECONDS", 0.1)
    await publish(fence, header, 1)
    await gate.enter()
    beginning = asyncio.ensure_future(begin(fence, in_flight="finish"))
    for _ in range(20):
        engine.generated_tokens += 1
        await asyncio.sleep(0.02)
    assert not beginning.done()
    gate.leave()
    await asyncio.wait_for(beginning, 1)


async def test_a_drain_whose_time_is_over_asks_the_engine_nothing(fence, gate, engine, header):
    await publish(fence, header, 1)
    await gate.enter()
    engine.calls.clear()
    await begin(fence, in_flight="drain", drain_seconds=0.05)
    assert [name for name, _ in engine.calls] == ["pause"]


async def test_a_pause_by_hand_during_a_resume_by_hand_ends_paused(fence, gate, engine, header):
    """The gate was open over a paused engine, or one that slept."""
    await publish(fence, header, 1)
    await fence.hold()
    resuming = slow_resume(engine)
    releasing = asyncio.ensure_future(fence.release())
    await resuming.wait()
    await fence.hold()
    await releasing
    assert (fence.paused, engine.paused) == (True, True)
    assert await refusal_of(gate) == "paused"


async def test_recompute_does_not_wait(fence, gate, header):
    await publish(fence, header, 1)
    await gate.enter()
    await asyncio.wait_for(begin(fence, in_flight="recompute", drain_seconds=60.0), 1)


async def test_newcomers_wait_outside_until_the_publish_has_ended(fence, gate, header):
    await publish(fence, header, 1)
    publish_id = await begin(fence)
    entering = asyncio.ensure_future(gate.enter())
    await asyncio.sleep(0.01)
    assert not entering.done()
    header.begin_write(2)
    header.end_write(2)
    await fence.end(publish_id, 2)
    await asyncio.wait_for(entering, 1)


async def test_a_publish_answers_to_its_whole_id_alone(fence, header):
    await publish(fence, header, 1)
    publish_id = await begin(fence)
    header.begin_write(2)
    header.end_write(2)
    for other in (publish_id[:-1], publish_id[:1], "", publish_id + "x"):
        for call in (fence.end(other, 2), fence.abort(other)):
            with pytest.raises(Problem):
                await call
        with pytest.raises(Problem):
            fence.renew(other)
    await fence.end(publish_id, 2)
    assert fence.policy_version == 2


async def test_r37_keeping_kv_salts_later_prefixes_and_discards_nothing(fence, engine, header):
    await publish(fence, header, 3, in_flight="keep_kv")
    assert engine.calls == [("pause", False), ("salt", "policy-3"), ("resume", "3")]
    assert fence.publishes_keeping_kv == 1


async def test_r26_a_lapse_before_anything_was_written_goes_on_under_the_old_version(fence, engine, gate, header):
    await publish(fence, header, 1)
    await begin(fence, lease_seconds=0.02)
    await asyncio.wait_for(gate.enter(), 1)
    assert engine.calls[-1] == ("resume", None)
    assert (fence.policy_version, fence.torn) == (1, False)


async def test_r26_a_lapse_with_torn_weights_stays_paused_until_a_whole_publish(fence, engine, gate, header):
    await publish(fence, header, 1)
    await begin(fence, lease_seconds=0.02)
    header.begin_write(2)
    await asyncio.sleep(0.1)
    assert await refusal_of(gate) == "weights-torn"
    assert engine.calls[-1] == ("pause", True)

    publish_id = await begin(fence, lease_seconds=0.02)  # another trainer that is killed before it writes
    await asyncio.sleep(0.1)
    assert await refusal_of(gate) == "weights-torn"
    with pytest.raises(Problem):
        await fence.end(publish_id, 3)

    await publish(fence, header, 4)
    await gate.enter()
    assert (fence.policy_version, fence.torn) == (4, False)


async def test_r26_who_wakes_after_the_lapse_is_refused_the_write(fence, header):
    await publish(fence, header, 1)
    await begin(fence, lease_seconds=0.01)
    await asyncio.sleep(0.05)
    with pytest.raises(WriteRefused):
        header.begin_write(2)
    assert header.state().torn is False


async def test_nobody_may_write_without_a_publish(fence, header):
    with pytest.raises(WriteRefused):
        header.begin_write(1)


async def test_a_renewed_lease_holds(fence, header):
    publish_id = await begin(fence, lease_seconds=1.0)
    for _ in range(4):
        await asyncio.sleep(0.3)
        fence.renew(publish_id)
    header.begin_write(1)
    header.end_write(1)
    assert (await fence.end(publish_id, 1))["version"] == 1


async def test_an_aborted_publish_that_wrote_is_torn(fence, gate, header):
    await publish(fence, header, 1)
    publish_id = await begin(fence)
    header.begin_write(2)
    assert (await fence.abort(publish_id))["torn"] is True
    assert await refusal_of(gate) == "weights-torn"


async def test_versions_rise_and_the_header_must_agree(fence, header):
    await publish(fence, header, 5)
    publish_id = await begin(fence)
    for version, kind in ((5, "version-not-new"), (4, "version-not-new"), (6, "write-incomplete")):
        with pytest.raises(Problem) as caught:
            await fence.end(publish_id, version)
        assert caught.value.kind == kind


async def test_a_second_publish_is_refused_while_one_is_under_way(fence):
    await begin(fence)
    with pytest.raises(Problem) as caught:
        await begin(fence)
    assert (caught.value.status, caught.value.kind) == (409, "publish-in-progress")


async def test_an_engine_that_cannot_pause_leaves_the_gate_as_it_was(fence, engine, gate, header):
    await publish(fence, header, 1)
    engine.failing.add("pause")
    with pytest.raises(RuntimeError):
        await begin(fence)
    await asyncio.wait_for(gate.enter(), 1)


async def test_a_repeated_end_has_the_same_answer_and_no_effect(fence, engine, header):
    publish_id = await begin(fence)
    header.begin_write(1)
    header.end_write(1)
    first = await fence.end(publish_id, 1)
    calls = list(engine.calls)
    assert await fence.end(publish_id, 1) == first
    assert engine.calls == calls


async def test_paused_by_hand_stays_paused_over_a_publish(fence, engine, gate, header):
    await publish(fence, header, 1)
    await fence.hold()
    assert await refusal_of(gate) == "paused"
    await publish(fence, header, 2)
    assert engine.calls[-1] == ("stamp", "2")
    assert await refusal_of(gate) == "paused"
    await fence.release()
    await gate.enter()
    assert engine.calls[-1] == ("resume", None)


async def test_stopping_turns_everybody_away_even_those_waiting(fence, gate, header):
    await publish(fence, header, 1)
    await begin(fence)
    entering = asyncio.ensure_future(gate.enter())
    await asyncio.sleep(0)
    fence.stop()
    with pytest.raises(Problem) as caught:
        await asyncio.wait_for(entering, 1)
    assert caught.value.kind == "stopping"


async def test_each_publish_has_a_random_id_of_its_own(fence):
    ids = []
    for _ in range(3):
        ids.append(await begin(fence))
        await fence.abort(ids[-1])
    assert len(set(ids)) == 3
    assert {len(bytes.fromhex(each)) for each in ids} == {16}


class NotedUpdate:
    """A change of weights that the server loaded itself; it records its calls and may be able to go back."""

    def __init__(self, *, can_go_back=True):
        self.can_go_back, self.calls = can_go_back, []

    async def keep(self):
        self.calls.append("kept")

    async def restore(self):
        self.calls.append("taken back")
        return self.can_go_back


async def overwritten(fence, version, **fields):
    publish_id, update = await begin(fence, **fields), NotedUpdate()
    fence.overwrite(publish_id, version, update)
    return publish_id, update


async def test_an_aborted_change_is_taken_back_and_the_old_version_served(engine, gate):
    fence = Fence(engine, gate, header=None)
    await fence.serve_fixed(1)
    publish_id, update = await overwritten(fence, 2)
    assert (await fence.abort(publish_id))["torn"] is False
    await gate.enter()
    assert (update.calls, fence.policy_version, engine.calls[-1]) == (["taken back"], 1, ("resume", None))


async def test_a_change_that_cannot_be_taken_back_is_refused_until_a_whole_publish(engine, gate):
    fence = Fence(engine, gate, header=None)
    publish_id, update = await overwritten(fence, 1)
    update.can_go_back = False
    assert (await fence.abort(publish_id))["torn"] is True
    publish_id, other = await overwritten(fence, 2)  # the weights that this trainer could restore are torn as well
    assert (await fence.abort(publish_id))["torn"] is True
    assert other.calls == []
    assert await refusal_of(gate) == "weights-torn"
    publish_id, last = await overwritten(fence, 3)
    await fence.end(publish_id, 3)
    await gate.enter()
    assert (last.calls, fence.policy_version, fence.torn) == (["kept"], 3, False)


async def test_a_change_whose_end_nobody_told_is_neither_kept_nor_taken_back(engine, gate):
    """The other servers may have taken the new version, or not."""
    fence = Fence(engine, gate, header=None)
    await fence.serve_fixed(1)
    _, update = await overwritten(fence, 2, lease_seconds=0.02)
    await asyncio.sleep(0.1)
    assert await refusal_of(gate) == "weights-torn"
    assert update.calls == []


async def test_a_version_that_is_not_new_changes_nothing(engine, gate):
    fence = Fence(engine, gate, header=None)
    await fence.serve_fixed(5)
    publish_id = await begin(fence)
    with pytest.raises(Problem) as caught:
        fence.overwrite(publish_id, 5, NotedUpdate())
    assert caught.value.kind == "version-not-new"
    assert (await fence.abort(publish_id))["torn"] is False


async def test_whole_weights_do_not_end_a_publish_while_another_write_has_begun(fence, header):
    publish_id = await begin(fence)
    header.begin_write(1)
    header.end_write(1)
    header.begin_write(2)
    with pytest.raises(Problem) as caught:
        await fence.end(publish_id, 1)
    assert caught.value.kind == "write-incomplete"


async def test_a_server_that_stops_lets_nobody_in_after_a_publish_that_ends_then(fence, gate, header):
    """Its clients have moved to the next server by then, and may have seen a newer version there."""
    publish_id = await begin(fence)
    header.begin_write(1)
    header.end_write(1)
    fence.stop()
    await fence.end(publish_id, 1)
    assert await refusal_of(gate) == "stopping"
