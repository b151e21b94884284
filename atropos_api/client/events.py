"""The broker's event stream `/v1/events` as an iterator, and lines of text about a run, from the broker's status.

`watch_events` reads one connection; if it breaks off, the caller opens another. `explain_wait` and `explain_drops` are
for programs that wait for a batch or watch the broker.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import httpx
import msgspec

from atropos_api.client import connection
from atropos_api.client.calls import BrokerRefused
from atropos_api.client.connection import BearerAuth
from atropos_api.common.secrets import TokenSource

SILENCE_SECONDS: Final = 40.0
"""Read timeout; the broker sends something at least every 15 s."""


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event; `id` is the value of `after` that continues after it, None where the event has none."""

    id: int | None
    type: str
    data: dict[str, Any]


def watch_events(
    url: str, *, token: str | TokenSource | None = None, after: int | None = None, timeout_seconds: float = 5.0
) -> Iterator[ServerEvent]:
    """Yield events as they come, until the connection ends; where `after` is given, those after it first.

    Raises `BrokerUnreachable` or `BrokerHostUnknown` if nothing answers, `BrokerRefused` if the answer is not such a
    stream.
    """
    headers = connection.default_headers()
    if after is not None:
        headers["Last-Event-ID"] = str(after)
    timeout = httpx.Timeout(timeout_seconds, read=SILENCE_SECONDS)
    try:
        with (
            httpx.Client(
                timeout=timeout, auth=BearerAuth(token), trust_env=False, verify=connection.tls_of(url)
            ) as client,
            client.stream("GET", f"{url.rstrip('/')}/v1/events", headers=headers) as response,
        ):
            _check(url, response)
            yield from parse_events(response.iter_lines())
    except (httpx.TransportError, httpx.InvalidURL, socket.gaierror, UnicodeError) as error:
        raise connection.unreachable(url, error, waited_seconds=0.0) from error


def parse_events(lines: Iterable[str]) -> Iterator[ServerEvent]:
    """Yield the events of a `text/event-stream`; comments, and events that no broker sends, are skipped."""
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(":")
            fields[name] = value.removeprefix(" ")
            continue
        if "event" in fields and "data" in fields:
            number = fields.get("id", "")
            with suppress(msgspec.DecodeError):
                data = msgspec.json.decode(fields["data"], type=dict[str, Any])
                yield ServerEvent(int(number) if number.isdigit() else None, fields["event"], data)
        fields = {}


def _check(url: str, response: httpx.Response) -> None:
    if response.status_code in {401, 403}:
        response.read()
        connection.raise_for_problem(response)
    if response.status_code != 200 or not response.headers.get("content-type", "").startswith("text/event-stream"):
        detail = f"{url} answers, but not as a broker does; check host and port"
        raise BrokerRefused({"detail": detail}, response.status_code)


FEW: Final = 8
"""Fewest dropped groups that are reported; fewer say nothing about a run yet."""


def explain_drops(status: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each environment that dropped at least `FEW` groups.

    It contains how many, why, an example, and what to change.
    """
    for row in status.get("environments") or ():
        latest = row.get("latest_drop") if isinstance(row, Mapping) else None
        if latest and latest.get("explanation") and sum((row.get("dropped_groups") or {}).values()) >= FEW:
            yield printable(f"{row.get('name')}: {latest['explanation']}")


def explain_wait(status: Mapping[str, Any]) -> str:
    """Return the diagnosis of the run in one line; "" if nothing is waited for, or the broker is too old to say."""
    finding = ((status.get("flow") or {}).get("diagnosis") or {}).get("finding") or {}
    headline = finding.get("headline")
    waits = finding.get("severity") != "ok" or finding.get("rule") == "starting"
    return printable(headline) if isinstance(headline, str) and waits else ""


def printable(text: str) -> str:
    """Return `text` as one line that gives no command to a terminal: models and environments wrote parts of it."""
    return text if text.isprintable() else json.dumps(text)


def count_drops(status: Mapping[str, Any]) -> int:
    """Return the number of groups dropped so far, by environments and broker."""
    return sum((status.get("dropped_groups") or {}).values())
