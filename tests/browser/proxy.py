"""A reverse proxy as people put before a broker: it takes a prefix off the path, and passes streams on as they come."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

PASSED_BACK = frozenset({"content-type", "etag", "location", "content-security-policy", "cache-control"})


@contextmanager
def prefix_proxy(url: str, prefix: str) -> Iterator[str]:
    """Serve `url` below `prefix` on another port; yield the address with the prefix."""
    target = urlsplit(url)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith(prefix):
                self.send_error(404)
                return
            connection = http.client.HTTPConnection(str(target.hostname), target.port, timeout=60)
            wanted = {name: value for name, value in self.headers.items() if name.lower() not in {"connection", "host"}}
            connection.request("GET", self.path.removeprefix(prefix) or "/", headers=wanted)
            answer = connection.getresponse()
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                if name.lower() in PASSED_BACK:
                    self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            try:
                while piece := answer.read1(65536):
                    self.wfile.write(piece)
                    self.wfile.flush()
            except (OSError, http.client.IncompleteRead):
                pass  # the browser closed the stream, or the broker ended within it
            finally:
                connection.close()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}{prefix}"
        server.shutdown()
