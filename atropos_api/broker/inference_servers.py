"""The registry of inference servers: leases, their states, and the sets that trainers and environments follow.

A server registers itself and renews its lease; its states are

    starting → joining → serving → draining → gone

`joining` becomes `serving` only when the trainer announces a policy with the server's lease id: it has proven then that
the server has the weights. A policy announced without it makes it join again. A server whose weights never change
serves from its registration, unless a run trains its policy, because that changes the weights. A lease that has ended,
by this clock or by the server's own, is never valid again: the server comes back under another lease id and joins.

Servers are kept in memory. After a restart of the broker they register again within a lease; the leases that were
proven are in the row of the run, so those servers go on serving. One monotonic clock counts all durations.
"""

from __future__ import annotations

import ipaddress
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import urlsplit

from atropos_api.common.identity import host_in_url, require_address
from atropos_api.errors import InvalidRequest, LeaseEnded, ServerIdInUse, UnknownServer
from atropos_api.wire.servers import InferenceServer, ServerLease, ServerReport, ServerSet, ServerState

STARTING_SECONDS: Final = 900.0
"""Lease of a server that loads its model: it cannot renew meanwhile, and a large model takes minutes."""

GONE_SECONDS: Final = 600.0
"""Time for which a server that is gone stays listed, with the reason."""

MOST_SERVERS: Final = 4096
MOST_ENDED: Final = 16_384
"""Ended leases that are remembered; a server's own clock ends a lease that was forgotten here."""

FIXED_REASON: Final = "a run trains this policy, and the server's weights stay as they are (--policy-version)"

ANSWERING: Final = frozenset({"serving", "draining"})
"""States in which a server computes requests: all, or only those that it took before it was told to drain."""

Listener = Callable[[InferenceServer], None]


@dataclass(slots=True)
class Entry:
    """One server: its last report, and the end of its lease on the registry's clock."""

    server_id: str
    report: ServerReport
    url: str
    renewed_at: float
    lease_ends: float
    state: ServerState
    told_to_drain: bool = False
    reason: str | None = None

    @property
    def is_gone(self) -> bool:
        return self.state == "gone"


