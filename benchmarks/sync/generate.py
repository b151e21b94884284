"""Measures the cost of `/generate` against vLLM's own completion route, on one server and in one run.

Both routes get the same prompt and sampling, and answer the sampled tokens' ids and logprobs, to 1 and to 64 clients at
a time. The routes take turns in short windows. Printed are requests and tokens per second of wall time, and the CPU
time of the process that answers HTTP (the engine's process does the same work for each route). The ratios of ours to
vLLM's are taken within each round of turns; their median counts.

    python benchmarks/sync/generate.py [--rounds 5] [--seconds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
from harness import PROMPT, TOKENS, Server, base_model, server

SAMPLING = {"max_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True, "logprobs": 0}
CLIENTS = (1, 64)
PROMISED = 1.0
THEIRS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Route:
    """One of the routes that return the same tokens."""

    name: str
    path: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Window:
    """The figures of one route in one time window."""

    requests_per_second: float
    front_seconds: float
    """CPU time of the HTTP process for each request."""
    engine_seconds: float


def routes(model: str) -> list[Route]:
    vllm = {"model": model, "prompt": PROMPT, "return_token_ids": True, **SAMPLING}
    ours = {"prompt": {"prompt_token_ids": PROMPT}, **SAMPLING}
    return [
        Route(THEIRS, THEIRS, json.dumps(vllm).encode()),
        Route("/generate", "/generate", json.dumps(ours).encode()),
        Route("/generate, compact", "/generate", json.dumps(ours | {"compact": True}).encode()),
    ]


def tokens_and_logprobs(route: Route, answer: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Return tokens and logprobs of the single output, in the form of either route."""
    if route.path == THEIRS:
        (choice,) = answer["choices"]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]
    (tokens,), (logprobs,) = answer["token_ids"], answer["logprobs"]
    return tokens, [next(iter(entry[0].values())) if isinstance(entry, list) else entry for entry in logprobs]


async def take_turn(url: str, route: Route, clients: int, seconds: float, on: Server) -> Window:
    """Keep a number of requests in flight for some seconds."""
    answers: list[bytes] = []
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(url, headers=headers) as session:
        before, began = front_and_engine(on), time.monotonic()

        async def ask() -> None:
            while time.monotonic() - began < seconds:
                async with session.post(route.path, data=route.body) as answer:
                    answers.append(await answer.read())
                    answer.raise_for_status()

        await asyncio.gather(*(ask() for _ in range(clients)))
        wall, after = time.monotonic() - began, front_and_engine(on)
    for answer in answers[:: max(1, len(answers) // 8)]:
        tokens, logprobs = tokens_and_logprobs(route, json.loads(answer))
        assert len(tokens) == len(logprobs) == TOKENS
    spent = [(now - then) / len(answers) for now, then in zip(after, before, strict=True)]
    return Window(len(answers) / wall, *spent)


def front_and_engine(on: Server) -> tuple[float, float]:
    """Return the CPU seconds so far of the process that answers HTTP, and of its children."""
    seconds = [sum(process.cpu_times()[:2]) for process in on.tree()]
    return seconds[0], sum(seconds[1:])


def measure(on: Server, model: str, *, clients: int, rounds: int, seconds: float) -> dict[str, list[Window]]:
    found: dict[str, list[Window]] = {route.name: [] for route in routes(model)}
    for route in routes(model):
        asyncio.run(take_turn(on.url, route, clients, 1.0, on))
    for number in range(rounds):
        turns = routes(model)
        for route in turns if number % 2 == 0 else reversed(turns):
            found[route.name].append(asyncio.run(take_turn(on.url, route, clients, seconds, on)))
    return found


def rows(found: dict[str, list[Window]], clients: int) -> Iterator[str]:
    theirs = found[THEIRS]
    for name, windows in found.items():
        rate = statistics.median(window.requests_per_second for window in windows)
        front, engine = (
            statistics.median(getattr(window, part) for window in windows) * 1e3
            for part in ("front_seconds", "engine_seconds")
        )
        rates, fronts = (
            statistics.median(
                getattr(ours, what) / getattr(other, what) for ours, other in zip(windows, theirs, strict=True)
            )
            for what in ("requests_per_second", "front_seconds")
        )
        verdict = "" if name == THEIRS else f"{'met' if rates >= PROMISED else 'MISSED'} (at least {PROMISED})"
        yield (
            f"{clients:7} {name:20} {rate:9.1f} {rate * TOKENS:9.0f} {front:9.2f} {engine:9.2f} "
            f"{rates:9.2f} {fronts:10.2f}  {verdict}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a turn")
    asked = parser.parse_args()
    model = base_model()
    print("                               requests    tokens   HTTP CPU    engine   requests   HTTP CPU")
    print("clients route                 a second  a second  ms a req.  ms a req.    to vLLM's  to vLLM's")
    with tempfile.TemporaryDirectory() as directory, server(model, directory) as running:
        for clients in CLIENTS:
            found = measure(running, str(model), clients=clients, rounds=asked.rounds, seconds=asked.seconds)
            for row in rows(found, clients):
                print(row, flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
