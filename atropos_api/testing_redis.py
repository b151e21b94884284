"""A real `redis-server` on a free port for tests; it can be killed, stopped for a while, and started again."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atropos_api.store.redis_session import connect

START_SECONDS = 20.0


class RedisServer:
    """One server over one directory; by default it keeps what a broker asks a Redis to keep."""

    def __init__(self, directory: Path, *, appendonly: str = "yes", appendfsync: str = "always") -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._directory = directory
        self._options = ["--appendonly", appendonly, "--appendfsync", appendfsync]
        self._process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def installed() -> bool:
        return shutil.which("redis-server") is not None

    def start(self) -> None:
        """Start it and wait until it has read what it held."""
        address = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self._directory)]
        self._process = subprocess.Popen(
            ["redis-server", *address, "--save", "", *self._options], stdout=subprocess.DEVNULL
        )
        client = connect(self.url, timeout_seconds=5.0)
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                client.ping()
                client.close()
                return
            except Exception:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                time.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def flush(self) -> None:
        client = connect(self.url, timeout_seconds=5.0)
        client.flushall()
        client.close()


@contextmanager
def running_redis(**options: str) -> Iterator[RedisServer]:
    """A started server in a directory of its own, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="atropos-redis-") as directory:
        server = RedisServer(Path(directory), **options)
        server.start()
        try:
            yield server
        finally:
            server.kill()
