"""An event loop whose time is simulated. It stands alone because two simulations run real asynchronous code in it."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any

from .oracle import PromiseBroken


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop in which waiting takes no time."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(_Waiting(self))

    def time(self) -> float:
        return self.now


class _Waiting(selectors.SelectSelector):
    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise PromiseBroken("all wait for something that nothing will bring about")
        self._loop.now += max(0.0, timeout)
        return super().select(0)
