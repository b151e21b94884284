"""Dropped groups are counted by reason, and logged after the first eight and every half minute, never silently."""

import logging
import math

import pytest

from atropos_api.wire.groups import Group
from environments.sdk.base_env import BaseEnv
from environments.sdk.config import BaseEnvConfig
from environments.sdk.errors import ItemDropped
from environments.sdk.groups import GroupRules
from environments.sdk.reporting import DroppedGroups, Rejection, last_answer
from environments.sdk.runtime.delivery import Delivery
from environments.sdk.runtime.rollouts import DrawnItem, RolloutRunner

pytestmark = pytest.mark.anyio

ZERO = Rejection("equal-scores", "every score is 0")


@pytest.fixture
def clock():
    class Clock:
        now = 0.0

        def __call__(self):
            return self.now

    return Clock()


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "environments.sdk.reporting")
    return lambda: caplog.records


def test_the_first_eight_are_reported_with_count_reason_example_and_flag(clock, lines):
    dropped = DroppedGroups(clock)
    for _ in range(7):
        dropped.record(ZERO, lambda: "last answer: 'forty-two'")
    assert lines() == []
    dropped.record(ZERO, lambda: "last answer: 'forty-two'")
    (line,) = lines()
    assert line.levelno == logging.WARNING
    assert line.getMessage() == (
        "8 groups collected, all dropped: every score is 0; last answer: 'forty-two'; "
        "--env.ensure_scores_are_not_same false sends them"
    )


def test_after_that_there_is_a_line_each_half_a_minute(clock, lines):
    dropped = DroppedGroups(clock)
    for number in range(8 + 65):
        clock.now = max(0, number - 7)
        dropped.record(ZERO)
    assert [line.getMessage().split()[0] for line in lines()] == ["8", "38", "68"]


def test_few_slow_groups_are_reported_after_half_a_minute(clock, lines):
    dropped = DroppedGroups(clock)
    dropped.record(ZERO)
    clock.now = 31
    dropped.record(ZERO)
    assert [line.getMessage().split()[0] for line in lines()] == ["2"]


def test_where_others_got_through_it_is_information_with_each_reason(clock, lines):
    dropped = DroppedGroups(clock)
    for _ in range(12):
        dropped.count_sent()
    for number in range(7):
        dropped.record(Rejection("equal-scores", f"every score is {number % 2}"))
    dropped.record(Rejection("too-long", "a rollout has 17 tokens where the trainer takes fewer than 16"))
    (line,) = lines()
    assert line.levelno == logging.INFO
    assert line.getMessage() == (
        "8 of 20 groups dropped: the scores within each group are equal (7), a rollout has 17 tokens where the trainer "
        "takes fewer than 16 (1); --env.ensure_scores_are_not_same false sends them"
    )


def test_the_end_reports_only_what_no_line_has_reported_yet(clock, lines):
    dropped = DroppedGroups(clock)
    dropped.log()
    dropped.record(ZERO)
    dropped.log()
    dropped.log()
    assert len(lines()) == 1


def test_a_report_holds_totals_under_one_session(clock):
    dropped = DroppedGroups(clock)
    dropped.record(ZERO)
    first = dropped.report()
    dropped.record(Rejection("failed", "given up"), count=3)
    second = dropped.report()
    assert (first.groups, second.groups) == ({"equal-scores": 1}, {"equal-scores": 1, "failed": 3})
    assert first.session == second.session != DroppedGroups(clock).report().session
    assert second.explanation == dropped.explain()


def test_an_example_that_cannot_be_decoded_costs_the_example_alone(clock):
    dropped = DroppedGroups(clock)
    dropped.record(ZERO, lambda: str(1 / 0))
    assert dropped.explain().startswith("1 group collected, all dropped: every score is 0; --env.")


