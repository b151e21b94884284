"""What a running launch knows of itself: milestones, the steps trained so far, and the broker's own account.

Everything is read from outside: health endpoints, the broker's `/v1/status`, and the lines the trainer appends to
`metrics.jsonl`. One poll costs well under a millisecond, so that watching a run does not slow it down.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from atropos_api.common.dropped import explain_drops
from atropos_api.common.token_file import TokenSource

STATUS_INTERVAL_SECONDS = 1.0
READINESS_INTERVAL_SECONDS = 0.25
STALLED_SECONDS = 30.0


class MetricsTail:
    """The complete lines that were appended to a JSONL file since the last look."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if from_end and path.exists() else 0

    def read(self) -> list[dict[str, Any]]:
        """New rows, oldest first; a line still being written is left for the next call."""
        try:
            if self._path.stat().st_size <= self._offset:
                return []
            with self._path.open("rb") as handle:
                handle.seek(self._offset)
                grown = handle.read()
        except FileNotFoundError:
            return []
        complete, newline, _ = grown.rpartition(b"\n")
        self._offset += len(complete) + len(newline)
        return [row for line in complete.splitlines() if (row := _row(line)) is not None]


class Endpoint:
    """One server asked again and again over one connection; silence and refusals are answers too."""

    def __init__(self, url: str, *, token: TokenSource | None = None, timeout_seconds: float = 0.5) -> None:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        connect = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._connection = connect(parts.hostname or "", parts.port or (443 if secure else 80), timeout=timeout_seconds)
        self._prefix = parts.path.rstrip("/")
        self._token = token or TokenSource()

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body; status 0 if nobody answers."""
        status, body = self._ask(path)
        return self._ask(path) if status == http.HTTPStatus.UNAUTHORIZED and self._token.reload() else (status, body)

    def _ask(self, path: str) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {self._token.value}"} if self._token.value else {}
        try:
            self._connection.request("GET", self._prefix + path, headers=headers)
            response = self._connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            self._connection.close()
            return 0, b""

    def get_json(self, path: str) -> dict[str, Any] | None:
        """The object at `path`, or None."""
        status, body = self.get(path)
        return _row(body) if status == 200 else None

    def close(self) -> None:
        self._connection.close()


@dataclass(kw_only=True, slots=True)
class Snapshot:
    """The state of the run, for whoever shows it."""

    name: str
    run_dir: Path
    total_steps: int
    started_at: float
    """Unix time at which the command was given."""
    milestones: dict[str, float | None] = field(default_factory=dict)
    """What has to be reached before the first step, with its Unix time once it is."""
    marks: dict[str, float] = field(default_factory=dict)
    """Unix times of other events worth knowing afterwards."""
    phase: str = "starting"
    rows: list[dict[str, Any]] = field(default_factory=list)
    status: Mapping[str, Any] = field(default_factory=dict)

    @property
    def elapsed_seconds(self) -> float:
        return time.time() - self.started_at

    @property
    def step(self) -> int:
        return int(self.rows[-1].get("step", len(self.rows))) if self.rows else 0

    @property
    def drops(self) -> list[str]:
        """Why groups do not reach the trainer, as their environments say, while no step is made."""
        last = self.rows[-1].get("timestamp") if self.rows else None
        if isinstance(last, int | float) and time.time() - last < STALLED_SECONDS:
            return []
        return list(explain_drops(self.status))

    def series(self, name: str) -> list[float]:
        """All values of a metric so far, in the order of the steps."""
        return [float(row[name]) for row in self.rows if isinstance(row.get(name), int | float)]

    def reach(self, milestone: str) -> None:
        if self.milestones.get(milestone, 0.0) is None:
            self.milestones[milestone] = time.time()


class Feed:
    """Fills a snapshot; `poll` is called from the launcher's loop."""

    def __init__(
        self, snapshot: Snapshot, *, metrics: MetricsTail, broker: Endpoint, servers: Sequence[Endpoint] = ()
    ) -> None:
        self.snapshot = snapshot
        self._metrics = metrics
        self._broker = broker
        self._servers = servers
        self._starting = list(servers)
        self._asked_at = 0.0

    def poll(self) -> list[dict[str, Any]]:
        """Look at everything that is due; answers the rows of steps trained since the last call."""
        rows = self._metrics.read()
        self.snapshot.rows += rows
        now = time.monotonic()
        ready = None not in self.snapshot.milestones.values()
        if now - self._asked_at >= (STATUS_INTERVAL_SECONDS if ready else READINESS_INTERVAL_SECONDS):
            self._asked_at = now
            self._ask()
        return rows

    def close(self) -> None:
        self._broker.close()
        for server in self._servers:
            server.close()

    def _ask(self) -> None:
        milestones = self.snapshot.milestones
        status = self._broker.get_json("/v1/status")
        if status is not None:
            self.snapshot.status = status
            self.snapshot.reach("broker")
            if status.get("run"):
                self.snapshot.reach("trainer")
            if status.get("environments"):
                self.snapshot.reach("environment")
        if milestones.get("vllm", 0.0) is None:
            self._starting = [server for server in self._starting if server.get("/health")[0] != 200]
            if not self._starting:
                self.snapshot.reach("vllm")


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None