class InferenceServers:
    """The registered inference servers. Not thread-safe, as the broker."""

    def __init__(self, clock: Callable[[], float], *, lease_seconds: float, first_epoch: int) -> None:
        self.lease_seconds = lease_seconds
        self.on_change: list[Listener] = []
        """Called with a server whose state has changed."""
        self._clock = clock
        self._complete_at = self._next_expiry = clock() + lease_seconds
        self._complete = False
        self._entries: dict[str, Entry] = {}
        self._proven: dict[str, frozenset[str]] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._epoch = self._base_epoch = first_epoch
        self._epochs: dict[str, int] = {}
        """The epoch of each policy's last change; for those without one it is the base epoch."""
        self._answering_epochs: dict[str, int] = {}
        """The same for changes of the servers that answer requests."""

    def renew(self, server_id: str, report: ServerReport, peer: str | None) -> ServerLease:
        """Register a server or renew its lease; `peer` is the address from which it calls."""
        self.expire()
        known = self._entries.get(server_id)
        self._check_lease(server_id, report, known)
        now = self._clock()
        is_same = known is not None and known.report.url == report.url is not None
        url = known.url if known is not None and is_same else _address(report, peer)
        seconds = self.lease_seconds if report.ready else STARTING_SECONDS
        entry = Entry(server_id, report, url, now, now + seconds, "starting")
        self._next_expiry = min(self._next_expiry, entry.lease_ends)
        if known is not None:
            entry.told_to_drain = known.told_to_drain and known.report.boot_id == report.boot_id
            if known.report.lease_id != report.lease_id:
                self._end_lease(known)
        entry.state = self._state_of(entry)
        self._entries[server_id] = entry
        if known is None or _shown(known) != _shown(entry):
            self._changed(entry, known)
        return ServerLease(state=entry.state, lease_seconds=seconds, epoch=self._epoch)

    def state_of(self, server_id: str, lease_id: str) -> ServerState:
        """Return the state of the server that holds this lease; `gone` if the lease has ended."""
        entry = self._entries.get(server_id)
        return "gone" if entry is None or entry.report.lease_id != lease_id else entry.state

    def drain(self, server_id: str) -> InferenceServer:
        """Tell a server to take no new request, to end those that run, and to leave. Repeating it is harmless."""
        self.expire()
        entry = self._find(server_id)
        if not entry.is_gone and not entry.told_to_drain:
            entry.told_to_drain = True
            self._move(entry, self._state_of(entry))
        return self._describe(entry)

    def remove(self, server_id: str, lease_id: str | None = None) -> None:
        """End a server's lease; with `lease_id`, only that one. Repeating it is harmless."""
        self.expire()
        entry = self._find(server_id)
        if lease_id is None or entry.report.lease_id == lease_id:
            self._end(entry, "it left")

    def prove(self, policy: str, lease_ids: Iterable[str]) -> None:
        """Make these servers of a policy serve it, and all others of that policy join again."""
        self._proven[policy] = frozenset(lease_ids)
        for entry in list(self._entries.values()):
            if entry.report.policy == policy and not entry.is_gone:
                self._move(entry, self._state_of(entry))

    def expire(self) -> None:
        """End the leases whose time is over, and forget servers that have been gone for long."""
        now = self._clock()
        if now < self._next_expiry:
            return
        if not self._complete and now >= self._complete_at:
            self._complete = True
            self._epoch += 1
            self._base_epoch = self._epoch
            self._epochs, self._answering_epochs = {}, {}
        for entry in list(self._entries.values()):
            if entry.is_gone:
                if now >= entry.lease_ends + GONE_SECONDS:
                    del self._entries[entry.server_id]
            elif now >= entry.lease_ends:
                self._end(entry, f"it did not renew its lease for {now - entry.renewed_at:.0f} s")
        self._next_expiry = self._find_next_expiry()

    def seconds_to_expiry(self) -> float:
        """Return the time after which `expire` may have something to do; infinite if it never will."""
        return max(0.0, self._next_expiry - self._clock())

    def epoch(self, policy: str | None = None, *, answering: bool = False) -> int:
        """Return the epoch of the set that `select` returns for the same arguments."""
        epochs = self._answering_epochs if answering else self._epochs
        if policy is None:
            return max(epochs.values(), default=self._base_epoch)
        return epochs.get(policy, self._base_epoch)

    def select(self, policy: str | None = None, *, answering: bool = False) -> ServerSet:
        """Return the servers of a policy (None: all), or only those that answer requests."""
        self.expire()
        chosen = [
            self._describe(entry)
            for entry in self._entries.values()
            if policy in (None, entry.report.policy) and (not answering or entry.state in ANSWERING)
        ]
        return ServerSet(
            epoch=self.epoch(policy, answering=answering),
            complete=self._complete,
            lease_seconds=self.lease_seconds,
            servers=chosen,
        )

    def counts(self) -> Iterator[tuple[str, ServerState, int]]:
        """Yield the number of servers by policy and state, those gone left out."""
        alive = (entry for entry in self._entries.values() if not entry.is_gone)
        found = Counter((entry.report.policy, entry.state) for entry in alive)
        yield from ((policy, state, count) for (policy, state), count in sorted(found.items()))

    def _check_lease(self, server_id: str, report: ServerReport, known: Entry | None) -> None:
        if report.lease_id in self._ended:
            raise LeaseEnded(
                f"lease {report.lease_id} of server {server_id} has ended; register again under another lease id",
                field="lease_id",
                value=report.lease_id,
            )
        if known is None or known.is_gone:
            if len(self._entries) >= MOST_SERVERS and known is None:
                raise InvalidRequest(f"{MOST_SERVERS} servers are registered, and no more are kept", field="server_id")
            return
        # One that starts may have crashed while it loaded, and its lease is long.
        if known.report.boot_id != report.boot_id and known.state != "starting":
            left = known.lease_ends - self._clock()
            raise ServerIdInUse(
                f"server id {server_id} belongs to the process at {known.url} for another {left:.0f} s; if that one "
                "runs, give this one an id of its own (--server-id)",
                field="server_id",
                value=server_id,
            )

    def _state_of(self, entry: Entry) -> ServerState:
        report = entry.report
        if not report.ready:
            return "starting"
        if report.draining or entry.told_to_drain:
            return "draining"
        proven = self._proven.get(report.policy)
        serves = report.mode == "fixed" if proven is None else report.lease_id in proven
        return "serving" if serves else "joining"

    def _find_next_expiry(self) -> float:
        ends = (entry.lease_ends + GONE_SECONDS * entry.is_gone for entry in self._entries.values())
        return min(min(ends, default=math.inf), math.inf if self._complete else self._complete_at)

    def _find(self, server_id: str) -> Entry:
        entry = self._entries.get(server_id)
        if entry is None:
            known = ", ".join(list(self._entries)[:10]) or "none"
            raise UnknownServer(
                f"no server has the id {server_id!r} (registered: {known})", field="server_id", value=server_id
            )
        return entry

    def _end(self, entry: Entry, reason: str) -> None:
        if entry.is_gone:
            return
        self._end_lease(entry)
        entry.reason, entry.lease_ends = reason, self._clock()
        self._next_expiry = min(self._next_expiry, entry.lease_ends + GONE_SECONDS)
        self._move(entry, "gone")

    def _end_lease(self, entry: Entry) -> None:
        self._ended[entry.report.lease_id] = None
        while len(self._ended) > MOST_ENDED:
            self._ended.popitem(last=False)

    def _move(self, entry: Entry, state: ServerState) -> None:
        if state != entry.state:
            before = replace(entry)
            entry.state = state
            self._changed(entry, before)

    def _changed(self, entry: Entry, before: Entry | None) -> None:
        """Give a new epoch to every set in which the change of this server is visible."""
        self._epoch += 1
        views = [entry] if before is None else [entry, before]
        for one in views:
            self._epochs[one.report.policy] = self._epoch
            if one.state in ANSWERING:
                self._answering_epochs[one.report.policy] = self._epoch
        for listener in self.on_change:
            listener(self._describe(entry))

    def _describe(self, entry: Entry) -> InferenceServer:
        report = entry.report
        return InferenceServer(
            server_id=entry.server_id,
            state=entry.state,
            policy=report.policy,
            url=entry.url,
            mode=report.mode,
            lease_id=report.lease_id,
            boot_id=report.boot_id,
            version=report.version,
            running=report.running,
            waiting=report.waiting,
            kv_free=report.kv_free,
            silent_seconds=self._clock() - entry.renewed_at,
            reason=FIXED_REASON if entry.state == "joining" and report.mode == "fixed" else entry.reason,
        )


def _shown(entry: Entry) -> tuple[object, ...]:
    """Return the part on which followers act: a change of the rest, such as its load, is not a change of the set."""
    report = entry.report
    return entry.state, entry.url, report.policy, report.mode, report.lease_id


def _address(report: ServerReport, peer: str | None) -> str:
    """Return the address for clients: the one that the server names, or the host from which it calls."""
    if report.url is not None:
        try:
            url = require_address(report.url).rstrip("/")
        except ValueError as error:
            raise InvalidRequest(f"url: {error}", field="url", value=report.url[:80]) from None
        if peer is not None and _is_loopback(urlsplit(url).hostname) and not _is_loopback(peer):
            raise InvalidRequest(
                f"url: {url} is a loopback address, and the server calls from {peer}: it cannot be reached from here; "
                "let it listen on an address of its network (--host), or name one (--advertise-url)",
                field="url",
                value=url,
            )
        return url
    if report.port is None or peer is None:
        raise InvalidRequest("url: a registration needs url, or the port at the host that it comes from", field="url")
    return f"{report.scheme}://{host_in_url(peer)}:{report.port}"


def _is_loopback(host: str | None) -> bool:
    try:
        return host is not None and ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
