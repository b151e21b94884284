"""Leases of item numbers from the broker, for environments whose items have numbers (`Environment.item_at`).

The broker gives each number to one process and remembers what happened to it. A number is finished when all its groups
are acknowledged; until then, a process that takes over gets it again. Groups are submitted under keys made of their
item's number, so an item that is rolled out again adds none that the broker has already.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from atropos_api.wire.groups import Group
from atropos_api.wire.messages import ItemLease, ItemRequest, item_key
from environments.sdk.session.tokens_and_masks import NOT_TRAINED

ITEMS_A_CALL = 8
"""Numbers leased at a time: more would only be given back when the process is killed."""

Ask = Callable[[ItemRequest], Awaitable[ItemLease | None]]
"""A call of the broker; None if it has no route for items."""


class LeasedItem(NamedTuple):
    """An item's number, and the run in which it is leased: numbers start again in the next run."""

    run_id: str
    number: int


class GroupKey(NamedTuple):
    """The idempotency key of an item's group, and the item."""

    item: LeasedItem
    key: str


class ItemLeases:
    """The items that this process holds."""

    def __init__(self, ask: Ask, *, limit: int | None = None) -> None:
        """`limit` is the number of all items; None if the data is endless."""
        self.supported = True
        """False once the broker has turned out to have no route for items."""
        self._ask = ask
        self._limit = limit
        self._process = uuid.uuid4().hex
        self._call = 0
        self._run_id = ""
        self._ready: deque[LeasedItem] = deque()
        self._held: set[LeasedItem] = set()
        """Items that are neither finished nor dropped. The broker may lease one of them to this process a second time,
        if another process asked in between; it is then not begun again."""
        self._unacknowledged: dict[LeasedItem, int] = {}
        self._finished: list[LeasedItem] = []
        self._dropped: dict[str, list[LeasedItem]] = {}
        self._sequences = self._tokens = 0
        self._unanswered: ItemRequest | None = None
        """The last call, if a stop has ended the wait for its answer."""

    async def take(self) -> LeasedItem | None:
        """Return the next item, or None if there is none now or the broker does not lease any."""
        if not self._ready:
            await self._report(count=ITEMS_A_CALL)
        return self._ready.popleft() if self._ready else None

    def forget_unbegun(self, run_id: str | None) -> None:
        """Forget leased items of other runs if no rollout of them has begun: those runs need them no longer."""
        unbegun = [item for item in self._ready if item.run_id != run_id]
        self._held.difference_update(unbegun)
        self._ready = deque(item for item in self._ready if item.run_id == run_id)

    def keys(self, item: LeasedItem, groups: int) -> list[GroupKey]:
        """Return a key for each of an item's groups, which are about to be submitted."""
        self._unacknowledged[item] = groups
        return [GroupKey(item, item_key(item.run_id, item.number, index)) for index in range(groups)]

    def acknowledge(self, item: LeasedItem) -> None:
        """Note that one group of the item is at the broker, or refused by it for good."""
        self._unacknowledged[item] -= 1
        if not self._unacknowledged[item]:
            del self._unacknowledged[item]
            self._held.remove(item)
            self._finished.append(item)

    def drop(self, item: LeasedItem, reason: str) -> None:
        """Note that the item has no group that could be submitted."""
        self._held.remove(item)
        self._dropped.setdefault(reason, []).append(item)

    def count_sampled(self, group: Group) -> None:
        """Count the rollouts of a scored group, whether it is submitted or dropped."""
        self._sequences += len(group.masks)
        self._tokens += sum(len(mask) - mask.count(NOT_TRAINED) for mask in group.masks)

    async def close(self) -> None:
        """Report what happened to the items since the last call that was answered."""
        while self.supported and (self._finished or self._dropped or _tells_of_items(self._unanswered)):
            await self._report(count=0)

    async def _report(self, count: int) -> None:
        """Report what happened to items and lease `count` others.

        A call that was broken off without an answer is made again in its place: the broker may have had it, and answers
        its number only with what it answered then.
        """
        request = self._unanswered = self._unanswered or self._request(count)
        lease = await self._ask(request)
        self._unanswered = None
        if lease is None:
            self.supported = False
            return
        self._call += 1
        if lease.run_id is not None:
            self._run_id = lease.run_id
        fresh = [
            item for item in (LeasedItem(self._run_id, number) for number in lease.items) if item not in self._held
        ]
        self._held.update(fresh)
        self._ready.extend(fresh)

    def _request(self, count: int) -> ItemRequest:
        """Return the next call; what it reports is not reported by the one after it."""
        request = ItemRequest(
            process=self._process,
            call=self._call + 1,
            finished=self._numbers(self._finished),
            dropped={reason: self._numbers(items) for reason, items in self._dropped.items()},
            count=count,
            limit=self._limit,
            sampled_sequences=self._sequences,
            sampled_tokens=self._tokens,
        )
        self._finished, self._dropped, self._sequences, self._tokens = [], {}, 0, 0
        return request

    def _numbers(self, items: Sequence[LeasedItem]) -> list[int]:
        """Return the numbers of this run's items; the broker needs no report about those of an earlier run."""
        return [item.number for item in items if item.run_id == self._run_id]


def _tells_of_items(request: ItemRequest | None) -> bool:
    return request is not None and bool(request.finished or request.dropped)
