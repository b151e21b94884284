"""Sessions that are reached over HTTP: their ids and keys, the rollouts that they belong to, and when they end."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException

from environments.sdk.errors import InferenceUnavailable
from environments.sdk.session.access import new_secret
from environments.sdk.session.session import ManagedSession

IDLE_SECONDS = 1800.0
"""How long a session that was opened from outside may be left alone before it ends."""
MOST_OPENED_OUTSIDE = 1024


@dataclass(slots=True)
class Served:
    """A session and the context of the rollout that it belongs to."""

    session: ManagedSession
    key: str
    opened_outside: bool
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    created_at: float = field(default_factory=time.time)
    used_at: float = field(default_factory=time.monotonic)
    requests: set[asyncio.Task[Any]] = field(default_factory=set)

    def start(self, call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a call as if the rollout had made it."""
        task = asyncio.get_running_loop().create_task(call, context=self.context)
        self.requests.add(task)
        task.add_done_callback(self._ended)
        return task

    def idle_seconds(self) -> float:
        return 0.0 if self.requests else time.monotonic() - self.used_at

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.requests.discard(task)
        self.used_at = time.monotonic()


class ServedSessions:
    """The sessions of one proxy, by id. Those that were opened from outside end when nobody uses them."""

    def __init__(self, *, idle_seconds: float = IDLE_SECONDS, most_opened_outside: int = MOST_OPENED_OUTSIDE) -> None:
        self._idle_seconds = idle_seconds
        self._most_opened_outside = most_opened_outside
        self._served: dict[str, Served] = {}

    def __len__(self) -> int:
        self._end_idle()
        return len(self._served)

    def items(self) -> list[tuple[str, Served]]:
        self._end_idle()
        return list(self._served.items())

    def add(self, session: ManagedSession, *, opened_outside: bool = False) -> str:
        """Serve a session from now on; its id."""
        outside = sum(served.opened_outside for _, served in self.items())
        if opened_outside and outside >= self._most_opened_outside:
            raise HTTPException(429, f"{outside} sessions are open; DELETE those that have ended")
        name = new_secret()
        self._served[name] = Served(session, new_secret(), opened_outside)
        return name

    def find(self, name: str) -> Served:
        self._end_idle()
        served = self._served.get(name)
        if served is None:
            raise HTTPException(404, "there is no such session, or it has ended")
        served.used_at = time.monotonic()
        return served

    def remove(self, name: str) -> None:
        """End the serving of a session; its requests under way are given up."""
        served = self._served.pop(name, None)
        if served is not None:
            served.session.address = None
            for request in list(served.requests):
                request.cancel()

    def _end_idle(self) -> None:
        for name, served in list(self._served.items()):
            if served.opened_outside and served.idle_seconds() > self._idle_seconds:
                self.remove(name)


def result_of(task: asyncio.Task[Any]) -> Any:
    """What a task has come to; one that was cancelled had its session closed meanwhile."""
    if task.cancelled():
        raise InferenceUnavailable("the session was closed meanwhile")
    return task.result()
