"""Open groups are told by name, with what is done and what they do now, so that a watcher can name a straggler."""

import anyio
import pytest

from environments.sdk.progress import (
    OpenGroups,
    name_of,
    note_attempt_done,
    note_event,
    note_sequences_done,
)
from environments.sdk.runtime.activity import public_url


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


def test_a_group_that_fails_is_no_measure_of_the_usual_time(groups, clock):
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


def test_a_servers_address_is_told_without_its_password():
    assert public_url("http://user:secret@host:9001/v1") == "http://host:9001/v1"
