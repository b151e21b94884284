"""OpenTelemetry behind `tracing.Tracing`: a module of its own, because it is imported only if traces are asked for.

OpenTelemetry's own variables apply: `OTEL_TRACES_SAMPLER` and `OTEL_TRACES_SAMPLER_ARG` choose which part of all
rollouts is traced, `OTEL_EXPORTER_OTLP_HEADERS` holds keys, and `OTEL_EXPORTER_OTLP_TRACES_PROTOCOL` is `grpc` or
`http/protobuf`, as for vLLM, which reads the same variable.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from atropos_api.common.identity import DISTRIBUTION, package_version
from atropos_api.common.tracing import FIELD, Span, Value, running

PROTOCOL: Final = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
HTTP: Final = "http/protobuf"
PREFIX: Final = "atropos."
"""The prefix of all attributes."""

CLOSE_SECONDS: Final = 5.0
NANOSECONDS: Final = 1_000_000_000

_propagator: Final = TraceContextTextMapPropagator()


class RecordedSpan:
    """A span that is recorded, if the sampler has chosen its trace."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, _below(span))
        self.traceparent: str | None = carrier[FIELD]

    def begin(self, name: str, **attributes: Value) -> Span:
        span = self._tracer.start_span(name, _below(self._span), attributes=_prefixed(attributes))
        return RecordedSpan(self._tracer, span)

    def child(self, name: str, **attributes: Value) -> AbstractContextManager[Span]:
        return running(self.begin(name, **attributes))

    def set(self, **attributes: Value) -> None:
        self._span.set_attributes(_prefixed(attributes))

    def link(self, traceparents: Sequence[str]) -> None:
        for traceparent in traceparents:
            self._span.add_link(_context_of(traceparent))

    def note(self, error: BaseException) -> None:
        self._span.record_exception(error)

    def fail(self, error: BaseException) -> None:
        self.note(error)
        self._span.set_status(trace.StatusCode.ERROR, f"{type(error).__name__}: {error}")

    def end(self) -> None:
        self._span.end()


class OpenTelemetryTracing:
    """Traces that are sent to a collector, or by another exporter, from a thread of its own."""

    is_on = True

    def __init__(self, endpoint: str, *, service: str, exporter: SpanExporter | None = None) -> None:
        names = {SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", service), SERVICE_VERSION: package_version()}
        self._provider = TracerProvider(resource=Resource.create(names), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or make_exporter(endpoint)))
        self._tracer = self._provider.get_tracer(DISTRIBUTION)

    def begin(
        self, name: str, *, parent: str | None = None, at_seconds: float | None = None, **attributes: Value
    ) -> Span:
        context = Context() if parent is None else _propagator.extract({FIELD: parent}, Context())
        began_at = None if at_seconds is None else int(at_seconds * NANOSECONDS)
        span = self._tracer.start_span(name, context, attributes=_prefixed(attributes), start_time=began_at)
        return RecordedSpan(self._tracer, span)

    def close(self) -> None:
        # In a thread: a collector that does not answer would hold the process for half a minute.
        closing = threading.Thread(target=self._provider.shutdown, name="close-traces", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


def make_exporter(endpoint: str) -> SpanExporter:
    """Return an exporter to `endpoint` that speaks the protocol of OpenTelemetry's variable, gRPC by default."""
    if os.environ.get(PROTOCOL, "grpc") == HTTP:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

        return OverHttp(endpoint=endpoint)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc

    return OverGrpc(endpoint=endpoint, insecure=endpoint.startswith("http://"))


def _below(span: trace.Span) -> Context:
    return trace.set_span_in_context(span, Context())


def _context_of(traceparent: str) -> trace.SpanContext:
    return trace.get_current_span(_propagator.extract({FIELD: traceparent}, Context())).get_span_context()


def _prefixed(attributes: Mapping[str, Value]) -> dict[str, Value]:
    return {PREFIX + name: value for name, value in attributes.items()}
