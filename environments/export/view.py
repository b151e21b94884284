"""`view-run`: a local page of the groups that come in, from a file that grows or from a broker.

    view-run data/gsm8k.jsonl
    view-run --api-url http://localhost:8000

It answers this machine alone; nothing is shared.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel, ConfigDict, Field

from atropos_api.common.cliconfig import ConfigError, load_config, run_cli
from atropos_api.common.secret_fields import SECRET
from atropos_api.common.token_file import TokenSource
from environments.export.groups import GroupsUnreadable, read_groups
from environments.export.page import render

LOOPBACK = "127.0.0.1"
OUR_HOSTS = frozenset({LOOPBACK, "localhost"})

Source = Callable[[], list[dict[str, Any]]]


class ViewOptions(BaseModel):
    """What is shown, and where."""

    model_config = ConfigDict(extra="forbid")

    api_url: str | None = Field(None, description="broker whose latest groups are shown; without a file")
    token: str | None = Field(
        None, description="bearer token of that broker; default: $ATROPOS_TOKEN", json_schema_extra=SECRET
    )
    token_file: Path | None = Field(None, description="file that holds it; default: $ATROPOS_TOKEN_FILE")
    port: int = Field(9009, ge=0, le=65535, description="port of the page on this machine; 0: a free one")
    groups: int = Field(8, ge=1, description="how many of the latest groups")
    refresh_seconds: int = Field(5, ge=1, description="how often the browser asks again")


def main() -> NoReturn:
    run_cli(run)


def run(argv: Sequence[str]) -> int:
    """Serve the page until interrupted."""
    path = Path(argv[0]) if argv and not argv[0].startswith("-") else None
    flags = argv[1:] if path is not None else argv
    options = load_config(ViewOptions, flags, prog="view-run [FILE]", description="a local page of groups")
    if (path is None) == (options.api_url is None):
        raise ConfigError("view-run shows either a FILE of groups or --api-url URL; name one of them")
    title = str(path or options.api_url)
    if path is not None:
        source = latest_of_file(path, options.groups)
    else:
        token = TokenSource.settle(options.token, options.token_file, os.environ).value
        source = latest_of_broker(title, options.groups, token=token)
    try:
        server = make_server(source, title=title, port=options.port, refresh_seconds=options.refresh_seconds)
    except OSError as error:
        raise ConfigError(
            f"--port {options.port} cannot be had ({error.strerror}); name another, or 0 for any"
        ) from error
    with server:
        sys.stdout.write(f"http://{LOOPBACK}:{server.server_port}/\n")
        sys.stdout.flush()
        server.serve_forever()
    return 0


def latest_of_file(path: Path, count: int) -> Source:
    return lambda: list(deque(read_groups(path), maxlen=count))[::-1]


def latest_of_broker(url: str, count: int, *, token: str | None = None) -> Source:
    """The newest groups of a broker, gathered over the times it is asked."""
    seen: deque[dict[str, Any]] = deque(maxlen=count)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/groups/latest", headers=headers)  # noqa: S310 - the user's

    def ask() -> list[dict[str, Any]]:
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 - the same
                group = json.load(answer)
        except (OSError, ValueError) as error:
            raise GroupsUnreadable(f"{url}: no group to be had ({error})") from error
        if isinstance(group, dict) and group.get("scores") and group not in seen:
            seen.appendleft(group)
        return list(seen)

    return ask


def make_server(source: Source, *, title: str, port: int, refresh_seconds: int) -> ThreadingHTTPServer:
    """A server of the page on the loopback address; other names of this machine are refused as well."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Host", "").rsplit(":", 1)[0] not in OUR_HOSTS:
                self.send_error(421, "this page is for 127.0.0.1 alone")
                return
            try:
                page = render(source(), title=title, refresh_seconds=refresh_seconds)
            except GroupsUnreadable as error:
                page = render([], title=str(error), refresh_seconds=refresh_seconds)
            body = page.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Say nothing: a page that is asked for every few seconds is no news."""

    return ThreadingHTTPServer((LOOPBACK, port), Handler)


if __name__ == "__main__":
    main()
