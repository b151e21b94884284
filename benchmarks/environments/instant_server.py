"""An inference server and a broker that answer at once, so that only the client's cost is measured.

    python benchmarks/environments/instant_server.py PORT END_TOKEN

`/generate` answers 8 samples of 64 tokens, made beforehand, in the requested form; `/plain/generate` is the route of a
server that has Atropos' form only.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
import numpy as np
import uvicorn

SAMPLES, TOKENS = 8, 64
VOCABULARY = 250
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class InstantServer:
    """A bare ASGI application whose answers are all made beforehand."""

    def __init__(self, end: int) -> None:
        rng = random.Random(0)
        tokens = [[rng.randrange(5, VOCABULARY) for _ in range(TOKENS - 1)] + [end] for _ in range(SAMPLES)]
        # A model's logprobs are float32, whatever the width they are written in.
        logprobs = [[float(np.float32(-rng.expovariate(1.5))) for _ in range(TOKENS)] for _ in range(SAMPLES)]
        reply = {"finish_reasons": ["stop"] * SAMPLES, "token_ids": tokens, "prompt_token_ids": [5]}
        pairs = [
            [[{str(token): value}] for token, value in zip(*sample, strict=True)]
            for sample in zip(tokens, logprobs, strict=True)
        ]
        versions = [[[0, TOKENS, 1]]] * SAMPLES
        self._full = json.dumps({**reply, "logprobs": pairs, "text": ["x"] * SAMPLES, "prompt": ""}).encode()
        self._compact = json.dumps({**reply, "logprobs": logprobs, "policy_versions": versions}).encode()
        self._taken = json.dumps({"status": "received"}).encode()
        self._submitted = json.dumps({"accepted": 1, "buffered": 0, "duplicates": 0, "pacing": None}).encode()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = await _read(receive)
        status, answer = self._answer(scope["path"], body)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    def _answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        match path:
            case "/generate" | "/plain/generate":
                return 200, self._compact if b'"compact"' in body else self._full
            case "/bridge/info":
                return 200, b'{"boot_id": "instant", "policy_version": 1}'
            case "/v1/groups":
                return 200, self._submitted
            case "/scored_data":
                return 200, self._taken
            case "/health":
                return 200, b"{}"
        return 404, msgspec.json.encode({"detail": path})


async def _read(receive: Any) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


if __name__ == "__main__":
    app = InstantServer(int(sys.argv[2]))
    uvicorn.run(app, port=int(sys.argv[1]), log_level="error", access_log=False, lifespan="off", interface="asgi3")
