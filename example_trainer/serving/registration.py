"""The registration of this server at a broker: it keeps a lease, and decides if requests for tokens may be answered.

The broker lists the server for environments and trainers. The server answers requests only while the broker says
`serving` and the lease has not ended; before that it answers only a trainer's, which carry the bridge token and prove
that it has the policy's weights. The lease is counted from before each renewal by a clock that goes on while the
process is stopped, so it ends here before it ends at the broker, and a server that was stopped notices before it
answers. A lease that has ended is given up for a new one, under which the server joins again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from atropos_api.client import BrokerClient, BrokerHostUnknown, BrokerRefused, BrokerUnreachable
from atropos_api.common.errors import AtroposError
from atropos_api.common.secrets import TokenSource
from atropos_api.wire import ServerLease, ServerReport
from example_trainer.errors import CannotServe
from example_trainer.serving import problems
from example_trainer.serving.config import RegistrationIdentity

logger = logging.getLogger(__name__)

RENEWED_SHARE = 0.4
"""The part of a lease after which it is renewed."""

LATE_SHARE = 0.1
"""The part of a lease by which an answer may be late before it counts as lost; as much is kept for one more renewal."""

ANSWER_SECONDS = 3.0
"""Time for an answer that need not wait for a change."""

RETRY_SECONDS = 0.5
LEAVE_SECONDS = 1.0
PATIENCE_SECONDS = 20.0
"""Time without an answer of the engine after which the lease is not renewed: no client could get tokens here."""

_REFUSED_FOR_GOOD = frozenset({401, 403, 404, 422})

Headers = Iterable[tuple[bytes, bytes]]


class Broker(Protocol):
    """The calls that the registration makes."""

    async def renew_server(
        self, server_id: str, report: ServerReport, *, state: str | None = None, wait_seconds: float = 0.0
    ) -> ServerLease: ...

    async def remove_server(self, server_id: str, *, lease_id: str | None = None) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The state of the server that it reports with each renewal, under the names of `ServerReport`."""

    version: int | None = None
    running: int = 0
    waiting: int = 0
    kv_free: float | None = None


def announce_start(broker_url: str, identity: RegistrationIdentity, token: TokenSource) -> None:
    """Register the server as one that loads its model; if the broker does not answer, it is registered
    once it has loaded.

    Raise `CannotServe` if the broker's host does not exist, or if the broker does not accept the token.
    """
    report = _report(identity, identity.first_lease_id, ready=False)
    with BrokerClient(broker_url, token=token, timeout_seconds=LEAVE_SECONDS, retry_seconds=0.0) as broker:
        try:
            broker.renew_server(identity.server_id, report)
        except BrokerHostUnknown as error:
            raise CannotServe(f"--broker-url {broker_url}: {error}") from error
        except BrokerUnreachable as error:
            logger.info("%s; the server registers once it has loaded", error)
        except BrokerRefused as error:
            if error.status in _REFUSED_FOR_GOOD:
                raise CannotServe(f"--broker-url {broker_url}: {error}") from error
            logger.warning("%s", error)


def withdraw(broker_url: str, identity: RegistrationIdentity, token: TokenSource) -> None:
    """End the first lease if it is still the present one, for a server that did not start; never raises."""
    client = BrokerClient(broker_url, token=token, timeout_seconds=LEAVE_SECONDS, retry_seconds=0.0)
    with client as broker, suppress(AtroposError):
        broker.remove_server(identity.server_id, lease_id=identity.first_lease_id)


