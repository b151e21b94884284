"""A run's newest groups can be read during the run and afterwards, at a bounded cost in time and space."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from atropos_api.wire.groups import Group
from environments.sdk import BaseEnv, scored_group
from environments.sdk.group_files import MOST_SHARE_OF_TIME, GroupFile, RecentGroups
from environments.sdk.runtime.rollouts import DrawnItem
from tests.full_disk import files_of_at_most

from .test_surface import Env, Rehearsal, collector_of


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def group(number: int) -> Group:
    return Group(tokens=[[number]], masks=[[number]], scores=[float(number)])


def chats() -> list[list[dict[str, Any]]]:
    return [[{"role": "assistant", "content": "text"}]]


def scores(path: Path) -> list[float]:
    return [json.loads(line)["scores"][0] for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rollouts/environment.jsonl"


@pytest.fixture
def clock() -> Clock:
    return Clock()


def offer(recent: RecentGroups, number: int, clock: Clock) -> None:
    """Offer a group a minute after the last one."""
    clock.now += 60
    recent.offer(group(number), chats)


def test_the_file_never_holds_twice_as_many_and_in_the_end_the_newest(path: Path, clock: Clock) -> None:
    recent = RecentGroups(path, 5, clock=clock)
    longest = 0
    for number in range(23):
        offer(recent, number, clock)
        assert scores(path)[-1] == number, "a group is there to be read at once"
        longest = max(longest, len(scores(path)))
    assert longest < 10
    recent.close()
    assert scores(path) == [18.0, 19.0, 20.0, 21.0, 22.0]


def test_of_long_groups_fewer_are_kept(path: Path, clock: Clock) -> None:
    recent = RecentGroups(path, 100, clock=clock, most_bytes=2000)
    largest = 0
    for number in range(60):
        offer(recent, number, clock)
        largest = max(largest, path.stat().st_size)
    recent.close()
    assert largest < 4000
    assert 1000 < path.stat().st_size <= 2000
    assert scores(path)[-1] == 59.0


def test_a_group_longer_than_all_may_be_is_kept_alone(path: Path, clock: Clock) -> None:
    recent = RecentGroups(path, 100, clock=clock, most_bytes=10)
    for number in range(3):
        offer(recent, number, clock)
    recent.close()
    assert scores(path) == [2.0]


def test_an_attempt_that_goes_on_with_a_run_goes_on_with_its_file_whole_lines_alone(path: Path, clock: Clock) -> None:
    first = RecentGroups(path, 3, clock=clock)
    for number in range(3):
        offer(first, number, clock)
    first.close()
    with path.open("ab") as file:
        file.write(b'{"scores": [99')  # killed while it wrote
    second = RecentGroups(path, 3, clock=clock)
    offer(second, 3, clock)
    second.close()
    assert scores(path) == [1.0, 2.0, 3.0]


def test_at_most_ten_groups_a_second_are_kept(path: Path, clock: Clock) -> None:
    recent = RecentGroups(path, 1000, clock=clock)
    for number in range(1000):
        recent.offer(group(number), chats)
        clock.now += 0.01
    recent.close()
    assert len(scores(path)) == pytest.approx(95, abs=6)


def test_groups_that_take_long_to_keep_take_no_more_than_their_share_of_the_time(path: Path, clock: Clock) -> None:
    recent = RecentGroups(path, 1000, clock=clock)
    spent = 0.0

    def slow_chats() -> list[list[dict[str, Any]]]:
        nonlocal spent
        clock.now += 0.05
        spent += 0.05
        return chats()

    while clock.now < 100:
        recent.offer(group(0), slow_chats)
        clock.now += 0.01
    recent.close()
    assert 0.5 * MOST_SHARE_OF_TIME < spent / clock.now <= 1.1 * MOST_SHARE_OF_TIME


def test_a_group_that_is_not_kept_costs_no_text(path: Path, clock: Clock) -> None:
    recent = RecentGroups(path, 5, clock=clock)
    recent.offer(group(0), chats)
    recent.offer(group(1), lambda: pytest.fail("its text was made"))
    recent.close()


def test_a_group_that_a_full_disk_refuses_is_not_in_the_file_when_its_item_is_tried_again(tmp_path: Path) -> None:
    """It was written once there was room again, beside that of the next try, and closing the file failed until then."""
    file = GroupFile(tmp_path / "groups.jsonl")
    file.append(group(0))
    with files_of_at_most(file.path.stat().st_size + 8):
        with pytest.raises(OSError, match="too large"):
            file.append(group(1))
        assert scores(file.path) == [0.0]
    file.append(group(2))
    file.close()
    assert (scores(file.path), file.count) == ([0.0, 2.0], 2)


def test_nothing_is_written_where_there_is_no_group(path: Path) -> None:
    RecentGroups(path, 5).close()
    assert not path.exists()


def test_where_nothing_can_be_written_the_run_goes_on_and_says_so_once(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    recent = RecentGroups(tmp_path / "file/environment.jsonl", 5, clock=clock)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            offer(recent, number, clock)
        recent.close()
    assert [record.message for record in caplog.records if "no more groups are saved" in record.message] == [
        f"{tmp_path}/file/environment.jsonl: no more groups are saved to it (File exists)"
    ]


class Chatting(Env):
    """An environment that chats by a template with roles as plain text."""

    async def collect_trajectories(self, item: Any) -> Any:
        async with self.server.managed_server() as session:
            await session.chat_completion(messages=[{"role": "user", "content": "How many?"}], n=2, max_tokens=8)
            return scored_group(session.nodes, [item, 0]), []


@pytest.mark.parametrize("env_cls", [Env, Chatting])
@pytest.mark.anyio
async def test_while_serving_the_groups_that_are_kept_have_their_chats_and_those_sent_have_not(
    env_cls: type[BaseEnv], path: Path, tmp_path: Path
) -> None:
    settings = {"data_path_to_save_groups": str(path), "groups_to_keep": 5}
    async with Rehearsal(env_cls, ["x"], tmp_path, **settings) as rehearsal:
        collector, sent = await collector_of(rehearsal.env)
        await collector.collect(DrawnItem(1))
        collector._delivery.close()
    (kept,) = saved(path)
    question = "item 1" if env_cls is Env else "How many?"
    assert kept["messages"][0] == [{"role": "user", "content": question}, {"role": "assistant", "content": "x"}]
    assert kept["tokens"] == sent[0].tokens
    assert sent[0].messages is None


@pytest.mark.anyio
async def test_process_keeps_every_group_that_it_is_asked_for(tmp_path: Path) -> None:
    async with Rehearsal(Env, ["x"], tmp_path, groups_to_keep=1) as rehearsal:
        assert len(await rehearsal.process(3)) == 3


def saved(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
