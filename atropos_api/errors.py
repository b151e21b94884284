"""The broker's errors, by kind: the rules raise them, and only `http.problems` turns them into answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from atropos_api.common.errors import AtroposError


class BrokerError(AtroposError):
    """An error that the broker answers with: `kind` ends the problem's `type`, `details` are its extra members."""

    kind: ClassVar[str] = "error"

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(_writable(message))
        self.details = {name: _writable(value) for name, value in details.items()}


class InvalidRequest(BrokerError):
    """The request cannot be understood; `field` and `value` in the details name what is wrong."""

    kind = "invalid-request"


class InvalidGroup(BrokerError):
    """No trainer could use the group: it is ragged, not finite, or has negative ids or wrong types."""

    kind = "invalid-group"

    def __init__(self, field: str, value: object, reason: str) -> None:
        super().__init__(f"{field}: {reason}, got {_shorten(value)}", field=field, value=_shorten(value), reason=reason)
        self.field = field
        self.value = value
        self.reason = reason


class InvalidEncoding(BrokerError):
    """The compressed body cannot be decompressed."""

    kind = "invalid-gzip"


class UnsupportedMediaType(BrokerError):
    """The broker does not read the body's media type; send it as JSON."""

    kind = "unsupported-media-type"


class NotAcceptable(BrokerError):
    """The broker cannot answer in any media type that the caller accepts."""

    kind = "not-acceptable"


class UnusableGroupSize(BrokerError):
    """The group is larger than a batch, so no other environment's groups could complete one."""

    kind = "group-size-cannot-fill-batch"


class UnknownEnvironment(BrokerError):
    """No environment has that id; register it first."""

    kind = "unknown-environment"


class UnknownRun(BrokerError):
    """No run has that id."""

    kind = "unknown-run"


class UnknownRollout(BrokerError):
    """The group is not among those that can be shown: it was never handed out, or is no longer kept."""

    kind = "unknown-rollout"


class UnknownHold(BrokerError):
    """The hold was released or expired; the policy may have changed since."""

    kind = "unknown-hold"


class UnknownServer(BrokerError):
    """No inference server is registered under that id."""

    kind = "unknown-server"


class LeaseEnded(BrokerError):
    """The lease has ended, and a lease that has ended is never valid again; the server registers under another one."""

    kind = "lease-ended"


class ServerIdInUse(BrokerError):
    """Another process holds a lease under this server id; it ends soon if that process is gone."""

    kind = "server-id-in-use"


class UnknownFleet(BrokerError):
    """No launcher reports on a fleet of that id, so no launcher would carry out a request."""

    kind = "unknown-fleet"


class FleetIdInUse(BrokerError):
    """Another launcher holds the lease of this fleet."""

    kind = "fleet-id-in-use"


class CannotScale(BrokerError):
    """The launcher cannot run this number of servers, for the reason in the message."""

    kind = "cannot-scale"


class NoOpenRun(BrokerError):
    """No run is open, and batches, policies and commits belong to a run."""

    kind = "no-open-run"


class SupersededRun(BrokerError):
    """Another trainer began a run or took this one over."""

    kind = "run-superseded"


class RunInProgress(BrokerError):
    """The trainer of the open run is active, so a trainer with another run name may not close it."""

    kind = "run-in-progress"


class CommittedBatch(BrokerError):
    """The batch is covered by a checkpoint; its groups are no longer kept."""

    kind = "batch-committed"


class BatchOutOfOrder(BrokerError):
    """Batches are formed in order of their numbers, and only a limited number may be uncommitted."""

    kind = "batch-out-of-order"


class ItemCallIsOver(BrokerError):
    """A process counts its calls for items up, and only the last call may be repeated."""

    kind = "item-call-is-over"


class PolicyNotNewer(BrokerError):
    """Policy versions must increase and are never reused."""

    kind = "policy-not-newer"


class QueueFull(BrokerError):
    """The queue is full; the same request may succeed later."""

    kind = "queue-full"


class StoreUnavailable(BrokerError):
    """The store refused a write (for example, the disk is full or read-only); nothing of the request was kept."""

    kind = "store-unavailable"

    def __init__(self, message: str, *, refused_bytes: int = 0, is_outage: bool = False) -> None:
        super().__init__(message)
        self.refused_bytes = refused_bytes
        """Size of the refused write if the size may be the reason: a smaller write may still fit."""
        self.is_outage = is_outage
        """True if the store is another program, and that does not answer."""


class DamagedBatch(BrokerError):
    """Groups of the batch were damaged on disk and dropped; a repeated request is answered without them."""

    kind = "batch-damaged"


class Unauthorized(BrokerError):
    """The request has no token, or a wrong one."""

    kind = "token-required"


class Forbidden(BrokerError):
    """A page of another site caused the request, or the host it names is not this broker."""

    kind = "cross-site-request"


class TooLarge(BrokerError):
    """The body, as sent or decompressed, is larger than this broker accepts."""

    kind = "body-too-large"


class NoBackup(BrokerError):
    """The broker's store is not a directory, so the broker has no files to back up."""

    kind = "no-backup"


class StoreDamaged(AtroposError):
    """A record on disk is missing or does not match its checksum; `refs` are the bodies lost with it."""

    def __init__(self, message: str, *, refs: Sequence[tuple[int, int, int]] = ()) -> None:
        super().__init__(message)
        self.refs = refs


class StoreUnusable(AtroposError):
    """The place named by `--store` cannot hold a store."""


class UnknownStep(AtroposError):
    """No failpoint (a step between a write and its answer) has that name."""


class StoreUnsafe(AtroposError):
    """The store, as it is configured, could lose data that it acknowledged."""


class DataDirectoryInUse(AtroposError):
    """Another broker uses the data directory; two on one directory would hand out each group twice."""


class PortInUse(AtroposError):
    """The port cannot be bound, usually because another process listens on it."""


def _shorten(value: object, limit: int = 80) -> object:
    """Return `value` as answers show it: numbers unchanged, anything else cut to `limit` characters."""
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"


def _writable(value: Any) -> Any:
    """Replace lone surrogates in a text: JSON can express them, UTF-8 cannot encode them."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
