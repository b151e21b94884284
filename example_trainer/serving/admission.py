"""The admission gate, which every request for tokens passes: it is open, closed for a moment, or refuses.

While it is closed, new requests wait, so that a publish finds only those already running. The gate counts the requests
inside; "drained" means that there are none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from example_trainer.serving.problems import Problem


class AdmissionGate:
    """Counts the requests inside and holds back new ones. All calls come from one event loop."""

    def __init__(self) -> None:
        self.inside = 0
        self._closed = False
        self._refusal: Problem | None = None
        self._changed = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._request_seconds = 0.0
        self._counted_at = time.monotonic()

    async def enter(self, permit: Callable[[], None] = lambda: None) -> None:
        """Admit a request, waiting while the gate is closed; raise the refusal if there is one. Pair with `leave`.

        `permit` raises the refusal of this request, and is asked again after each wait.
        """
        self.check()
        permit()
        while self._closed:
            await self._changed.wait()
            self.check()
            permit()
        self.request_seconds()
        self.inside += 1
        self._empty.clear()

    @property
    def refuses(self) -> bool:
        """True if new requests are refused, not only made to wait."""
        return self._refusal is not None

    def check(self) -> None:
        """Raise the refusal, if there is one. A gate that is closed for a moment refuses no request."""
        if self._refusal is not None:
            # An exception keeps the frames of all who have raised it: one that was raised to each held the prompts of
            # all requests refused so far, which are many while clients ask again until the first publish.
            raise replace(self._refusal)

    def leave(self) -> None:
        self.request_seconds()
        self.inside -= 1
        if self.inside == 0:
            self._empty.set()

    def open(self) -> None:
        self._set(closed=False, refusal=None)

    def close(self) -> None:
        self._set(closed=True, refusal=None)

    def refuse(self, refusal: Problem) -> None:
        self._set(closed=True, refusal=refusal)

    def request_seconds(self) -> float:
        """Return the time that requests have been inside since the start, all of them added up."""
        now = time.monotonic()
        self._request_seconds += self.inside * (now - self._counted_at)
        self._counted_at = now
        return self._request_seconds

    async def wait_until_empty(self, limit_seconds: float | None) -> bool:
        """Return True if all requests had ended within the limit (None: wait as long as it takes)."""
        try:
            await asyncio.wait_for(self._empty.wait(), limit_seconds)
        except TimeoutError:
            return False
        return True

    def _set(self, *, closed: bool, refusal: Problem | None) -> None:
        self._closed, self._refusal = closed, refusal
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
