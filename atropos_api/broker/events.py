"""What happened lately, numbered, for whoever watches; a ring, so that a watcher that fell behind can catch up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final

from atropos_api.errors import StoreUnavailable
from atropos_api.store.base import KEPT_EVENTS, Event, Ledger

GAP: Final = 1000
"""Ids left out at each start: a watcher may have seen some that the store had not been given yet."""


class EventLog:
    """The last `capacity` events; the ledger keeps them too, so that ids and watchers go on over a restart.

    Where it keeps none, ids begin at the clock's milliseconds, above those of any process before.
    """

    def __init__(
        self, ledger: Ledger, clock: Callable[[], float], found: Iterable[Event] = (), capacity: int = KEPT_EVENTS
    ) -> None:
        self._ledger = ledger
        self._clock = clock
        self._events: deque[Event] = deque(found, maxlen=capacity)
        self.last_id = self._events[-1].id + GAP if self._events else int(clock() * 1000)
        self.on_event: list[Callable[[], None]] = []

    def add(self, kind: str, **data: Any) -> None:
        self.last_id += 1
        event = Event(id=self.last_id, type=kind, time=self._clock(), data=data)
        self._events.append(event)
        # What happened has happened, whether or not the disk has room to say so.
        with suppress(StoreUnavailable):
            self._ledger.add_event(event)
        for listener in self.on_event:
            listener()

    def after(self, event_id: int) -> list[Event]:
        """Events later than `event_id`, oldest first."""
        if event_id > self.last_id:
            return list(self._events)
        missed = []
        for event in reversed(self._events):
            if event.id <= event_id:
                break
            missed.append(event)
        return missed[::-1]

    def has_forgotten(self, event_id: int) -> bool:
        """Whether events after `event_id` are no longer here, or it is none of this log's."""
        first = self._events[0].id if self._events else self.last_id + 1
        return not first - 1 <= event_id <= self.last_id
