"""Standby on Redis: a process serves while it holds the lease, and otherwise answers 503 naming the holder.

A thread acquires and renews the lease. Whenever it acquires it, the broker is rebuilt from what Redis holds, while
another thread renews. The broker is dropped when the lease is lost, or when an answer of Redis was lost and so what
Redis holds is uncertain.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, Protocol

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from atropos_api.broker import Broker
from atropos_api.common.errors import AtroposError
from atropos_api.errors import StoreUnavailable
from atropos_api.http.problems import problem_response
from atropos_api.server.app import BrokerApp
from atropos_api.server.fast_path import DirectCalls
from atropos_api.store.redis_session import RedisSession

logger = logging.getLogger(__name__)

WATCH_SECONDS: Final = 0.25
"""Interval at which the thread checks if the lease is still held."""

ALIVE_PATHS: Final = frozenset({"/livez", "/health"})


class Activate(Protocol):
    def __call__(self, *, fresh: bool) -> tuple[BrokerApp, Broker]:
        """Build the broker from what the store holds; with `fresh`, delete that first."""


class Standby:
    """An ASGI application: the broker's while this process is active; 503 while another is, or Redis is unreachable."""

    def __init__(self, session: RedisSession, activate: Activate) -> None:
        self._session = session
        self._activate = activate
        self._app: BrokerApp | None = None
        self._broker: Broker | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._holder: dict[str, Any] | None = None
        self._failure: str | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep_lease, name="redis-lease", daemon=True)

    def start(self, *, fresh: bool) -> None:
        """Try once to become active, so that the first broker is active when its port answers; go on in a thread.

        `fresh` applies only to what is found now: a standby never deletes what another broker took in the meantime.
        """
        self._try_to_lead(fresh=fresh)
        if fresh and self._app is None:
            logger.warning("nothing was deleted: another broker is active on %s", self._session.place)
        self._thread.start()

    def stop(self) -> None:
        """End every wait; a signal handler calls this."""
        self._stopping.set()
        if self._app is not None:
            self._app.context.stop()

    def close(self) -> None:
        """Release the lease, so that a standby need not wait until it expires."""
        self._stopping.set()
        self._thread.join()
        if self._broker is not None:
            self._broker.close()
        self._session.close()

    @property
    def direct_calls(self) -> DirectCalls:
        """Return the application's calls while this process is active, else none."""
        return self._app.direct_calls if self._app is not None and self._session.held else {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._loop = asyncio.get_running_loop()
        app: ASGIApp | None = self._app if self._session.held else None
        await (app or self._refuse(scope))(scope, receive, send)

    def _refuse(self, scope: Scope) -> Response:
        if scope["path"] in ALIVE_PATHS:
            return JSONResponse({"status": "ok"})
        if self._failure is not None:
            return problem_response(503, "store-unavailable", self._failure)
        holder = self._holder
        who = f"pid {holder['pid']} on {holder['host']} is active" if holder else "the active broker is not known yet"
        detail = (
            f"this broker is the standby on {self._session.place}: {who}; it takes over at latest "
            f"{self._session.lease_seconds:g} s after the active one stops renewing its lease"
        )
        return problem_response(503, "standby", detail, active=holder)

    def _keep_lease(self) -> None:
        seconds = self._session.lease_seconds
        renew_at = time.monotonic() + seconds / 3
        while not self._stopping.wait(min(WATCH_SECONDS, seconds / 10)):
            if self._app is None:
                self._try_to_lead()
                renew_at = time.monotonic() + seconds / 3
            elif not self._session.held:
                self._retire()
            elif time.monotonic() >= renew_at:
                self._renew()
                renew_at = time.monotonic() + seconds / 3

    def _try_to_lead(self, *, fresh: bool = False) -> None:
        try:
            if not self._session.acquire():
                self._holder, self._failure = self._session.holder(), None
                return
            self._session.check_promises()
            with self._renewing():
                app, self._broker = self._activate(fresh=fresh)
        except AtroposError as error:
            if self._failure is None:
                logger.warning("not active: %s", error)
            self._failure = str(error)
            self._return_lease()
        except Exception:  # a standby must survive a failed takeover; it tries again
            logger.exception("this broker could not take over")
            self._failure = "this broker could not take over; its log has the cause"
            self._return_lease()
        else:
            self._failure = None
            self._app = app

    def _return_lease(self) -> None:
        """Leave the lease to a broker that can take over, as one of another release may be able to."""
        if self._session.held:  # else it is not known what Redis holds, or it does not answer
            with suppress(StoreUnavailable):
                self._session.release()
        self._session.step_down()

    @contextmanager
    def _renewing(self) -> Iterator[None]:
        """Renew the lease while the block runs: reading a long queue may take longer than the lease lasts."""
        ended = threading.Event()

        def renew() -> None:
            while not ended.wait(self._session.lease_seconds / 3):
                self._renew()

        thread = threading.Thread(target=renew, name="redis-renewal", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _renew(self) -> None:
        try:
            self._session.renew()
        except StoreUnavailable as error:
            self._failure = str(error)

    def _retire(self) -> None:
        app, self._app, self._broker = self._app, None, None
        logger.warning("this broker is not active any more: %s", self._failure or "it lost its lease on Redis")
        if app is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(app.context.stop)
