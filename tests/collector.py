"""A collector of OpenTelemetry's traces over HTTP or gRPC, for tests: it keeps the spans that it gets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One span."""

    service: str
    name: str
    trace: str
    span: str
    parent: str
    links: frozenset[str]
    began_at: float
    ended_at: float
    failed: bool
    attributes: dict[str, Any] = field(hash=False, compare=False)


@dataclass
class Collector:
    """The spans received so far, and the address to send them to."""

    endpoint: str = ""
    spans: list[Seen] = field(default_factory=list)

    def named(self, name: str) -> list[Seen]:
        return [span for span in self.spans if span.name == name]

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            names = {one.key: one.value.string_value for one in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [_seen(names.get("service.name", ""), span) for span in scope.spans]


def _seen(service: str, span: Any) -> Seen:
    return Seen(
        service=service,
        name=span.name,
        trace=span.trace_id.hex(),
        span=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        links=frozenset(link.span_id.hex() for link in span.links),
        began_at=span.start_time_unix_nano / 1e9,
        ended_at=span.end_time_unix_nano / 1e9,
        failed=span.status.code == span.status.STATUS_CODE_ERROR,
        attributes={one.key: getattr(one.value, one.value.WhichOneof("value") or "") for one in span.attributes},
    )


@contextmanager
def collecting_http() -> Iterator[Collector]:
    """Serve OTLP over HTTP on a free port."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.take(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    collector.endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def collecting_grpc() -> Iterator[Collector]:
    """Serve OTLP over gRPC on a free port."""
    import grpc

    collector = Collector()

    class Servicer(TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, _: Any) -> ExportTraceServiceResponse:
            collector.take(request)
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(Servicer(), server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None)
