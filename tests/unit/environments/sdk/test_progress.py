"""Open groups are reported by name, with what is done and what they do now, so that a watcher can name a straggler."""

import anyio
import msgspec
import pytest

from environments.sdk.members import MemberRule, Members
from environments.sdk.progress import (
    OpenGroups,
    collecting_member,
    name_of,
    note_attempt_done,
    note_event,
    note_sequences_done,
)
from environments.sdk.rollout_metrics import RolloutMetrics
from environments.sdk.runtime.activity import _describe_group, describe_activity, public_url


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def groups(clock):
    return OpenGroups(clock)


def test_what_is_noted_inside_a_group_is_about_that_group(groups):
    with groups.collecting({"question": "2+2?"}, 4) as outer:
        note_event("request")
        note_sequences_done(2)
        with groups.collecting("another", 4) as inner:
            note_attempt_done()
        assert (inner.name, inner.done) == ("another", 1)
    assert (outer.name, outer.done, outer.event) == ("2+2?", 2, "request")
    note_event("outside of any group")
    assert len(groups) == 0


def test_tasks_of_a_group_note_to_their_own_group(groups):
    async def member(text):
        note_event(text)
        note_attempt_done()

    async def collect(item, found):
        with groups.collecting(item, 3) as progress:
            async with anyio.create_task_group() as tasks:
                for _ in range(2):
                    tasks.start_soon(member, item)
            found.append((progress.name, progress.event, progress.done))

    async def main():
        found = []
        async with anyio.create_task_group() as tasks:
            for item in "abc":
                tasks.start_soon(collect, item, found)
        return found

    assert sorted(anyio.run(main)) == [("a", "a", 2), ("b", "b", 2), ("c", "c", 2)]


def test_the_members_that_are_not_finished_are_reported_by_their_index_and_last_event(groups):
    seen = []

    async def collect():
        index = len(seen)
        seen.append(index)
        note_event(f"tool {index}")
        if index == 2:
            await anyio.sleep_forever()
        return None, []

    async def main():
        rule = MemberRule(size=4, late="wait", least=4, factor=2.0, draws=1)
        with groups.collecting("item", 4) as progress:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(Members(collect, rule, RolloutMetrics()).collect)
                for _ in range(2000):
                    await anyio.sleep(0.01)
                    if progress.done == 3:
                        break
                (group,) = describe_activity(groups, NoServers(), evaluating=False).slowest
                tasks.cancel_scope.cancel()
        return group

    group = anyio.run(main)
    assert (group.done, group.wanted) == (3, 4)
    assert [(one.member, one.last_event) for one in group.waiting] == [(2, "tool 2")]


class NoServers:
    servers = ()


def test_a_member_that_is_drawn_again_is_reported_once(groups):
    with groups.collecting("item", 2) as progress:
        with collecting_member(1):
            note_event("first draw")
            with collecting_member(1):
                note_event("second draw")
                assert [one.event for one in progress.members.values()] == ["second draw"]
            assert not progress.members
        assert not progress.members


def test_attempts_and_sequences_are_not_counted_twice_nor_beyond_the_group(groups):
    with groups.collecting("item", 3) as progress:
        for _ in range(3):
            note_attempt_done()
            note_sequences_done(1)
        note_sequences_done(5)
        assert progress.done == 3


def test_the_usual_time_is_the_95th_percentile_once_ten_are_finished(groups, clock):
    for seconds in range(1, 10):
        with groups.collecting("item", 1):
            clock.now += seconds
    assert groups.usual_seconds() is None
    for _ in range(91):
        with groups.collecting("item", 1):
            clock.now += 1.0
    assert groups.usual_seconds() == pytest.approx(4.0, abs=1.0)
    assert groups.finished == 100


def test_a_group_that_fails_is_not_a_measure_of_the_usual_time(groups, clock):
    def fail():
        clock.now += 500.0
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"), groups.collecting("item", 1):
        fail()
    assert (groups.finished, len(groups)) == (0, 0)


def test_the_slowest_come_first(groups, clock):
    with groups.collecting("old", 1):
        clock.now += 5.0
        with groups.collecting("new", 1):
            assert [one.name for one in groups.slowest(5)] == ["old", "new"]
            assert [one.name for one in groups.slowest(1)] == ["old"]


@pytest.mark.parametrize(
    ("item", "name"),
    [
        ("a  b\nc", "a b c"),
        ({"question": "How many?"}, "How many?"),
        ({"rows": 1}, "{'rows': 1}"),
        ("x" * 300, "x" * 99 + "…"),
        (7, "7"),
    ],
)
def test_an_item_is_named_in_a_few_words(item, name):
    assert name_of(item) == name


def test_a_servers_address_is_reported_without_its_password():
    assert public_url("http://user:secret@host:9001/v1") == "http://host:9001/v1"


def test_half_a_surrogate_pair_in_data_or_a_tools_output_can_be_reported(groups):
    with groups.collecting({"question": "cut off \ud83d"}, 4) as progress:
        note_event("printed \ud83d")
        reported = msgspec.json.decode(msgspec.json.encode(_describe_group(progress, progress.began_at)))
    assert (reported["name"], reported["last_event"]) == ("cut off \\ud83d", "printed \\ud83d")


class Lazy:
    """An item that reads its question when it is asked for, from a file that is gone."""

    @property
    def question(self):
        raise OSError("the file is gone")


class Nameless:
    def __repr__(self):
        return self.missing


@pytest.mark.parametrize("item", [(10**5000,), Lazy(), Nameless()], ids=["number", "property", "repr"])
def test_an_item_that_cannot_be_shown_has_the_name_of_its_type(groups, item):
    """The error ended the server with all its rollouts, though an item's name is only shown."""
    with groups.collecting(item, 4) as progress:
        assert progress.name == type(item).__name__
