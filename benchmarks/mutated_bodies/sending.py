"""Puts requests on the wire at a given rate, well-formed ones or mutants, and counts the answers."""

from __future__ import annotations

import collections
import multiprocessing
import os
import random
import socket
import time
from typing import Self

import mutations
from mutations import Mutant

ANSWER_SECONDS = 20.0
Bodies = list[tuple[str, bytes, dict[str, str]]]
Stretch = tuple[float, float]
Counts = collections.Counter[str]


class Sender:
    """A process of its own at low priority, so that it does not slow the callers that are timed."""

    def __init__(self, url: str, bodies: Bodies, *, rate: float, seed: int) -> None:
        arguments = (url, bodies, rate, seed)
        self._pool = multiprocessing.get_context("spawn").Pool(1, initializer=prepare, initargs=arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.terminate()
        self._pool.join()

    def send(self, count: int, *, mutate: bool) -> tuple[Stretch, Counts]:
        """Send `count` requests; return the times of first request and last answer, and counts by kind and status."""
        return self._pool.apply(send_lot, (count, mutate))


def prepare(url: str, bodies: Bodies, rate: float, seed: int) -> None:
    os.nice(10)
    # The one process of the pool has this one job.
    globals()["JOB"] = (url, bodies, rate, random.Random(seed))


def send_lot(count: int, mutate: bool) -> tuple[Stretch, Counts]:
    url, bodies, rate, rng = globals()["JOB"]
    answers: Counts = collections.Counter()
    wires = [make(rng, bodies, mutate) for _ in range(count)]
    began = next_at = time.monotonic()
    for mutant, wire in wires:
        answers[f"{mutant.kind} {send(url, mutant, wire)}"] += 1
        next_at += 1 / rate
        time.sleep(max(0.0, next_at - time.monotonic()))
    return (began, time.monotonic()), answers


def make(rng: random.Random, bodies: Bodies, mutate: bool) -> tuple[Mutant, bytes]:
    if mutate:
        mutant = mutations.make(rng, bodies)
    else:
        path, body, headers = rng.choice(bodies)
        mutant = Mutant("well-formed", path, body, dict(headers))
    if "Idempotency-Key" in mutant.headers:
        mutant.headers["Idempotency-Key"] += f" {rng.random()}"
    return mutant, mutant.wire(rng)


def send(url: str, mutant: Mutant, wire: bytes) -> str:
    """Send one request; return its status, `closed` for an unanswered one with false framing, or else `silence`."""
    host, port = url.removeprefix("http://").split(":")
    received = b""
    try:
        with socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS) as connection:
            connection.sendall(wire)
            if mutant.lies:
                connection.shutdown(socket.SHUT_WR)
            while len(received) < 12 and (piece := connection.recv(4096)):
                received += piece
    except OSError:
        pass
    if received.startswith(b"HTTP/1.1 ") and len(received) >= 12:
        return received[9:12].decode()
    return "closed" if mutant.lies else "silence"
