"""Members of a group: late ones are waited for, drawn again or left out, and no failure becomes a score."""

from __future__ import annotations

from collections import Counter

import anyio
import msgspec
import pytest

from atropos_api.testing import make_group
from atropos_api.wire import Batch
from atropos_api.wire.columns_groups import encode_submission
from atropos_api.wire.group_json import check_group, decode_fields
from environments.sdk.config import BaseEnvConfig
from environments.sdk.errors import InferenceUnavailable, ItemDropped, innermost
from environments.sdk.groups import GroupRules, fill_absent, group_items, to_wire
from environments.sdk.members import MemberRule, Members
from environments.sdk.rollout_metrics import RolloutMetrics
from environments.sdk.session.tokens_and_masks import SampleLog
from example_trainer.group_sequences import leave_out_absent

pytestmark = pytest.mark.anyio

SIZE = 8


class Drawing:
    """A source of members, numbered by their calls; `late` and `failing` are the calls that never end or raise."""

    def __init__(self, late=(), failing=(), error=ValueError):
        self.late, self.failing, self.error = set(late), set(failing), error
        self.calls = 0
        self.cancelled = []

    async def __call__(self):
        call = self.calls
        self.calls += 1
        await anyio.lowlevel.checkpoint()
        if call in self.failing:
            raise self.error(f"call {call}")
        if call in self.late:
            try:
                await anyio.sleep_forever()
            finally:
                self.cancelled.append(call)
        return {"tokens": [call, 5], "masks": [-100, 5], "scores": float(call)}, [f"after {call}"]


async def collect(drawing, late, *, draws=3, factor=1.0, least=6):
    counts = RolloutMetrics()
    rule = MemberRule(size=SIZE, late=late, least=least, factor=factor, draws=draws)
    with anyio.fail_after(20):
        members = await Members(drawing, rule, counts, item="7 + 5").collect()
    return [attempt["tokens"][0] for attempt, _ in members], counts.totals


async def test_a_group_is_closed_without_its_late_member(caplog):
    drawing = Drawing(late=[2])
    with caplog.at_level("INFO"):
        calls, _ = await collect(drawing, "close")
    assert calls == [0, 1, 3, 4, 5, 6, 7]
    assert drawing.cancelled == [2]
    assert "rollout 2 of 8 of item '7 + 5' is late" in caplog.text


class EndingAsGivenUp(Members):
    """Members of which the late ones end in the moment in which they are given up."""

    def __init__(self, released, *args):
        super().__init__(*args)
        self._released = released

    def _cancel_late(self, allowed_seconds):
        self._released.set()
        return super()._cancel_late(allowed_seconds)


async def test_a_member_that_ends_as_it_is_given_up_is_kept_and_its_next_draw_ended():
    """The group waited for that draw without a limit, and failed if it failed."""
    drawing, released = Drawing(late=range(SIZE, 10 * SIZE)), anyio.Event()

    async def draw():
        member = await drawing()
        if member[0]["tokens"][0] == 2:
            await released.wait()
        return member

    counts = RolloutMetrics()
    rule = MemberRule(size=SIZE, late="redraw", least=6, factor=1.0, draws=3)
    with anyio.fail_after(2):
        members = await EndingAsGivenUp(released, draw, rule, counts).collect()
    assert [attempt["tokens"][0] for attempt, _ in members] == [*range(SIZE)]
    assert counts.totals.redrawn == 1


async def test_a_late_member_is_drawn_again_in_its_place():
    drawing = Drawing(late=[2, 8])
    calls, totals = await collect(drawing, "redraw")
    assert calls == [0, 1, 9, 3, 4, 5, 6, 7]
    assert drawing.cancelled == [2, 8]
    assert totals.redrawn == 2


async def test_the_last_draw_of_a_late_member_has_no_limit():
    class Slow(Drawing):
        async def __call__(self):
            if self.calls == 8:
                await anyio.sleep(0.3)
            return await super().__call__()

    calls, totals = await collect(Slow(late=[7]), "redraw", draws=2)
    assert calls == [*range(7), 8]
    assert totals.redrawn == 1


async def test_a_group_that_waits_has_all_its_members():
    class Slow(Drawing):
        async def __call__(self):
            if self.calls == 0:
                self.calls += 1
                await anyio.sleep(0.2)
                return {"tokens": [99], "masks": [5], "scores": 0.0}, []
            return await super().__call__()

    calls, _ = await collect(Slow(), "wait", least=1)
    assert calls == [99, *range(1, 8)]


