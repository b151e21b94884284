"""An inference server without a model that registers at the broker, drains and leaves as the real one does.

It computes so many requests at a time and takes a set time for each, so that its tokens per second do not depend on
the machine. Run by path: `python registered_standin.py --config FILE`, the settings file of a launched server.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn
import yaml

from atropos_api.client import AsyncBrokerClient
from atropos_api.common.secrets import TokenSource
from environments.sdk.testing import FakeInference, Receive, Scope, Send
from example_trainer.serving.config import RegistrationIdentity
from example_trainer.serving.problems import Problem
from example_trainer.serving.registration import Load, Registration

PLACES = 8
REQUEST_SECONDS = 0.4
END = 2
ANSWER = [7] * 15 + [END]


class Standin:
    """One server process."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.fake = FakeInference(lambda *_: list(ANSWER), end=END, delay_seconds=REQUEST_SECONDS)
        self.places = asyncio.Semaphore(PLACES)
        self.inside = 0
        self.told_to_drain = False
        self.drained = asyncio.Event()
        host = settings["host"]
        self.listening = socket.create_server((host, settings["port"]))
        port = self.listening.getsockname()[1]
        identity = RegistrationIdentity(
            server_id=settings["server_id"],
            boot_id=secrets.token_hex(4),
            first_lease_id=secrets.token_hex(8),
            policy=settings["policy"],
            mode="fixed",  # its weights come from no trainer, so it serves from its registration on
            url=None if host == "0.0.0.0" else f"http://{host}:{port}",
            scheme="http",
            port=port,
        )
        broker = AsyncBrokerClient(
            settings["broker_url"], token=TokenSource.settle(None, None, os.environ), retry_seconds=0.0
        )
        self.registration = Registration(broker, identity, self.look, on_drain=self.drain)

    def drain(self) -> None:
        self.told_to_drain = True
        self.note_end()

    def note_end(self) -> None:
        if self.told_to_drain and not self.inside:
            self.drained.set()

    async def look(self) -> Load:
        running = min(self.inside, PLACES)
        return Load(version=1, running=running, waiting=self.inside - running)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == "/health":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
            return
        if scope["path"] != "/generate":
            await self.fake(scope, receive, send)
            return
        try:
            self.registration.check()
        except Problem:
            self.fake.problem = (503, "draining")
            await self.fake(scope, receive, send)
            self.fake.problem = None
            return
        self.inside += 1
        try:
            async with self.places:
                await self.fake(scope, receive, send)
        finally:
            self.inside -= 1
            self.note_end()

    async def run(self) -> None:
        config = uvicorn.Config(self, log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[self.listening]))
        renewing = asyncio.create_task(self.registration.run())
        await self.drained.wait()
        renewing.cancel()
        await self.registration.leave()
        server.should_exit = True
        await serving


def main() -> None:
    settings = yaml.safe_load(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())["vllm"]
    if os.environ.get("STANDIN_VLLM") == "lone" and settings["server_id"].endswith("-2"):
        sys.exit("ValueError: No available memory for the cache blocks")
    asyncio.run(serve(settings))


async def serve(settings: dict[str, Any]) -> None:
    await Standin(settings).run()


if __name__ == "__main__":
    main()
