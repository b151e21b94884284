"""A process reports each item once, keeps what it could not report, and never mixes the numbers of two runs."""

from collections import deque

import anyio
import pytest

from atropos_api.testing import make_group
from atropos_api.wire import ItemLease
from environments.sdk.runtime.items import ITEMS_A_CALL, ItemLeases, LeasedItem

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


class Leasing:
    """The broker's side: it gives the set answers, and keeps what it was asked."""

    def __init__(self, *answers):
        self.answers = deque(answers)
        self.asked = []

    async def __call__(self, request):
        await anyio.lowlevel.checkpoint()
        self.asked.append(request)
        return self.answers.popleft()


def leased(*numbers, run="run"):
    return ItemLease(run_id=run, items=list(numbers))


async def test_items_are_leased_a_few_at_a_time_and_reported_with_the_next_call():
    broker = Leasing(leased(0, 1), leased(2))
    leases = ItemLeases(broker, limit=3)
    first, second = await leases.take(), await leases.take()
    assert [key.key for key in leases.keys(first, 2)] == ["run/item-0/0", "run/item-0/1"]
    leases.acknowledge(first)
    leases.drop(second, "equal-scores")
    leases.count_sampled(make_group(2, 3))
    assert await leases.take() == LeasedItem("run", 2)
    one, two = broker.asked
    assert (one.call, one.count, one.limit, one.finished) == (1, ITEMS_A_CALL, 3, [])
    assert (two.call, two.finished, two.dropped) == (2, [], {"equal-scores": [1]}), "item 0's group is in progress"
    assert two.process == one.process
    assert two.sampled_sequences == 2


async def test_an_item_is_finished_when_its_last_group_is_acknowledged():
    broker = Leasing(leased(0), leased())
    leases = ItemLeases(broker)
    item = await leases.take()
    leases.keys(item, 2)
    leases.acknowledge(item)
    leases.acknowledge(item)
    await leases.close()
    assert (broker.asked[-1].finished, broker.asked[-1].count) == ([0], 0)


async def test_a_process_that_has_nothing_to_report_does_not_ask():
    broker = Leasing(leased(0))
    leases = ItemLeases(broker)
    await leases.close()
    await leases.take()
    await leases.close()
    assert len(broker.asked) == 1


async def test_items_of_the_run_before_are_not_reported_to_the_next_one_and_their_keys_are_its_own():
    broker = Leasing(leased(0), leased(0, run="next"), leased(1, run="next"))
    leases = ItemLeases(broker)
    old = await leases.take()
    new = await leases.take()
    (old_key,), (new_key,) = leases.keys(old, 1), leases.keys(new, 1)
    assert (old_key.key, new_key.key) == ("run/item-0/0", "next/item-0/0")
    leases.acknowledge(old)
    leases.acknowledge(new)
    await leases.take()
    assert broker.asked[-1].finished == [0]


async def test_an_item_that_is_leased_again_while_it_is_in_progress_is_not_begun_twice():
    """A process that was taken for dead has asked in between, so the broker gave its leases back."""
    broker = Leasing(leased(0), leased(0, 1), leased())
    leases = ItemLeases(broker)
    first = await leases.take()
    leases.keys(first, 1)
    assert await leases.take() == LeasedItem("run", 1)
    leases.acknowledge(first)
    await leases.close()
    assert broker.asked[-1].finished == [0]


async def test_a_broker_without_the_route_is_not_asked_again():
    broker = Leasing(None)
    leases = ItemLeases(broker)
    assert await leases.take() is None
    assert not leases.supported
    await leases.close()
    assert len(broker.asked) == 1


async def test_items_of_the_run_before_that_were_not_begun_are_forgotten():
    broker = Leasing(leased(0, 1, 2), leased(0, run="next"))
    leases = ItemLeases(broker)
    begun = await leases.take()
    leases.keys(begun, 1)
    leases.forget_unbegun("next")
    assert await leases.take() == LeasedItem("next", 0)
    leases.acknowledge(begun)


class Silent(Leasing):
    """It gets a call and gives no answer, once."""

    async def __call__(self, request):
        if len(self.asked) == 1:
            self.asked.append(request)
            await anyio.sleep_forever()
        return await super().__call__(request)


async def test_a_stop_during_a_call_loses_no_report_though_the_broker_may_have_had_it():
    broker = Silent(leased(0, 1), leased(2), leased())
    leases = ItemLeases(broker)
    first, second = await leases.take(), await leases.take()
    for item in (first, second):
        leases.keys(item, 1)
    leases.acknowledge(first)
    with anyio.move_on_after(0.01):
        await leases.take()
    leases.acknowledge(second)
    await leases.close()
    _, unanswered, again, last = broker.asked
    assert again == unanswered, "a broker that has had it answers as it did then, and reads nothing of it"
    assert (again.call, again.finished) == (2, [0])
    assert (last.call, last.finished, last.count) == (3, [1], 0)
