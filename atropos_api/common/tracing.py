"""Traces of a run: one trace leads from an item over its rollout, group and batch to the training step.

A span is handed on as the W3C text `traceparent`: in the header of requests to inference servers, and in a group's
free-form `generation_params`, which brokers and trainers of the Atropos contract pass on and ignore. Nothing of
OpenTelemetry is imported unless an endpoint is set; until then every call here returns at once. Spans begin in the
SDK's `rollouts` (rollout, group), the broker's `batch_traces` (batch) and the trainer's `trainers` (step).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Final, Protocol

from atropos_api.common.errors import AtroposError

FIELD: Final = "traceparent"
"""The name of the header, and of the key in a group's `generation_params`."""

Value = str | bool | int | float
"""The value of an attribute."""

_FORM: Final = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class TracesUnavailable(AtroposError):
    """Raised if traces are asked for and OpenTelemetry is not installed."""


class Span(Protocol):
    """A part of a trace."""

    traceparent: str | None
    """The text by which another process continues the trace; None if nothing is recorded."""

    def begin(self, name: str, **attributes: Value) -> Span:
        """Return a child, which the caller ends."""

    def child(self, name: str, **attributes: Value) -> AbstractContextManager[Span]:
        """Return a context manager for a child, which is the current span in the block and ends with it."""

    def set(self, **attributes: Value) -> None:
        """Add attributes."""

    def link(self, traceparents: Sequence[str]) -> None:
        """Refer to spans of other traces."""

    def note(self, error: BaseException) -> None:
        """Add an error that the work survived."""

    def fail(self, error: BaseException) -> None:
        """Add the error that ended the work, and mark the span as failed."""

    def end(self) -> None:
        """End the span now."""


class Tracing(Protocol):
    """The traces of one program."""

    is_on: bool

    def begin(
        self, name: str, *, parent: str | None = None, at_seconds: float | None = None, **attributes: Value
    ) -> Span:
        """Return a span that begins now, or at `at_seconds` since 1970: in a new trace, or below the span `parent`."""

    def close(self) -> None:
        """Send what has not been sent yet, for at most a few seconds."""


class _NoSpan:
    """A span that records nothing, nor do its children."""

    traceparent: str | None = None

    def begin(self, *_: object, **__: object) -> Span:
        return self

    def child(self, *_: object, **__: object) -> AbstractContextManager[Span]:
        return nullcontext(self)

    def set(self, **_: object) -> None:
        pass

    def link(self, _: object) -> None:
        pass

    def note(self, _: BaseException) -> None:
        pass

    def fail(self, _: BaseException) -> None:
        pass

    def end(self) -> None:
        pass


class _NoTracing:
    is_on = False

    def begin(self, *_: object, **__: object) -> Span:
        return NO_SPAN

    def close(self) -> None:
        pass


NO_SPAN: Final[Span] = _NoSpan()

NO_TRACING: Final[Tracing] = _NoTracing()

_current: ContextVar[Span] = ContextVar("span", default=NO_SPAN)


def current_span() -> Span:
    """Return the span in which the present task works."""
    return _current.get()


@contextmanager
def running(span: Span) -> Iterator[Span]:
    """Make `span` the current one in the block, in this task and those it starts; it ends with the block."""
    token = _current.set(span)
    try:
        yield span
    except BaseException as error:
        span.fail(error)
        raise
    finally:
        _current.reset(token)
        span.end()


def open_tracing(endpoint: str | None, *, service: str) -> Tracing:
    """Return the traces of a program, which are sent to `endpoint`; nothing is recorded if it is None."""
    if endpoint is None:
        return NO_TRACING
    try:
        from atropos_api.common.otel import OpenTelemetryTracing
    except ImportError as error:
        raise TracesUnavailable(
            f"--otlp-traces-endpoint {endpoint} needs OpenTelemetry ({error}): pip install 'atropos-grpo[otel]', or "
            "leave the option out"
        ) from error
    return OpenTelemetryTracing(endpoint, service=service)


def traceparent_of(params: Mapping[str, Any] | None) -> str | None:
    """Return the `traceparent` in a group's `generation_params`; None if there is none that is valid."""
    text = None if params is None else params.get(FIELD)
    return text if isinstance(text, str) and _FORM.fullmatch(text) else None
