"""The steps of an answer, for processes that a test ends at one of them; others do not have this middleware."""

from __future__ import annotations

from typing import Final, NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atropos_api.http.door import changes_something
from atropos_api.store.steps import Reach, Step


class StepsOfAnswer(NamedTuple):
    """What an answer passes: before the first byte, in the middle, after the last."""

    begun: Step
    torn: Step
    ended: Step


DELIVERY: Final = StepsOfAnswer(Step.DELIVERY_BEGUN, Step.DELIVERY_TORN, Step.DELIVERY_ENDED)
ANSWER: Final = StepsOfAnswer(Step.ANSWER_BEGUN, Step.ANSWER_TORN, Step.ANSWER_ENDED)


def steps_of(method: str) -> StepsOfAnswer:
    return DELIVERY if method == "GET" else ANSWER


class AnswerSteps:
    """Reaches a step before the first byte, in the middle, and after the last byte of what changed something."""

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
