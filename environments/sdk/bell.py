"""A condition without a lock, for one event loop: waiters wake at the next ring and look again."""

from __future__ import annotations

import anyio


class Bell:
    """Whoever changes something others may wait for rings; whoever waits checks its condition after each ring."""

    def __init__(self) -> None:
        self._next: anyio.Event | None = None

    def ring(self) -> None:
        if self._next is not None:
            self._next.set()
            self._next = None

    async def wait(self) -> None:
        """Return at the next ring. Nothing may be awaited between checking the condition and this call."""
        if self._next is None:
            self._next = anyio.Event()
        await self._next.wait()
