"""Clients of a run's registered inference servers: they send as an environment does, and follow the same registry."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Self

from atropos_api.client import AsyncBrokerClient
from atropos_api.common.secrets import TokenSource
from environments.sdk.config import APIServerConfig
from environments.sdk.inference.server import HttpServer
from environments.sdk.server_manager import ServerManager

CLIENTS = 64
END_SECONDS = 60.0


class Traffic:
    """Clients that each ask for one completion after the other, by an environment's pool of registered servers."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self.tokens = 0
        self.failures: list[BaseException] = []
        self.servers: list[HttpServer] = []
        """The servers that are asked at present."""
        self._url = url
        self._token = TokenSource(token)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(END_SECONDS)
        if self._thread.is_alive():
            self.failures.append(TimeoutError(f"a request has had no answer for {END_SECONDS:g} s"))

    def asks(self, url: str) -> bool:
        """Return True while requests may go to the server at this address."""
        return any(server.config.root_url.rstrip("/") == url.rstrip("/") for server in self.servers)

    def tokens_per_second(self, seconds: float) -> float:
        before, began = self.tokens, time.monotonic()
        time.sleep(seconds)
        return (self.tokens - before) / (time.monotonic() - began)

    async def _run(self) -> None:
        template = APIServerConfig(server_type="vllm", policy="default", num_max_requests_at_once=512)
        manager = ServerManager([template], load_tokenizer=object)  # there is no vocabulary to compare
        assert manager.registered is not None
        self.servers = manager.registered.servers
        async with AsyncBrokerClient(self._url, token=self._token) as broker:
            following = asyncio.create_task(manager.registered.follow(broker))
            await asyncio.gather(*(self._ask(manager) for _ in range(CLIENTS)))
            following.cancel()
        await manager.aclose()

    async def _ask(self, manager: ServerManager) -> None:
        while not self._stop.is_set():
            try:
                _, tokens, _, _ = await manager.tokens_and_logprobs_completion(input_ids=[5, 6], max_tokens=32, n=1)
            except Exception as error:
                self.failures.append(error)
                return
            self.tokens += len(tokens[0])
