"""Waiting on behalf of a caller: no longer than it asked for, than it stays connected, than the broker runs."""

from __future__ import annotations

import asyncio
import math
import time

from fastapi import Request

from atropos_api.http.connections import GuardedProtocol
from atropos_api.http.delivery import TRANSPORT_KEY
from atropos_api.http.services import Bell, services_of


class Wait:
    """One caller's patience, spent over as many waits as its question takes."""

    def __init__(self, request: Request, seconds: float) -> None:
        self._services = services_of(request)
        self._transport = request.scope.get(TRANSPORT_KEY)
        self._deadline = time.monotonic() + seconds

    async def on(self, bell: Bell, *, at_most: float = math.inf) -> bool:
        """Wait for the bell; False if there is nothing left to wait for."""
        remaining = self._deadline - time.monotonic()
        if remaining <= 0 or self._services.stopping or self._has_left():
            return False
        await bell.wait(min(remaining, at_most), gone=self._gone())
        return True

    def _has_left(self) -> bool:
        return self._transport is not None and self._transport.is_closing()

    def _gone(self) -> asyncio.Future[None] | None:
        protocol = self._transport.get_protocol() if self._transport is not None else None
        return protocol.gone if isinstance(protocol, GuardedProtocol) else None
