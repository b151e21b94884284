"""Real servers for other packages' tests: a broker, in process over ASGI or served on a free port, and Redis.

`RedisServer` runs a real `redis-server` on a free port; it can be killed, paused, resumed and started again.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from atropos_api.broker import Broker
from atropos_api.client import AsyncBrokerClient
from atropos_api.config import BrokerConfig
from atropos_api.server.app import BrokerApp, create_app
from atropos_api.server.serve import BrokerServer
from atropos_api.store.memory import MemoryBodyLog, MemoryLedger
from atropos_api.store.redis_session import connect
from atropos_api.wire.groups import Group

IN_PROCESS_URL = "http://127.0.0.1"


def make_group(
    size: int = 4, length: int = 6, *, first_token: int = 0, version: int | None = None, **fields: Any
) -> Group:
    """Return a valid group whose tokens count up from `first_token`; sampled under `version` if one is given."""
    tokens = [[first_token + row * length + place for place in range(length)] for row in range(size)]
    values: dict[str, Any] = {
        "tokens": tokens,
        "masks": [[-100, *row[1:]] for row in tokens],
        "scores": [float(row) for row in range(size)],
        "inference_logprobs": [[1.0] + [-0.5] * (length - 1) for _ in tokens],
    }
    if version is not None:
        values["policy_versions"] = [[(1, length, version)] for _ in tokens]
    return Group(**(values | fields))


def make_memory_app(**options: Any) -> BrokerApp:
    """Return the application over an empty memory store; `options` are those of `BrokerConfig`."""
    config = BrokerConfig(store="memory", **options)
    return create_app(config, Broker(MemoryLedger(), MemoryBodyLog(), settings=config))


def memory_broker(**options: Any) -> tuple[BrokerApp, AsyncBrokerClient]:
    """Return the application and a client that calls it without a socket."""
    app = make_memory_app(**options)
    transport = httpx.ASGITransport(app=app)
    return app, AsyncBrokerClient(IN_PROCESS_URL, token=options.get("token"), transport=transport)


@contextmanager
def served_broker(**options: Any) -> Iterator[str]:
    """Serve a memory broker from a thread on a free port; yield its URL."""
    with serve_in_thread(make_memory_app(**options)) as url:
        yield url


@contextmanager
def serve_in_thread(app: BrokerApp) -> Iterator[str]:
    """Serve an application on a free loopback port until the block ends."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        server = BrokerServer(app, app.context.config, app.context.stop)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            while not server.started and thread.is_alive():
                time.sleep(0.005)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            app.context.stopping = True
            server.should_exit = True
            server.force_exit = True
            thread.join(timeout=10)


START_SECONDS = 20.0


class RedisServer:
    """A Redis server over one directory: by default it is as durable as a broker requires."""

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
        """Start the server and wait until it has loaded its data."""
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
    """Run a Redis server in a directory of its own until the block ends."""
    with tempfile.TemporaryDirectory(prefix="atropos-redis-") as directory:
        server = RedisServer(Path(directory), **options)
        server.start()
        try:
            yield server
        finally:
            server.kill()
