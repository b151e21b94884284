"""The state that the handlers of one app share: `create_app` builds it once."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

import msgspec
from fastapi import Request

from atropos_api.broker import Broker
from atropos_api.broker.status import describe_status
from atropos_api.broker.v0 import AtroposContract
from atropos_api.common.concurrency import FairLock, Notifier
from atropos_api.common.identity import package_version
from atropos_api.config import BrokerConfig
from atropos_api.errors import StoreUnavailable

SHARED_STATUS_SECONDS: Final = 1.0


@dataclass(slots=True)
class AppContext:
    """The shared state of one app: the broker and what its handlers need. `stopping` ends every wait at once."""

    broker: Broker
    config: BrokerConfig
    legacy: AtroposContract
    groups_notifier: Notifier = field(default_factory=Notifier)
    pacing_notifier: Notifier = field(default_factory=Notifier)
    events_notifier: Notifier = field(default_factory=Notifier)
    stop_notifier: Notifier = field(default_factory=Notifier)
    legacy_batch_lock: FairLock = field(default_factory=FairLock)
    version: str = field(default_factory=package_version)
    stopping: bool = False
    store_failure: str | None = None
    """The reason why the store refused the last write; None once it has taken one of that size."""
    store_failure_bytes: int = 0

    _status: tuple[int, float, bytes] = (-1, 0.0, b"")

    def status_text(self) -> bytes:
        """Return the status, encoded once for all watchers while nothing changes."""
        notifications, described_at, text = self._status
        now = time.monotonic()
        if notifications != self.events_notifier.notifications or now - described_at > SHARED_STATUS_SECONDS:
            text = msgspec.json.encode(describe_status(self.broker))
            self._status = (self.events_notifier.notifications, now, text)
        return text

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
        for notifier in (self.groups_notifier, self.pacing_notifier, self.events_notifier, self.stop_notifier):
            notifier.notify()


def context_of(request: Request) -> AppContext:
    context: AppContext = request.app.context
    # Memory could not be read again after the store failed, so each request tries until it can.
    if context.broker.state.store_inconsistent:
        context.broker.rebuild()
    return context
