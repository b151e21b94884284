"""How many requests of one kind may be in flight on a server; the number can change while requests wait."""

from __future__ import annotations

from collections import deque

import anyio


class Limit:
    """A first-come limit. Taking a free place costs no switch between tasks."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._allowed = most
        self.used = 0
        self._waiting: deque[anyio.Event] = deque()

    @property
    def free(self) -> int:
        return max(0, self._allowed - self.used)

    def weigh(self, share: float) -> None:
        """Allow this share of the places, one at the least."""
        self._allowed = max(1, round(self._most * share))
        self._admit()

    async def __aenter__(self) -> None:
        if self.used < self._allowed and not self._waiting:
            self.used += 1
            return
        turn = anyio.Event()
        self._waiting.append(turn)
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():
                self._release()
            else:
                self._waiting.remove(turn)
            raise

    async def __aexit__(self, *_: object) -> None:
        self._release()

    def _release(self) -> None:
        self.used -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.used < self._allowed:
            self.used += 1
            self._waiting.popleft().set()
