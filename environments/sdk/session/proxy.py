"""Managed sessions over HTTP, for agents that speak OpenAI's API: programs of their own, in any language.

    async with self.server.managed_server(use_proxy=True) as session:
        await run_agent(base_url=session.get_url())      # http://127.0.0.1:PORT/ID/v1
        return scored_group(session.nodes, scores), []

The address is a loopback one and its id cannot be guessed. Requests run as if the rollout had made them itself. The
routes are those of Atropos' session proxy: sessions may be opened and closed from outside as well.
"""

from __future__ import annotations

import asyncio
import contextvars
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from environments.sdk.errors import EnvironmentsError, InferenceRefused, InferenceUnavailable, SamplingNotTrainable
from environments.sdk.session.history import plain_messages
from environments.sdk.session.session import ManagedSession

if TYPE_CHECKING:
    import uvicorn

    from environments.sdk.inference.manager import ServerManager

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

SENT_AS_GIVEN = ("full_text", "tokens", "masked_tokens", "logprobs", "policy_versions")


@dataclass(slots=True)
class Served:
    """A session and the context of the rollout that it belongs to."""

    session: ManagedSession
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    created_at: float = field(default_factory=time.time)
    requests: set[asyncio.Task[Any]] = field(default_factory=set)

    async def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        task = asyncio.get_running_loop().create_task(call, context=self.context)
        self.requests.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            asking = asyncio.current_task()
            if asking is not None and asking.cancelling():
                raise
            raise InferenceUnavailable("the session was closed meanwhile") from None
        finally:
            self.requests.discard(task)