async def test_a_group_is_not_closed_before_its_least_members():
    """Only five of the six that it needs come by themselves: it waits for the sixth for as long as that takes."""

    class Slow(Drawing):
        async def __call__(self):
            if self.calls in (5, 6, 7):
                self.calls += 1
                await anyio.sleep(0.2 if self.calls == 6 else 60)
                return {"tokens": [self.calls - 1], "masks": [5], "scores": 0.0}, []
            return await super().__call__()

    calls, _ = await collect(Slow(), "close")
    assert len(calls) == 6


@pytest.mark.parametrize("late", ["redraw", "close"])
async def test_a_failed_member_leaves_the_others(late):
    drawing = Drawing(failing=[3])
    calls, totals = await collect(drawing, late)
    assert sorted(calls) == [0, 1, 2, 4, 5, 6, 7, *([8] if late == "redraw" else [])]
    assert totals.redrawn == (late == "redraw")


@pytest.mark.parametrize(("late", "failing"), [("wait", [3]), ("close", [1, 3, 5]), ("redraw", range(3, 100))], ids=str)
async def test_a_group_that_cannot_be_complete_fails_as_one(late, failing):
    with pytest.raises(ExceptionGroup) as failure:
        await collect(Drawing(failing=failing), late)
    assert isinstance(innermost(failure.value), ValueError)


@pytest.mark.parametrize("late", ["wait", "redraw", "close"])
@pytest.mark.parametrize("error", [ItemDropped, InferenceUnavailable])
async def test_an_error_of_all_members_ends_the_group_at_once(late, error):
    drawing = Drawing(failing=[3], error=error)
    with pytest.raises(ExceptionGroup) as failure:
        await collect(drawing, late)
    assert isinstance(innermost(failure.value), error)
    assert drawing.calls == SIZE


def closed_group(present=6, **fields):
    """Return a group as `collect_trajectories` gives it, with fewer members than its size."""
    items = [
        {
            "tokens": [3, 4, 5 + at],
            "masks": [-100, -100, 5 + at],
            "scores": float(at),
            "inference_logprobs": [1.0, 1.0, -0.5],
            "policy_versions": [(2, 3, 7)],
            "advantages": [0.0, 0.0, 1.0],
            "messages": [{"role": "user", "content": "?"}],
            "overrides": {"temperature": 0.5},
        }
        for at in range(present)
    ]
    return to_wire(group_items(items) | fields, SampleLog("train"))


def rules(**settings):
    config = BaseEnvConfig(group_size=SIZE, late_members="close", **settings)
    return GroupRules.from_config(config, max_token_length=-1)


def test_a_closed_group_is_filled_to_its_size_and_the_broker_takes_it():
    group = closed_group()
    assert rules().rejection(group) is None
    assert fill_absent(group, rules().full_size(group)) == 2
    assert len(group.tokens) == SIZE
    assert group.scores[6:] == [2.5, 2.5], "the mean of the others, so that any trainer has the right baseline"
    assert group.overrides[6:] == [{"absent": True}] * 2
    assert all(set(mask) == {-100} for mask in group.masks[6:])
    assert check_group(decode_fields(msgspec.json.encode(group)), env_id=0).size == SIZE
    assert encode_submission(0, [group])


def test_a_trainer_sees_a_closed_group_as_one_of_its_members():
    whole, closed = closed_group(), closed_group()
    fill_absent(closed, SIZE)
    other = make_group(4, 3)
    batch, absent = leave_out_absent(Batch(number=1, run_id="r", groups=[closed, other]))
    seen, same = batch.groups
    assert absent == 2
    assert seen == whole
    assert same is other


@pytest.mark.parametrize(
    ("present", "settings", "full"),
    [
        (6, {}, SIZE),
        (5, {}, None),
        (2, {"least_members": 2}, SIZE),
        (9, {}, None),
        (3, {"group_size_schedule": "0:8,5:4"}, 4),
        (4, {"group_size_schedule": "0:8,5:4"}, 4),
    ],
)
def test_a_group_is_full_from_its_least_members_on(present, settings, full):
    assert rules(**settings).full_size(closed_group(present)) == full


def test_a_group_that_names_its_size_or_waits_needs_all_members():
    assert rules().rejection(closed_group(6, group_overrides={"group_size": 7})) is not None
    waiting = GroupRules.from_config(BaseEnvConfig(group_size=SIZE), max_token_length=-1)
    assert Counter(waiting.full_size(closed_group(count)) for count in (6, 7, 8)) == {None: 2, SIZE: 1}


def test_more_least_members_than_the_group_has_are_refused():
    with pytest.raises(ValueError, match="least_members 9 is more than group_size 8"):
        BaseEnvConfig(group_size=8, least_members=9)
