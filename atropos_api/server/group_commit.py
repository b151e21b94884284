"""`--fsync always`: an answer is sent only after its changes are on disk, and one sync serves many answers.

`AnswerSteps` is only for tests that end the process at a failpoint of an answer; other processes do not have it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atropos_api.errors import StoreUnavailable
from atropos_api.http.auth import changes_something
from atropos_api.http.problems import answer_broker_error
from atropos_api.store.failpoints import Failpoint, Reach


class GroupCommit:
    """Group commit: one sync runs at a time, and all callers that arrive meanwhile share the next."""

    def __init__(self, sync: Callable[[], None]) -> None:
        self._sync = sync
        self._running: asyncio.Future[None] | None = None
        self._next: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Return once a sync that began after this call has ended."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._run_after(self._running))
        await asyncio.shield(self._next)

    async def _run_after(self, running: asyncio.Future[None] | None) -> None:
        if running is not None:
            await asyncio.wait((running,))
        self._running, self._next = self._next, None
        await asyncio.to_thread(self._sync)


class SyncBeforeAnswer:
    """ASGI middleware: it delays the answers to requests that may have changed something until a sync has ended."""

    def __init__(self, app: ASGIApp, sync: Callable[[], None]) -> None:
        self._app = app
        self._commit = GroupCommit(sync)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not changes_something(scope["method"], scope["path"]):
            await self._app(scope, receive, send)
            return

        failure: StoreUnavailable | None = None

        async def send_when_safe(message: Message) -> None:
            nonlocal failure
            if message["type"] == "http.response.start":
                try:
                    await self._commit.wait()
                except StoreUnavailable as error:
                    failure = error
                    raise
            await send(message)

        try:
            await self._app(scope, receive, send_when_safe)
        except Exception:
            if failure is None:
                raise
            # `send` failed before any byte was sent, so the store's error is sent and the caller can retry.
            await answer_broker_error(Request(scope), failure)(scope, receive, send)


class StepsOfAnswer(NamedTuple):
    """The failpoints of an answer: before the first byte, in the middle, after the last."""

    begun: Failpoint
    torn: Failpoint
    ended: Failpoint


DELIVERY: Final = StepsOfAnswer(Failpoint.DELIVERY_BEGUN, Failpoint.DELIVERY_TORN, Failpoint.DELIVERY_ENDED)
ANSWER: Final = StepsOfAnswer(Failpoint.ANSWER_BEGUN, Failpoint.ANSWER_TORN, Failpoint.ANSWER_ENDED)


def steps_of(method: str) -> StepsOfAnswer:
    return DELIVERY if method == "GET" else ANSWER


class AnswerSteps:
    """ASGI middleware: it reaches the three failpoints of the answer to a request that may have changed something."""

    def __init__(self, app: ASGIApp, reach: Reach) -> None:
        self._app = app
        self._reach = reach

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not changes_something(scope["method"], scope["path"]):
            await self._app(scope, receive, send)
            return
        begun, torn, ended = steps_of(scope["method"])

        async def send_in_steps(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._reach(begun)
            body = message.get("body", b"")
            if body:
                half = len(body) // 2
                await send({**message, "body": body[:half], "more_body": True})
                self._reach(torn)
                message = {**message, "body": body[half:]}
            await send(message)

        await self._app(scope, receive, send_in_steps)
        self._reach(ended)
