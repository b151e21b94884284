"""What happened lately, numbered, for whoever watches; a ring, so that a watcher that fell behind can catch up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec


class Event(msgspec.Struct, kw_only=True):
    id: int
    type: str
    time: float
    data: dict[str, Any]


class EventLog:
    """The last `capacity` events. Ids rise across restarts, for they start at the clock's milliseconds."""

    def __init__(self, clock: Callable[[], float], capacity: int = 2000) -> None:
        self._clock = clock
        self._events: deque[Event] = deque(maxlen=capacity)
        self.last_id = int(clock() * 1000)
        self.on_event: list[Callable[[], None]] = []

    def add(self, kind: str, **data: Any) -> None:
        self.last_id += 1
        self._events.append(Event(id=self.last_id, type=kind, time=self._clock(), data=data))
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