class Numbers(BaseEnv):
    """An environment whose items are the scores of their group."""

    name = "numbers"

    async def setup(self):
        pass

    async def get_next_item(self):
        return None

    async def evaluate(self):
        pass

    async def collect_trajectories(self, item):
        if isinstance(item, Exception):
            raise item
        if not isinstance(item, list):
            return item, []
        return {"tokens": [[5, 6, 7]] * len(item), "masks": [[-100, 6, 7]] * len(item), "scores": item}, []


@pytest.fixture
def collector(tokenizer_folder):
    config = BaseEnvConfig(
        group_size=2, tokenizer_name=str(tokenizer_folder), use_wandb=False, rollout_attempts=1, worker_timeout=5
    )
    env = Numbers(config, [])
    rules = GroupRules(group_size=2, max_token_length=16, ensure_scores_are_not_same=True)
    return RolloutRunner(env, Delivery(env, lambda: rules, send=lambda *_: None))


@pytest.mark.parametrize(
    ("item", "counts"),
    [
        ([0.0, 1.0], {}),
        ([0.0, 0.0], {"equal-scores": 1}),
        ([0.0, 1.0, 2.0], {"group-size": 1}),
        ([0.0, math.nan], {"not-finite": 1}),
        ([math.inf, math.inf], {"not-finite": 1}),
        (None, {"no-group": 1}),
        ([], {"group-size": 1}),
        (ItemDropped("no room"), {"no-group": 1}),
        (ExceptionGroup("tasks", [ItemDropped("no room")]), {"no-group": 1}),
        (ValueError("mistake"), {"failed": 1}),
        (TimeoutError("a tool's own limit"), {"failed": 1}),
        ((None, None), {"no-group": 2}),
    ],
    ids=repr,
)
async def test_whatever_keeps_a_group_back_is_counted_by_its_reason(collector, item, counts):
    sent = await collector.collect(DrawnItem(item))
    dropped = collector._env.dropped_groups
    assert dropped.counts == counts
    assert sent == dropped.sent == (0 if counts else 1)


async def test_a_group_that_an_environment_delivers_itself_is_counted_once(collector):
    """It was counted as no group as well, and its lease was given back for that reason."""

    class Itself(Numbers):
        async def collect_trajectories(self, item):
            group, backlog = await super().collect_trajectories(item)
            await self.handle_send_to_api(group, item)
            return None, backlog

    collector._env.__class__ = Itself
    assert await collector.collect(DrawnItem([0.0, 0.0])) == 0
    assert collector._env.dropped_groups.counts == {"equal-scores": 1}
    assert await collector.collect(DrawnItem([0.0, 1.0])) == 1


class Unprintable(Exception):
    """An error whose text is made of something that is gone."""

    def __str__(self):
        raise OSError("the file is gone")

    def __repr__(self):
        return "Unprintable()"


async def test_an_error_whose_text_cannot_be_made_costs_its_item_alone(collector):
    """It ended the server: the number in `ValueError(10**5000)` has no text either."""
    assert await collector.collect(DrawnItem(Unprintable())) == 0
    assert collector._env.dropped_groups.counts == {"failed": 1}
    assert "given up after Unprintable" in collector._env.dropped_groups.explain()


async def test_an_item_that_an_environment_drops_is_not_tried_again(collector):
    collector._env.config.rollout_attempts = 5
    await collector.collect(DrawnItem(ItemDropped("no room")))
    assert collector._env.metrics.retried == collector._env.metrics.failed == 0


async def test_the_example_is_what_the_model_wrote(collector, tokenizer):
    await collector.collect(DrawnItem([0.0, 0.0]))
    assert f"last answer: {tokenizer.decode([6, 7])!r}" in collector._env.dropped_groups.explain()


def test_a_long_answer_is_shown_by_its_end():
    group = Group(tokens=[[5, 1]], masks=[[-100, 1]], scores=[0.0])
    shown = last_answer(group, lambda tokens: "x" * 500 + "end")()
    assert shown.endswith("end'")
    assert len(shown) < 200
