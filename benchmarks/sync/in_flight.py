"""Keeps a number of requests in flight from a process of its own, so that the publishing one is not slowed.

    python benchmarks/sync/in_flight.py URL REQUESTS TOKENS STREAMING

STREAMING of the requests are answered token by token. For every line on its standard input it writes one with the
longest time in seconds, since the line before, in which none of these got a token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
from harness import PROMPT


class Silence:
    """Tracks the longest time without a token since it was last read."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._longest = 0.0

    def heard(self) -> None:
        now = time.monotonic()
        self._longest = max(self._longest, now - self._last)
        self._last = now

    def take(self) -> float:
        now = time.monotonic()
        longest, self._longest = max(self._longest, now - self._last), 0.0
        self._last = now
        return longest


async def ask(session: aiohttp.ClientSession, url: str, tokens: int, silence: Silence | None) -> None:
    body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "logprobs": 0, "compact": True}
    body["stream"] = silence is not None
    while True:
        async with session.post(f"{url}/generate", json=body) as answer:
            answer.raise_for_status()
            if silence is None:
                await answer.read()
                continue
            async for _ in answer.content.iter_any():
                silence.heard()


async def report(silence: Silence) -> None:
    loop, lines = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while await lines.readline():
        print(json.dumps({"silence_seconds": silence.take()}), flush=True)
    raise asyncio.CancelledError


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    for count in ("requests", "tokens", "streaming"):
        parser.add_argument(count, type=int)
    asked = parser.parse_args()
    silence = Silence()
    connections = aiohttp.TCPConnector(limit=asked.requests)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connections, timeout=timeout) as session:
        loads = [
            ask(session, asked.url, asked.tokens, silence if number < asked.streaming else None)
            for number in range(asked.requests)
        ]
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(report(silence), *loads)


class InFlight:
    """The benchmark's handle of that process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def silence_seconds(self) -> float:
        """Return the longest time without a token since the last call."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(json.loads(self._process.stdout.readline())["silence_seconds"])


@contextlib.contextmanager
def in_flight(url: str, *, requests: int, tokens: int, streaming: int = 16) -> Iterator[InFlight]:
    command = [sys.executable, str(Path(__file__)), url, *map(str, (requests, tokens, streaming))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield InFlight(process)
        finally:
            process.terminate()


if __name__ == "__main__":
    asyncio.run(main())
