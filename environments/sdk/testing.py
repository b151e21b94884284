"""`FakeInference`: an inference server without a model, for tests; it has the Atropos server's whole `/generate`
protocol.

Its answers come from a function from prompt to tokens, so tests know every token, logprob and version it gave.
"""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import msgspec

from environments.sdk.inference.http_transport import OnPiece, Response

Responder = Callable[[Sequence[int], int], list[int]]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def logprob_of(token: int, position: int) -> float:
    """Return the fake server's logprob of a token at an output position; it nearly always differs from others."""
    return -0.01 - (token * 31 + position * 7) % 97 / 100


def mask_of(token: int) -> list[int]:
    """Return the fake server's sampling mask at a token: itself and the next one; every third is not known."""
    return [] if token % 3 == 0 else [token, token + 1]


def sampled_tokens(seed: int, *, vocabulary: int, end: int, longest: int = 32) -> Responder:
    """Return a responder that draws random tokens and ends with `end`."""
    rng = random.Random(seed)

    def respond(prompt: Sequence[int], index: int) -> list[int]:  # noqa: ARG001
        return [rng.randrange(5, vocabulary) for _ in range(rng.randint(0, longest - 1))] + [end]

    return respond


@dataclass(slots=True)
class FakeInference:
    """A fake inference server as an ASGI application: `problem` makes it refuse, `version` is the policy it serves.

    `delay_seconds` delays each answer. With `ours` false it speaks the original Atropos' protocol: no boot id, no
    compact form, no versions. A stream has one event per token, `event_seconds` apart, and breaks off after
    `broken_after` events if that is set.
    """

    respond: Responder
    end: int
    version: int | None = 1
    delay_seconds: float = 0.0
    event_seconds: float = 0.0
    broken_after: int | None = None
    ours: bool = True
    problem: tuple[int, str] | None = None
    model: str = "fake"
    vocabulary: str | None = None
    """The fingerprint of its vocabulary; None: it reports none."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    changed_version_at: int | None = None
    """If set, tokens from this position on have `version`, those before it `version - 1`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path == "/bridge/info" and self.ours:
            info = {"boot_id": "fake", "policy_version": self.version, "model": self.model}
            await send_json(send, 200, {**info, "vocabulary": self.vocabulary})
        elif path == "/generate":
            await self._generate(msgspec.json.decode(await read_body(receive)), send)
        else:
            await send_json(send, 404, {"detail": f"no route {path}"})

    async def _generate(self, request: dict[str, Any], send: Send) -> None:
        if self.problem is not None:
            status, kind = self.problem
            body = {"type": f"urn:atropos:problem:{kind}", "status": status, "detail": kind}
            await send_json(send, status, body, retry_after="1")
            return
        if not self.ours and "compact" in request:
            await send_json(send, 500, {"detail": "unknown sampling parameter compact"})
            return
        self.requests.append(request)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await anyio.sleep(self.delay_seconds)
            reply = self._reply(request)
            if request.get("stream"):
                await self._stream(reply, send)
            else:
                await send_json(send, 200, reply)
        finally:
            self.in_flight -= 1

    async def _stream(self, reply: dict[str, Any], send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for number, event in enumerate(_events(reply)):
            if number == self.broken_after:
                raise ConnectionResetError("the stream was to break off here")
            await anyio.sleep(self.event_seconds)
            part = b"data: " + msgspec.json.encode(event) + b"\n\n"
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    def _reply(self, request: dict[str, Any]) -> dict[str, Any]:
        prompt = request["prompt"]["prompt_token_ids"]
        limit = request.get("max_tokens") or 1 << 30
        outputs = [self.respond(prompt, index)[:limit] for index in range(request["n"])]
        logprobs = [[logprob_of(token, i) for i, token in enumerate(tokens)] for tokens in outputs]
        reply: dict[str, Any] = {
            "finish_reasons": ["stop" if tokens[-1:] == [self.end] else "length" for tokens in outputs],
            "token_ids": outputs,
            "prompt_token_ids": prompt,
        }
        if self.ours:
            reply |= {"policy_versions": [self._spans(len(tokens)) for tokens in outputs], "boot_id": "fake"}
        if (best := request.get("prompt_logprobs")) is not None and self.ours:
            reply["prompt_logprobs"] = [None, *(_prompt_position(token, best) for token in prompt[1:])]
        if request.get("sampling_mask_limit"):
            reply["sampling_masks"] = [[mask_of(token) for token in tokens] for tokens in outputs]
        if request.get("compact"):
            return {**reply, "logprobs": logprobs}
        pairs = [
            [[{str(token): value}] for token, value in zip(tokens, values, strict=True)]
            for tokens, values in zip(outputs, logprobs, strict=True)
        ]
        return {**reply, "logprobs": pairs}

    def _spans(self, count: int) -> list[list[int | None]]:
        at = self.changed_version_at
        if at is None or self.version is None or not 0 < at < count:
            return [[0, count, self.version]] if count else []
        return [[0, at, self.version - 1], [at, count, self.version]]


@dataclass(slots=True)
class InProcess:
    """Transport that calls an ASGI application in process: it replaces an HTTP client and needs no socket."""

    app: Any

    async def request(self, method: str, url: str, body: bytes | None, *, on_piece: OnPiece | None = None) -> Response:
        address = urlsplit(url)
        headers = [(b"host", address.netloc.encode()), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": method, "path": address.path, "headers": headers, "query_string": b""}
        sent: list[MutableMapping[str, Any]] = []
        asked = False

        async def receive() -> MutableMapping[str, Any]:
            nonlocal asked
            if asked:
                await anyio.sleep_forever()  # this client never disconnects
            asked = True
            return {"type": "http.request", "body": body or b"", "more_body": False}

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)
            if on_piece is not None and sent[0]["status"] == 200 and message.get("body"):
                on_piece(message["body"])

        await self.app(scope, receive, send)
        return Response(sent[0]["status"], b"".join(message.get("body", b"") for message in sent))

    async def aclose(self) -> None:
        """Do nothing: there is nothing to close."""


@contextmanager
def served(app: Any, *, port: int = 0) -> Iterator[str]:
    """Serve an ASGI application from a thread on a loopback port, a free one by default, and yield its URL."""
    import uvicorn

    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(512)
        server = uvicorn.Server(
            uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", interface="asgi3")
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            while not server.started and thread.is_alive():
                time.sleep(0.005)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            server.force_exit = True
            thread.join(timeout=10)


def write_tokenizer(
    folder: Path,
    config: Mapping[str, str],
    template: str,
    *,
    special: Sequence[str],
    merges: Sequence[tuple[str, str]] = (),
) -> None:
    """Write a tokenizer of all bytes, of merged pairs and of special tokens, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *dict.fromkeys("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _events(reply: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the reply as stream events: one token of each output in turn; an output's last has its finish reason and
    versions.
    """
    outputs = reply["token_ids"]
    for at in range(max(map(len, outputs), default=0)):
        for index, tokens in enumerate(outputs):
            if at >= len(tokens):
                continue
            event = {"index": index, "token_ids": [tokens[at]], "logprobs": [reply["logprobs"][index][at]]}
            if "sampling_masks" in reply:
                event["sampling_masks"] = [reply["sampling_masks"][index][at]]
            if at == len(tokens) - 1:
                event["finish_reason"] = reply["finish_reasons"][index]
                event["policy_versions"] = reply["policy_versions"][index]
            yield event


def _prompt_position(token: int, best: int) -> dict[str, float]:
    """Return one position's logprobs: the prompt's own token first, then the most likely ones, which here are 0, 1, 2,
    …
    """
    return {str(token): -9.0} | {str(k): -0.1 * (k + 1) for k in range(best)}


async def read_body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def send_json(send: Send, status: int, body: Any, *, retry_after: str | None = None) -> None:
    content = msgspec.json.encode(body)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    if retry_after is not None:
        headers.append((b"retry-after", retry_after.encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
