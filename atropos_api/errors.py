"""What can go wrong in the broker, by kind. The rules raise these; `http.problems` alone turns them into answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from atropos_api.common.errors import AtroposError

__all__ = [
    "AtroposError",
    "BatchOutOfOrder",
    "BrokerError",
    "CommittedBatch",
    "DamagedBatch",
    "DataDirectoryInUse",
    "Forbidden",
    "InvalidEncoding",
    "InvalidGroup",
    "InvalidRequest",
    "NoOpenRun",
    "NotAcceptable",
    "PolicyNotNewer",
    "PortInUse",
    "QueueFull",
    "RunInProgress",
    "StoreDamaged",
    "StoreUnavailable",
    "StoreUnsafe",
    "StoreUnusable",
    "SupersededRun",
    "TooLarge",
    "Unauthorized",
    "UnknownEnvironment",
    "UnknownHold",
    "UnknownRun",
    "UnknownStep",
    "UnsupportedMediaType",
    "UnusableGroupSize",
]


class BrokerError(AtroposError):
    """An answer other than success. `kind` ends the problem's `type`; `details` are its extra members."""

    kind: ClassVar[str] = "error"

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(_writable(message))
        self.details = {name: _writable(value) for name, value in details.items()}


class InvalidRequest(BrokerError):
    """A request that cannot be understood; `field` and `value` in the details name what is wrong."""

    kind = "invalid-request"


class InvalidGroup(BrokerError):
    """A group that no trainer could use: ragged, not finite, negative ids, wrong types."""

    kind = "invalid-group"

    def __init__(self, field: str, value: object, reason: str) -> None:
        super().__init__(f"{field}: {reason}, got {_shorten(value)}", field=field, value=_shorten(value), reason=reason)
        self.field = field
        self.value = value
        self.reason = reason


class InvalidEncoding(BrokerError):
    """A compressed body that cannot be decompressed."""

    kind = "invalid-gzip"


class UnsupportedMediaType(BrokerError):
    """A body in a form that this broker does not read; as JSON it would."""

    kind = "unsupported-media-type"


class NotAcceptable(BrokerError):
    """None of the forms that the caller accepts is one that this broker answers in."""

    kind = "not-acceptable"


class UnusableGroupSize(BrokerError):
    """The size is above that of a batch, so no other environment's groups could complete it."""

    kind = "group-size-cannot-fill-batch"


class UnknownEnvironment(BrokerError):
    """No environment has that id; it has to register first."""

    kind = "unknown-environment"


class UnknownRun(BrokerError):
    """No run has that id."""

    kind = "unknown-run"


class UnknownHold(BrokerError):
    """The hold was released or ran out; the policy may have changed since."""

    kind = "unknown-hold"


class NoOpenRun(BrokerError):
    """Batches, policies and commits belong to a run; none is open."""

    kind = "no-open-run"


class SupersededRun(BrokerError):
    """Another trainer began a run or took this one over."""

    kind = "run-superseded"


class RunInProgress(BrokerError):
    """A trainer is at work on the open run, which one of another name may not close."""

    kind = "run-in-progress"


class CommittedBatch(BrokerError):
    """The batch is covered by a checkpoint; its groups are gone."""

    kind = "batch-committed"


class BatchOutOfOrder(BrokerError):
    """Batches are formed one after another, and only so many stay open."""

    kind = "batch-out-of-order"


class PolicyNotNewer(BrokerError):
    """Policy versions rise and are never reused."""

    kind = "policy-not-newer"


class QueueFull(BrokerError):
    """Pressure: the same request may succeed later."""

    kind = "queue-full"


class StoreUnavailable(BrokerError):
    """The disk refused a write (full, read-only); nothing of the request was kept."""

    kind = "store-unavailable"

    def __init__(self, message: str, *, refused_bytes: int = 0) -> None:
        super().__init__(message)
        self.refused_bytes = refused_bytes
        """Size of the write, where that may be the reason: less may still find room."""


class DamagedBatch(BrokerError):
    """Groups of the batch were damaged on the disk and dropped; asked for again, it is answered without them."""

    kind = "batch-damaged"


class Unauthorized(BrokerError):
    """The request shows no token, or a wrong one."""

    kind = "token-required"


class Forbidden(BrokerError):
    """The request was caused by a page of another site, or names a host that is not this broker."""

    kind = "cross-site-request"


class TooLarge(BrokerError):
    """The body, as sent or decompressed, is larger than this broker takes."""

    kind = "body-too-large"


class StoreDamaged(AtroposError):
    """A record on disk is gone or does not match its checksum; `refs` are the bodies that this costs."""

    def __init__(self, message: str, *, refs: Sequence[tuple[int, int, int]] = ()) -> None:
        super().__init__(message)
        self.refs = refs


class StoreUnusable(AtroposError):
    """The place named by `--store` cannot hold a store."""


class UnknownStep(AtroposError):
    """No step between a write and its answer has that name."""


class StoreUnsafe(AtroposError):
    """A store that would forget what it acknowledged, as it is set up."""


class DataDirectoryInUse(AtroposError):
    """Two brokers on one directory would hand out each group twice."""


class PortInUse(AtroposError):
    """Another process listens where this one should."""


def _shorten(value: object, limit: int = 80) -> object:
    """`value` as it may stand in an answer: numbers as they are, anything else cut to `limit` characters."""
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"


def _writable(value: Any) -> Any:
    """Text without the halves of characters that JSON can name and UTF-8 cannot hold."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
