"""Test doubles for the server: an engine without vLLM for tests of the fence, and a whole server without vLLM.

`python -m example_trainer.serving.testing` takes flags of the inference server and answers its policy version on
every route, for tests of starting, replacing and stopping servers. It listens, loads, takes over, hands over and stops
with the inference server's own code.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from atropos_api.common.errors import REFUSED
from example_trainer.errors import CannotServe
from example_trainer.processes.ports import ServerSockets, open_sockets
from example_trainer.serving import problems
from example_trainer.serving.admission import AdmissionGate
from example_trainer.serving.drain import Running
from example_trainer.serving.engine import Counters
from example_trainer.serving.handover import HandoverServer, hand_over, take_over
from example_trainer.serving.problems import Problem
from example_trainer.serving.responses import UNLABELLED, Spans
from example_trainer.serving.startup import StartingAnswers
from example_trainer.weight_protocol.base_record import read_base_record


class StubEngine:
    """Implements the fence's `Engine`: decodes step by step, waits while paused, stamps each token.

    It keeps no KV between two steps, so tokens decoded after a pause come from the weights after it.
    """

    def __init__(self, *, step_tokens: int = 1, step_seconds: float = 0.0) -> None:
        self.calls: list[tuple[str, object]] = []
        """The fence's successful calls, in order."""
        self.failing: set[str] = set()
        """Names of calls that fail: `pause`, `resume`, `stamp`."""
        self.generated_tokens = 0
        self.now_running: Running = {
            "computed_tokens": [],
            "tokens": [],
            "generated_tokens": [],
            "token_limits": [],
            "waiting": 0,
            "distinct_tokens": 0,
            "last_lengths": [],
            "step_seconds": step_seconds,
            "request_seconds": 0.0,
            "prefill_seconds": 0.0,
        }
        """The answer of `running`."""
        self._step_tokens = step_tokens
        self._step_seconds = step_seconds
        self._version = UNLABELLED
        self._decoding = 0
        self._runs = asyncio.Event()
        self._runs.set()

    @property
    def paused(self) -> bool:
        return not self._runs.is_set()

    async def pause(self, *, discard: bool) -> Counters:
        self._note("pause", discard)
        self._runs.clear()
        return {"discarded_tokens": 12 if discard else 0, "paused_requests": self._decoding} | self._counters()

    async def resume(self, version: str | None) -> Counters:
        self._note("resume", version)
        self._version = version or self._version
        self._runs.set()
        return self._counters()

    async def stamp(self, version: str) -> None:
        self._note("stamp", version)
        self._version = version

    async def counters(self) -> Counters:
        self._note("counters", None)
        running = len(self.now_running["computed_tokens"])
        return {"requests_running": running, "requests_waiting": self.now_running["waiting"]} | self._counters()

    async def running(self) -> Running:
        self._note("running", None)
        return self.now_running

    def salt_prefixes(self, salt: str) -> None:
        self._note("salt", salt)

    async def decode(self, length: int, compute: Callable[[int, int], None]) -> Spans:
        """Let `compute(start, end)` produce a request's tokens, step by step; return their version spans."""
        spans: Spans = []
        self._decoding += 1
        try:
            for start in range(0, length, self._step_tokens):
                await self._runs.wait()
                end = min(start + self._step_tokens, length)
                compute(start, end)
                version = None if self._version == UNLABELLED else int(self._version)
                if spans and spans[-1][2] == version:
                    spans[-1][1] = end
                else:
                    spans.append([start, end, version])
                self.generated_tokens += end - start
                await asyncio.sleep(self._step_seconds)
        finally:
            self._decoding -= 1
        return spans

    def _note(self, name: str, value: object) -> None:
        if name in self.failing:
            raise RuntimeError(f"the engine does not {name}")
        self.calls.append((name, value))

    def _counters(self) -> Counters:
        return {"generated_tokens_total": self.generated_tokens, "recomputed_tokens_total": 0}


_PIECES = 5


class VersionServer:
    """Answers its version: at once, after a while as if it decoded, or in a stream of pieces."""

    def __init__(self, version: int | None, *, answer_seconds: float, model: str = "m") -> None:
        self.gate = AdmissionGate()
        self._answer_seconds = answer_seconds
        base = read_base_record(model)
        self._facts = {"policy_version": version, "boot_id": secrets.token_hex(8), "model": model, "max_model_len": 64}
        self._facts |= {"lora": True, "base_digest": base.digest if base else None}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            if request.method in {"GET", "HEAD"}:
                await JSONResponse(self._facts)(scope, receive, send)
                return
            body = await request.body()
            answer = self._facts | {"digest": hashlib.blake2b(body, digest_size=16).hexdigest()}
            asked = json.loads(body)
            seconds = asked.get("seconds", self._answer_seconds)
            await self.gate.enter()
            try:
                if asked.get("stream"):
                    await _stream(send, json.dumps(answer).encode() + b"\n", seconds)
                else:
                    await asyncio.sleep(seconds)
                    await JSONResponse(answer)(scope, receive, send)
            finally:
                self.gate.leave()
        except Problem as problem:
            await problem.response()(scope, receive, send)


async def _stream(send: Send, piece: bytes, seconds: float) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": piece, "more_body": True})
    for _ in range(_PIECES):
        await asyncio.sleep(seconds / _PIECES)
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def serve(app: VersionServer, sockets: ServerSockets, starting: StartingAnswers | None, drain: float) -> None:
    """Serve until told to stop, then hand over or end."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
    config.load()
    server = HandoverServer(config)
    arrived = await take_over(sockets, starting, stop)
    if arrived is None:
        return
    server.arrived = arrived
    serving = asyncio.ensure_future(server.serve(sockets=[sockets.listening]))
    await stop.wait()
    server.stop_accepting()
    app.gate.close()
    if sockets.successor is not None:
        connections = server.server_state.connections
        await hand_over(connections, sockets.successor, drain_seconds=drain, is_drained=lambda: app.gate.inside == 0)
    app.gate.refuse(problems.stopping())
    await app.gate.wait_until_empty(drain)
    server.should_exit = True
    await serving


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--policy-version", type=int)
    parser.add_argument("--drain-seconds", type=float, default=0.0)
    parser.add_argument("--import-seconds", type=float, default=0.0)
    parser.add_argument("--load-seconds", type=float, default=0.0)
    parser.add_argument("--answer-seconds", type=float, default=0.05)
    parser.add_argument("--model", default="m")
    given, _ = parser.parse_known_args(argv)
    try:
        sockets = open_sockets(given.host, given.port, os.environ)
    except CannotServe as error:
        sys.stderr.write(f"testing_server: error: {error}\n")
        return REFUSED
    starting = StartingAnswers(sockets.listening) if sockets.predecessor is None else None
    time.sleep(given.import_seconds)
    settings = sockets.wait_for_settings()
    if settings is None:
        return 0
    vars(given).update(settings)
    time.sleep(given.load_seconds)
    app = VersionServer(given.policy_version, answer_seconds=given.answer_seconds, model=given.model)
    asyncio.run(serve(app, sockets, starting, given.drain_seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
