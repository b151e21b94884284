"""The state that the handlers of one app share: `create_app` builds it once."""

from __future__ import annotations

import asyncio
import math
import time
import zlib
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec
from fastapi import Request
from isal import igzip

from atropos_api.broker import Broker
from atropos_api.broker.status import Status, describe_status
from atropos_api.broker.v0 import AtroposContract
from atropos_api.common.concurrency import FairLock, Notifier
from atropos_api.common.identity import package_version
from atropos_api.config import BrokerConfig
from atropos_api.errors import StoreUnavailable

SHARED_STATUS_SECONDS: Final = 1.0
GATHER_SECONDS: Final = 0.05
GATHER_SECONDS_A_FOLLOWER: Final = 0.0005
MOST_GATHER_SECONDS: Final = 1.0
"""Limits of the time for which changes of the set of servers are gathered before its followers are notified. It grows
with their number, so that notifying them takes a part of a core only, however fast servers come and go.
"""

LATE_SECONDS: Final = 0.01
"""Time by which the end of a lease may be noticed late: a timer is not set again for less."""

MOST_SHARED_SETS: Final = 64
"""Sets of servers whose encoding is kept, by policy; callers may ask for any number of policies."""


@dataclass(frozen=True, slots=True)
class SharedSet:
    """A set of servers, encoded and compressed once for all who follow it."""

    epoch: int
    described_at: float
    text: bytes
    gzip: bytes


AT_ONCE_SECONDS: Final = 0.05
"""Watchers that wake together share one status, although something more may have happened meanwhile."""


class StatusText(NamedTuple):
    """The status, encoded once for all watchers."""

    text: bytes
    notifications: int
    """The count of notifications that it covers."""
    described_at: float
    diagnosis: str
    """The names of the rules that hold: this changes with the diagnosis, but not with the seconds in its text."""
    etag: str
    """Changes with every notification and with the diagnosis."""


NO_STATUS: Final = StatusText(b"", -1, float("-inf"), "", "")


@dataclass(slots=True)
class AppContext:
    """The shared state of one app: the broker and what its handlers need. `stopping` ends every wait at once."""

    broker: Broker
    config: BrokerConfig
    legacy: AtroposContract
    groups_notifier: Notifier = field(default_factory=Notifier)
    pacing_notifier: Notifier = field(default_factory=Notifier)
    events_notifier: Notifier = field(default_factory=Notifier)
    servers_notifier: Notifier = field(default_factory=Notifier)
    """Notifies servers that wait for a change of their own state."""
    followers_notifier: Notifier = field(default_factory=Notifier)
    """Notifies those who follow the set of servers, a moment after it changed."""
    fleets_notifier: Notifier = field(default_factory=Notifier)
    """Notifies those who wait until a launcher follows their request."""
    stop_notifier: Notifier = field(default_factory=Notifier)
    legacy_batch_lock: FairLock = field(default_factory=FairLock)
    version: str = field(default_factory=package_version)
    stopping: bool = False
    store_failure: str | None = None
    """The reason why the store refused the last write; None once it has taken one of that size."""
    store_failure_bytes: int = 0

    _servers: dict[tuple[str | None, bool], SharedSet] = field(default_factory=dict)
    _lease_timer: asyncio.TimerHandle | None = None
    _lease_timer_at: float = 0.0
    _gather_timer: asyncio.TimerHandle | None = None
    _status: StatusText = NO_STATUS

    def shared_status(self, *, newest: bool = False) -> StatusText:
        """Return the status, encoded once for all watchers while nothing changes, or for those that ask together.

        With `newest` it covers everything that has happened.
        """
        age = time.monotonic() - self._status.described_at
        same = self._status.notifications == self.events_notifier.notifications
        if age > (SHARED_STATUS_SECONDS if same else AT_ONCE_SECONDS) or (newest and not same):
            self._status = self.fresh_status()
        return self._status

    def fresh_status(self) -> StatusText:
        status = describe_status(self.broker, store_failure=self.store_failure)
        notifications, last_id = self.events_notifier.notifications, self.broker.state.events.last_id
        diagnosis = _name_rules(status)
        etag = f'"{last_id}-{notifications}-{zlib.crc32(diagnosis.encode()):x}"'
        return StatusText(msgspec.json.encode(status), notifications, time.monotonic(), diagnosis, etag)

    def servers_set(self, policy: str | None, *, answering: bool) -> SharedSet:
        """Return a set of servers as all its followers get it; the servers' loads in it may be a second old."""
        servers = self.broker.state.servers
        servers.expire()
        shared, now = self._servers.get((policy, answering)), time.monotonic()
        is_new = shared is not None and shared.epoch == servers.epoch(policy, answering=answering)
        if shared is None or not is_new or now - shared.described_at > SHARED_STATUS_SECONDS:
            found = servers.select(policy, answering=answering)
            text = msgspec.json.encode(found)
            shared = SharedSet(found.epoch, now, text, igzip.compress(text, 1))
            if len(self._servers) >= MOST_SHARED_SETS:
                self._servers.clear()
            self._servers[policy, answering] = shared
        return shared

    @property
    def gathers_changes(self) -> bool:
        """True from a change of the set of servers until its followers are notified."""
        return self._gather_timer is not None

    def note_server_change(self) -> None:
        """Notify the servers at once, and their followers after a moment in which further changes are gathered."""
        self.servers_notifier.notify()
        if self._gather_timer is None:
            seconds = GATHER_SECONDS + GATHER_SECONDS_A_FOLLOWER * self.followers_notifier.waiting
            self._gather_timer = asyncio.get_running_loop().call_later(
                min(seconds, MOST_GATHER_SECONDS), self._tell_followers
            )

    def _tell_followers(self) -> None:
        self._gather_timer = None
        self.followers_notifier.notify()

    def watch_leases(self) -> None:
        """Make sure that leases end in time even without a request, and that waiters for a change are notified."""
        seconds = self.broker.state.servers.seconds_to_expiry()
        if math.isinf(seconds):
            return
        loop = asyncio.get_running_loop()
        if self._lease_timer is not None:
            if self._lease_timer_at <= loop.time() + seconds + LATE_SECONDS:
                return
            self._lease_timer.cancel()  # it was for a longer lease, such as that of a server which loads its model
        # It is stored here because for a time under a millisecond uvloop returns a handle that does not know it.
        self._lease_timer_at = loop.time() + seconds
        self._lease_timer = loop.call_later(seconds, self._end_leases)

    def _end_leases(self) -> None:
        self._lease_timer = None
        before = self.broker.state.servers.epoch()
        self.broker.state.servers.expire()
        if self.broker.state.servers.epoch() != before:
            self.note_server_change()
        if not self.stopping:
            self.watch_leases()

    def why_not_ready(self) -> str | None:
        """Return the reason why submissions would not be kept now, or None. A store that failed is tried again."""
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
        for timer in (self._lease_timer, self._gather_timer):
            if timer is not None:
                timer.cancel()
        for notifier in (
            self.groups_notifier,
            self.pacing_notifier,
            self.events_notifier,
            self.servers_notifier,
            self.followers_notifier,
            self.fleets_notifier,
            self.stop_notifier,
        ):
            notifier.notify()


def _name_rules(status: Status) -> str:
    diagnosis = status.flow.diagnosis
    return " ".join(f"{one.rule}:{one.severity}" for one in (diagnosis.finding, *diagnosis.notes))


def context_of(request: Request) -> AppContext:
    context: AppContext = request.app.context
    # Memory could not be read again after the store failed, so each request tries until it can.
    if context.broker.state.store_inconsistent:
        context.broker.rebuild()
    return context
