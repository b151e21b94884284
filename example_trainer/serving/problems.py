"""Error answers to clients: problem+json with a stable type, the reason and a remedy.

The functions at the end answer mistakes of clients that vLLM would answer badly: a name or route that is not served is
answered with those that are, and a body on which vLLM's own checks raise with 400, where vLLM would answer 500.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

if TYPE_CHECKING:
    from fastapi import FastAPI

PROBLEM_PREFIX = "urn:atropos:problem:"


@dataclass(slots=True)
class Problem(Exception):
    """Raised anywhere below a route to end the request with this answer."""

    status: int
    kind: str
    detail: str
    retry_after_seconds: int | None = None
    more: dict[str, Any] = field(default_factory=dict)
    allow: str | None = None
    """The methods that the route takes, for a request with another method."""
    closes_connection: bool = False
    """Close the connection after the answer, so that the client's next request opens a new connection."""

    def response(self) -> Response:
        body = {
            "type": PROBLEM_PREFIX + self.kind,
            "title": self.kind.replace("-", " "),
            "status": self.status,
            "detail": self.detail,
            **self.more,
        }
        headers = {} if self.retry_after_seconds is None else {"Retry-After": str(self.retry_after_seconds)}
        if self.allow is not None:
            headers["Allow"] = self.allow
        if self.closes_connection:
            headers["Connection"] = "close"
        return Response(orjson.dumps(body), self.status, headers, media_type="application/problem+json")


def no_policy() -> Problem:
    detail = "no trainer has published weights to this server yet; it serves nothing until the first publish"
    return Problem(503, "no-policy", detail, retry_after_seconds=1)


def weights_torn() -> Problem:
    detail = "a change of the weights was not completed; they are served again after a trainer's next complete publish"
    return Problem(503, "weights-torn", detail, retry_after_seconds=5)


def paused() -> Problem:
    return Problem(503, "paused", "generation is paused; resume it with POST /bridge/resume", retry_after_seconds=1)


def starting() -> Problem:
    detail = "the server is still loading its model; ask again"
    return Problem(503, "starting", detail, retry_after_seconds=1, closes_connection=True)


def stopping() -> Problem:
    return Problem(503, "stopping", "the server is stopping", retry_after_seconds=1, closes_connection=True)


def no_lease(server_id: str) -> Problem:
    detail = (
        f"server {server_id} could not renew its lease at the broker, so its policy may not be the current one; it "
        "answers again once it has registered and a trainer has proven its weights"
    )
    return Problem(503, "no-lease", detail, retry_after_seconds=1)


def joining(policy: str) -> Problem:
    detail = (
        f"the server is registered for the policy {policy}, and no trainer of it has proven its weights yet; one with "
        "--registered-servers does so"
    )
    return Problem(503, "joining", detail, retry_after_seconds=1)


def draining() -> Problem:
    detail = "the server was told to drain: it ends the requests that it runs and takes no new one; ask another"
    return Problem(503, "draining", detail, retry_after_seconds=1, closes_connection=True)


def engine_dead() -> Problem:
    return Problem(
        503, "engine-dead", "vLLM's engine has failed; the server is stopping, see its log", retry_after_seconds=5
    )


def nothing_to_sample(*, limited: bool) -> Problem:
    """Return the problem for an output with a token that had no probability."""
    if limited:
        detail = "the request's own limits left no token to sample; allow more tokens, or forbid fewer"
        return Problem(422, "nothing-to-sample", detail)
    detail = "a sampled token's logprob is not finite, so the served weights contain values that are not finite"
    return Problem(500, "not-finite", detail)


@contextmanager
def engine_problems() -> Iterator[None]:
    """Convert vLLM's errors into answers for the client."""
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise engine_dead() from error
    except (VLLMClientError, UnicodeEncodeError, OverflowError) as error:
        raise Problem(422, "bad-request", " ".join(str(error).split())) from error


@cache
def list_served_names() -> None:
    """Make `/v1` list the served models in its error: vLLM's own message cuts names that look like paths."""
    from vllm.entrypoints.serve.engine.serving import BaseServing

    BaseServing._check_model = _naming(BaseServing._check_model)  # noqa: SLF001  what every route of /v1 asks first


def _naming(check: Any) -> Any:
    async def checking(serving: Any, request: Any) -> Any:
        refusal = await check(serving, request)
        if refusal is not None and refusal.error.param == "model":
            models = serving.models
            served = {path.name: None for path in models.base_model_paths}
            served |= {adapter.lora_name: None for adapter in models.lora_requests.values()}
            refusal.error.message = f"model: {request.model!r} is not served here; there are {', '.join(served)}"
        return refusal

    return checking


def answer_errors(app: FastAPI) -> None:
    """Add the server's own answers to errors beside vLLM's. Call it before the middleware is built."""
    _refuse_malformed_bodies(app)
    _tell_unknown_routes(app)
    _tell_dead_engine(app)


def _tell_unknown_routes(app: FastAPI) -> None:
    """Name in a 404 the requested route and the one that lists all others."""
    from vllm.entrypoints.serve.exception_handling.handlers.http import http_exception_handler

    async def not_found(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.detail != "Not Found":
            answer: Response = await http_exception_handler(request, error)
            return answer
        detail = f"{request.method} {request.url.path} is not served here; GET /bridge/list_endpoints lists the routes"
        return Problem(404, "not-served", detail).response()

    app.add_exception_handler(404, not_found)


def _tell_dead_engine(app: FastAPI) -> None:
    """Answer 503 where a call of the engine ended with it."""
    from vllm.v1.engine.exceptions import EngineDeadError

    async def answer(_: Request, __: Exception) -> Response:
        return engine_dead().response()

    app.add_exception_handler(EngineDeadError, answer)


_CHECKS = ".protocol"
"""Suffix of the names of vLLM's modules that define the bodies of its routes."""


def _refuse_malformed_bodies(app: FastAPI) -> None:
    """Answer 400 if the checks of a body raise an error."""
    from vllm.entrypoints.serve import create_error_response

    async def answer(_: Request, error: Exception) -> Response:
        if not _raised_by_checks(error.__traceback__):
            raise error
        answer = create_error_response(f"the body does not have the form that this route takes: {error}")
        return JSONResponse(answer.model_dump(), 400)

    for kind in (AttributeError, LookupError):
        app.add_exception_handler(kind, answer)


def _raised_by_checks(traceback: TracebackType | None) -> bool:
    while traceback is not None:
        if traceback.tb_frame.f_globals.get("__name__", "").endswith(_CHECKS):
            return True
        traceback = traceback.tb_next
    return False