class SessionProxy:
    """An ASGI application over the sessions of one manager; `start` serves it on a free loopback port."""

    def __init__(self, manager: ServerManager) -> None:
        self._manager = manager
        self._served: dict[str, Served] = {}
        self._server: uvicorn.Server | None = None
        self._running: asyncio.Task[None] | None = None
        self.root_url = ""

    async def start(self) -> None:
        import uvicorn

        listening = asyncio.Event()

        class QuietServer(uvicorn.Server):
            """Leaves signals to the environment, and tells when it listens."""

            @contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets=sockets)
                listening.set()

        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(self, log_config=None, access_log=False, lifespan="off", interface="asgi3")
        self._server = QuietServer(config)
        self._running = asyncio.create_task(self._server.serve(sockets=[listener]), context=contextvars.Context())
        self.root_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        await listening.wait()

    async def aclose(self) -> None:
        if self._server is not None and self._running is not None:
            self._server.should_exit = self._server.force_exit = True
            await self._running
            self._running = None

    @contextmanager
    def serve(self, session: ManagedSession) -> Iterator[None]:
        """Answer requests for this session meanwhile; one that is under way at the end is given up."""
        name = self._add(session)
        try:
            yield
        finally:
            self._remove(name)

    def _add(self, session: ManagedSession) -> str:
        name = uuid.uuid4().hex
        self._served[name] = Served(session)
        session.url = f"{self.root_url}/{name}/v1"
        return name

    def _remove(self, name: str) -> None:
        served = self._served.pop(name, None)
        if served is not None:
            served.session.url = None
            for request in served.requests:
                request.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        parts = [part for part in scope["path"].split("/") if part]
        try:
            body = msgspec.json.decode(await _read(receive) or b"{}", type=dict[str, Any])
            status, answer = await self._answer(scope["method"], parts, body)
        except msgspec.MsgspecError as error:
            status, answer = 400, _problem(400, f"the request is no JSON object: {error}")
        except EnvironmentsError as error:
            status = _status_of(error)
            answer = _problem(status, str(error))
        if body_wants_stream(status, answer):
            await _send_stream(send, answer)
        else:
            await _send_json(send, status, answer)

    async def _answer(self, method: str, parts: list[str], body: dict[str, Any]) -> tuple[int, Any]:
        match method, parts:
            case "GET", ["health"]:
                return 200, {"status": "ok", "sessions": len(self._served)}
            case "GET", ["sessions"]:
                return 200, {"sessions": [self._described(name) for name in self._served]}
            case "POST", ["sessions", "create"]:
                wanted = {key: body[key] for key in ("tool_parser",) if body.get(key)}
                return 200, self._described(self._add(self._manager.open_session(**wanted)))
            case "GET", ["v1", "models"] | [_, "v1", "models"]:
                model = {"id": self._manager.config.model_name, "object": "model", "owned_by": "environment"}
                return 200, {"object": "list", "data": [model]}
            case _, [name, *rest] if name in self._served:
                return await self._answer_session(method, rest, name, body)
        return 404, _problem(404, f"{method} /{'/'.join(parts)}: no such session or route")

    async def _answer_session(self, method: str, rest: list[str], name: str, body: dict[str, Any]) -> tuple[int, Any]:
        served = self._served[name]
        match method, rest:
            case "POST", ["v1", "chat", "completions"]:
                return 200, await self._complete(served, served.session.chat_completion, "messages", body)
            case "POST", ["v1", "completions"]:
                return 200, await self._complete(served, served.session.completion, "prompt", body)
            case "GET", ["nodes"]:
                nodes = [
                    {**{key: getattr(node, key) for key in SENT_AS_GIVEN}, "finish_reason": node.finish_reason}
                    for node in served.session.nodes
                ]
                return 200, {"nodes": nodes}
            case "DELETE", []:
                self._remove(name)
                return 200, {"status": "deleted", "uuid": name}
        return 404, _problem(
            404, f"{method} /{'/'.join(rest)}: a session has v1/chat/completions, v1/completions, nodes"
        )

    async def _complete(self, served: Served, call: Any, required: str, body: dict[str, Any]) -> dict[str, Any]:
        given = body.get(required)
        if not isinstance(given, list if required == "messages" else str):
            raise InferenceRefused(f"{required} is missing or not what it should be: {given!r:.200}")
        if required == "messages":
            body["messages"] = plain_messages(given)
        streamed = bool(body.pop("stream", False))
        answer = await served.run(call(**body))
        document: dict[str, Any] = answer.model_dump()
        return {**document, "stream": True} if streamed else document

    def _described(self, name: str) -> dict[str, Any]:
        served, config = self._served[name], self._manager.config
        return {
            "uuid": name,
            "model_name": config.model_name,
            "base_url": config.base_url,
            "url": served.session.url,
            "nodes": len(served.session.nodes),
            "created_at": served.created_at,
        }


def body_wants_stream(status: int, answer: Any) -> bool:
    return status == 200 and isinstance(answer, dict) and answer.pop("stream", False)


def _status_of(error: EnvironmentsError) -> int:
    if isinstance(error, InferenceUnavailable):
        return 503
    return 400 if isinstance(error, InferenceRefused | SamplingNotTrainable) else 500


def _problem(status: int, message: str) -> dict[str, Any]:
    """An error in OpenAI's form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "code": status, "param": None}}


async def _read(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _send_json(send: Send, status: int, answer: Any) -> None:
    content = msgspec.json.encode(answer)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


async def _send_stream(send: Send, answer: dict[str, Any]) -> None:
    """The whole answer as one event: agents that insist on a stream get one, of a single piece."""
    choices = []
    for choice in answer["choices"]:
        message = dict(choice.pop("message", {}))
        calls = message.get("tool_calls") or []
        message["tool_calls"] = [{"index": at, **call} for at, call in enumerate(calls)] or None
        choices.append({**choice, "delta": message} if message.get("role") else choice)
    kind = "chat.completion.chunk" if answer["object"] == "chat.completion" else answer["object"]
    event = msgspec.json.encode({**answer, "object": kind, "choices": choices})
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"data: " + event + b"\n\ndata: [DONE]\n\n"})
