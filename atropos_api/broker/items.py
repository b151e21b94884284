"""Leases of an environment's items, so that each item of a data set is used exactly once, whichever process is killed.

An item is a number, counted from 0 in each run; the environment knows what it stands for. A number is leased to one
process and comes back when that is followed by another process of the same environment. The groups of an item are
submitted under keys made of its number, so that an item which is used again, because its process was killed between
its submission and its report, adds nothing to the batch that it is in.
"""

from __future__ import annotations

import logging
from itertools import chain

import msgspec

from atropos_api.broker.state import State
from atropos_api.errors import ItemCallIsOver
from atropos_api.store.base import EnvironmentRow, ItemsRow
from atropos_api.wire.messages import ItemLease, ItemRequest

logger = logging.getLogger(__name__)


class Items:
    """The items of all environments; each change is in the ledger before its answer is sent."""

    def __init__(self, state: State) -> None:
        self._state = state

    def lease(self, row: EnvironmentRow, request: ItemRequest) -> ItemLease:
        """Record what happened to items and lease others: those that an ended process left first, then new ones."""
        run = self._state.runs.open
        run_id = run.run_id if run is not None else row.items.run_id if row.items is not None else None
        if run_id is None:
            return ItemLease(run_id=None, items=[])
        items = self._items_of(row, run_id, request.process)
        if request.call == items.call:
            return ItemLease(run_id=run_id, items=list(items.answer))
        if request.call < items.call:
            raise ItemCallIsOver(
                f"call {request.call} is over, the last one was {items.call}; count calls up, and repeat only the last",
                last_call=items.call,
            )
        # When the run has ended, what happened to its items is still recorded, but no others are leased.
        changed = _lease(_settle(items, request), request, count=request.count if run is not None else 0)
        self._state.environments.keep_items(row, changed)
        return ItemLease(run_id=run_id, items=list(changed.answer))

    def _items_of(self, row: EnvironmentRow, run_id: str, process: str) -> ItemsRow:
        """Return the environment's items in this run, with all leases ended that another process held, or this one
        before another run came in between.
        """
        items = row.items_in(run_id)
        if items is None:
            return ItemsRow(run_id=run_id, process=process)
        if items is row.items and items.process == process:
            return items
        if items.leased:
            logger.info("%s: %d items that were not finished are leased again", row.display_name, len(items.leased))
        returned = tuple(sorted({*items.returned, *items.leased}))
        return msgspec.structs.replace(items, process=process, call=0, answer=(), leased=(), returned=returned)


def _settle(items: ItemsRow, request: ItemRequest) -> ItemsRow:
    """Return the items without the leases of those that are finished or dropped, and with these counted.

    A number that is not leased to the process is ignored: it was counted before, or belongs to another process now.
    """
    leased = set(items.leased)
    finished = leased.intersection(request.finished)
    dropped = {reason: (leased - finished).intersection(numbers) for reason, numbers in request.dropped.items()}
    done = finished.union(chain.from_iterable(dropped.values()))
    counts = {reason: items.dropped.get(reason, 0) + len(numbers) for reason, numbers in dropped.items() if numbers}
    return msgspec.structs.replace(
        items,
        leased=tuple(number for number in items.leased if number not in done),
        finished=items.finished + len(finished),
        dropped={**items.dropped, **counts},
        sampled_sequences=items.sampled_sequences + request.sampled_sequences,
        sampled_tokens=items.sampled_tokens + request.sampled_tokens,
    )


def _lease(items: ItemsRow, request: ItemRequest, *, count: int) -> ItemsRow:
    """Return the items with `count` more leases, or as many as there are, which are the call's answer."""
    again = items.returned[:count]
    fresh = count - len(again)
    if request.limit is not None:
        fresh = max(0, min(fresh, request.limit - items.next_item))
    answer = (*again, *range(items.next_item, items.next_item + fresh))
    return msgspec.structs.replace(
        items,
        call=request.call,
        answer=answer,
        next_item=items.next_item + fresh,
        leased=(*items.leased, *answer),
        returned=items.returned[len(again) :],
    )