class Registration:
    """One server's registration, as long as its process serves."""

    def __init__(
        self,
        broker: Broker,
        identity: RegistrationIdentity,
        look: Callable[[], Awaitable[Load]],
        *,
        is_trainer: Callable[[Headers], bool] = lambda _: False,
        on_drain: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep the arguments: `look` asks the engine, and `on_drain` is called once if the broker says to drain."""
        self.identity = identity
        self.state: str | None = None
        """The state in the broker's last answer; None before its first answer about the present lease."""
        self.lease_id = identity.first_lease_id
        self._broker = broker
        self._look = look
        self._is_trainer = is_trainer
        self._on_drain = on_drain
        self._clock = clock
        self._lease_ends = -math.inf
        self._lease_seconds = 0.0
        self._draining = False
        self._load = Load()
        self._looking: asyncio.Task[Load] | None = None
        self._engine_answered_at = clock()
        self._has_failed = False
        """True from a renewal that failed until one succeeds."""
        self._failure = ""
        """The failure that was logged last; it is not logged again before a renewal that waits has succeeded."""

    def check(self) -> None:
        """Raise the refusal of a request for tokens, if it may not be answered now."""
        if self._clock() >= self._lease_ends:
            raise problems.no_lease(self.identity.server_id)
        if self.state == "draining":
            raise problems.draining()
        if self.state != "serving":
            raise problems.joining(self.identity.policy)

    def check_unless_trainer(self, headers: Headers) -> None:
        """Do `check` for a request with these headers, unless a trainer sends it."""
        if not self._is_trainer(headers):
            self.check()

    def describe(self) -> dict[str, str | None]:
        return {"server_id": self.identity.server_id, "state": self.state, "lease_id": self.lease_id}

    async def run(self) -> None:
        """Renew the lease for ever."""
        while True:
            pause_seconds = await self.renew()
            await asyncio.sleep(pause_seconds)

    async def renew(self) -> float:
        """Make one renewal, which waits for a change of the server's state; return the pause before the next one."""
        if self.state is not None and self._clock() >= self._lease_ends:
            self._take_new_lease("no renewal reached the broker in time")
        if not await self._engine_answers():
            return self._note_failure(f"vLLM's engine has not answered for {PATIENCE_SECONDS:g} s")
        sent = self._clock()
        wait_seconds = self._wait_seconds(sent)
        late_seconds = LATE_SHARE * self._lease_seconds if wait_seconds else ANSWER_SECONDS
        try:
            async with asyncio.timeout(wait_seconds + late_seconds):
                lease = await self._broker.renew_server(
                    self.identity.server_id, self._report(), state=self.state, wait_seconds=wait_seconds
                )
        except TimeoutError:
            self._note_failure("the broker does not answer")
            return 0.0
        except (BrokerUnreachable, BrokerHostUnknown) as error:
            return self._note_failure(str(error))
        except BrokerRefused as error:
            if error.kind == "lease-ended":
                return self._take_new_lease(str(error))
            return self._note_failure(str(error))
        self._adopt(lease, sent)
        if wait_seconds:  # even a broker that is always late answers in time if it need not wait
            self._failure = ""
        return 0.0

    async def drain(self) -> None:
        """Tell the broker that the server ends, so that it gets no more requests; ignore an unreachable broker."""
        self._draining = True
        with suppress(TimeoutError, BrokerUnreachable, BrokerHostUnknown, BrokerRefused):
            async with asyncio.timeout(LEAVE_SECONDS):
                await self._broker.renew_server(self.identity.server_id, self._report())

    async def leave(self) -> None:
        """End the lease; an unreachable broker is ignored."""
        self._lease_ends = -math.inf
        with suppress(TimeoutError, BrokerUnreachable, BrokerHostUnknown, BrokerRefused):
            async with asyncio.timeout(LEAVE_SECONDS):
                await self._broker.remove_server(self.identity.server_id, lease_id=self.lease_id)

    def _wait_seconds(self, now: float) -> float:
        """Return how long a renewal may wait for a change, so that there is time for one more if its answer is lost.

        The lease is counted from before a renewal, so the time that the last one waited is already used. After a
        failure the next one must not wait.
        """
        if self.state is None or self._has_failed:
            return 0.0
        left = self._lease_ends - now - 2 * LATE_SHARE * self._lease_seconds
        return max(0.0, min(left, RENEWED_SHARE * self._lease_seconds))

    def _adopt(self, lease: ServerLease, sent: float) -> None:
        self._has_failed = False
        if lease.state == "gone":
            self._take_new_lease("the broker removed the server")
            return
        self._lease_seconds, self._lease_ends = lease.lease_seconds, sent + lease.lease_seconds
        if lease.state != self.state:
            logger.info(
                "server %s of the policy %s at the broker: %s",
                self.identity.server_id,
                self.identity.policy,
                lease.state,
            )
            self.state = lease.state
            if lease.state == "draining" and not self._draining:
                self._draining = True
                self._on_drain()

    def _take_new_lease(self, reason: str) -> float:
        logger.warning("the server has no lease any more (%s); it joins again", reason)
        self.lease_id = secrets.token_hex(8)
        self.state, self._lease_ends = None, -math.inf
        return 0.0

    def _note_failure(self, failure: str) -> float:
        self._has_failed = True
        kind = re.sub(r"\d+", "", failure)  # the seconds left in it change with each try
        if kind != self._failure:
            logger.warning("the lease is not renewed: %s", failure)
            self._failure = kind
        return RETRY_SECONDS

    async def _engine_answers(self) -> bool:
        """Ask the engine for its load; return False if it has not answered for long. A slow answer delays nothing."""
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._look())
        await asyncio.wait({self._looking}, timeout=RETRY_SECONDS)
        if self._looking.done():
            looking, self._looking = self._looking, None
            if looking.exception() is None:
                self._load = looking.result()
                self._engine_answered_at = self._clock()
        return self._clock() - self._engine_answered_at < PATIENCE_SECONDS

    def _report(self) -> ServerReport:
        return _report(self.identity, self.lease_id, draining=self._draining, **asdict(self._load))


def _report(identity: RegistrationIdentity, lease_id: str, **state: Any) -> ServerReport:
    """Return what a server reports about itself and its state."""
    return ServerReport(
        lease_id=lease_id,
        boot_id=identity.boot_id,
        mode=identity.mode,
        policy=identity.policy,
        url=identity.url,
        scheme=identity.scheme,
        port=identity.port,
        **state,
    )
