"""The door that every request for tokens passes: it can be open, closed for a moment, or refuse.

While it is closed requests wait outside, so that a publish finds only those already running. The door counts who is
inside; "drained" means that nobody is.
"""

from __future__ import annotations

import asyncio

from example_trainer.serving.problems import Problem


class Door:
    """Counts the requests inside and holds back those outside. All calls come from one event loop."""

    def __init__(self) -> None:
        self.inside = 0
        self._closed = False
        self._refusal: Problem | None = None
        self._changed = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    async def enter(self) -> None:
        """Go in, after waiting for a closed door; raises the refusal if there is one. Pair with `leave`."""
        self.check()
        while self._closed:
            await self._changed.wait()
            self.check()
        self.inside += 1
        self._empty.clear()

    def check(self) -> None:
        """Raise the refusal, if there is one. A door that is closed for a moment refuses nobody."""
        if self._refusal is not None:
            raise self._refusal

    def leave(self) -> None:
        self.inside -= 1
        if self.inside == 0:
            self._empty.set()

    def open(self) -> None:
        self._set(closed=False, refusal=None)

    def close(self) -> None:
        self._set(closed=True, refusal=None)

    def refuse(self, refusal: Problem) -> None:
        self._set(closed=True, refusal=refusal)

    async def wait_until_empty(self, limit_seconds: float | None) -> bool:
        """Whether everybody had left within the limit (None: wait as long as it takes)."""
        try:
            await asyncio.wait_for(self._empty.wait(), limit_seconds)
        except TimeoutError:
            return False
        return True

    def _set(self, *, closed: bool, refusal: Problem | None) -> None:
        self._closed, self._refusal = closed, refusal
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
