"""What the handlers need, built once by `create_app`."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from fastapi import Request

from atropos_api.broker import Broker
from atropos_api.broker.legacy import LegacyContract
from atropos_api.common.version import package_version
from atropos_api.config import BrokerConfig
from atropos_api.errors import StoreUnavailable

SHARED_STATUS_SECONDS: Final = 1.0


class Bell:
    """Wakes everyone who waits, and costs nothing while nobody does."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()
        self.rings = 0

    def ring(self) -> None:
        self.rings += 1
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, timeout_seconds: float, *, gone: asyncio.Future[None] | None = None) -> bool:
        """Return at the next ring (True), or after the timeout, or once `gone` is done."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        ends = (waiter,) if gone is None else (waiter, gone)
        try:
            done, _ = await asyncio.wait(ends, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
            return waiter in done
        finally:
            self._waiters.discard(waiter)
            waiter.cancel()


class Turn:
    """One at a time, in the order of asking; while nobody has it, it is had without waiting."""

    def __init__(self) -> None:
        self._taken = False
        self._waiters: deque[asyncio.Future[None]] = deque()

    def take_now(self) -> bool:
        """Take it if nobody has it."""
        had, self._taken = self._taken, True
        return not had

    async def take(self) -> None:
        if self.take_now():
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                # It was given just before its taker left.
                self.give_back()
            raise

    def give_back(self) -> None:
        """The next who waits has it from here on."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._taken = False


@dataclass(slots=True)
class Services:
    """The broker and what surrounds it for one app. `stopping` ends every wait, so that shutting down is quick."""

    broker: Broker
    config: BrokerConfig
    legacy: LegacyContract
    groups_bell: Bell = field(default_factory=Bell)
    pacing_bell: Bell = field(default_factory=Bell)
    events_bell: Bell = field(default_factory=Bell)
    stop_bell: Bell = field(default_factory=Bell)
    legacy_turn: Turn = field(default_factory=Turn)
    version: str = field(default_factory=package_version)
    stopping: bool = False
    store_failure: str | None = None
    """Why the store refused the last write; None once it took another as large."""
    store_failure_bytes: int = 0

    _status: tuple[int, float, bytes] = (-1, 0.0, b"")

    def status_text(self, describe: Callable[[Services], bytes]) -> bytes:
        """The status, described once for all who watch while nothing happens."""
        rings, described_at, text = self._status
        now = time.monotonic()
        if rings != self.events_bell.rings or now - described_at > SHARED_STATUS_SECONDS:
            text = describe(self)
            self._status = (self.events_bell.rings, now, text)
        return text

    def why_not_ready(self) -> str | None:
        """The reason why submissions would not be kept now, or None. A store that refused a write is tried again."""
        if self.stopping:
            return "stopping"
        if self.store_failure is not None:
            try:
                self.broker.probe_store(self.store_failure_bytes)
            except StoreUnavailable:
                return self.store_failure
            self.store_failure, self.store_failure_bytes = None, 0
        return None

    def stop(self) -> None:
        self.stopping = True
        for bell in (self.groups_bell, self.pacing_bell, self.events_bell, self.stop_bell):
            bell.ring()


def services_of(request: Request) -> Services:
    services: Services = request.app.state.services
    # Memory that could not be read again when the store failed; that is tried until it can.
    if services.broker.state.torn:
        services.broker.rebuild()
    return services
