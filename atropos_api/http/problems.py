"""Errors as answers: each becomes problem+json with a stable type, the offending value, and what to do."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final

import msgspec
from fastapi import Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match

from atropos_api.errors import BrokerError, InvalidGroup, QueueFull, StoreUnavailable
from atropos_api.http.context import AppContext

Answerer = Callable[[Request, Exception], Response]

logger = logging.getLogger(__name__)

PROBLEM_TYPE: Final = "application/problem+json"
TYPE_PREFIX: Final = "https://atropos.invalid/problems/"

STATUS_BY_KIND: Final = {
    "invalid-request": 422,
    "invalid-group": 422,
    "group-size-cannot-fill-batch": 422,
    "unknown-environment": 404,
    "unknown-run": 404,
    "unknown-hold": 404,
    "unknown-server": 404,
    "unknown-fleet": 404,
    "lease-ended": 409,
    "server-id-in-use": 409,
    "fleet-id-in-use": 409,
    "cannot-scale": 409,
    "unknown-rollout": 404,
    "no-open-run": 409,
    "run-superseded": 409,
    "run-in-progress": 409,
    "batch-out-of-order": 409,
    "item-call-is-over": 409,
    "policy-not-newer": 409,
    "no-backup": 409,
    "batch-committed": 410,
    "not-acceptable": 406,
    "unsupported-media-type": 415,
    "invalid-gzip": 400,
    "body-too-large": 413,
    "token-required": 401,
    "cross-site-request": 403,
    "queue-full": 503,
    "store-unavailable": 503,
    "batch-damaged": 503,
}

STATUS_OF_TRANSPORT: Final = {
    "malformed-request": (400, "The bytes are not an HTTP request"),
    "not-found": (404, "No route has that path"),
    "method-not-allowed": (405, "The route has other methods; `Allow` names them"),
    "request-timeout": (408, "The request was not complete in time; the connection is closed"),
    "headers-too-large": (431, "The headers are too long; the connection is closed"),
    "internal-error": (500, "An internal error of the broker; its log has the cause"),
    "too-many-connections": (503, "The broker has as many connections as it accepts"),
    "stopping": (503, "The broker is being stopped; nothing of the request was kept"),
}
"""Problems that the request guard, the connection or the framework raises, not the broker's rules."""

_INDEX: Final = re.compile(r"[0-9]{1,9}", re.ASCII)

HEADERS_BY_STATUS: Final[Mapping[int, Mapping[str, str]]] = {
    401: {"WWW-Authenticate": "Bearer"},
    503: {"Retry-After": "1"},
}


def problem_response(status: int, kind: str, detail: str, **members: Any) -> Response:
    problem = {"type": TYPE_PREFIX + kind, "title": _title(status), "status": status, "detail": detail}
    return _json(problem | members, status, PROBLEM_TYPE)


def answer_error(context: AppContext, path: str, error: BrokerError) -> Response:
    """Turn an error of the rules into an answer; its status is chosen only here."""
    if isinstance(error, StoreUnavailable):
        _note_store_failure(context, error)
    elif isinstance(error, QueueFull):
        context.broker.state.counters.pressure_total += 1
    elif isinstance(error, InvalidGroup):
        context.broker.state.counters.groups_refused_total += 1
        if not path.startswith("/v1/"):  # v1 clients report what they dropped, these included
            context.broker.state.drops.count_of(None, "refused")
    status = STATUS_BY_KIND[error.kind]
    if status == 422:
        logger.warning("refused: %s", error)
    if not path.startswith("/v1/"):
        return legacy_response(status, error)
    return problem_response(status, error.kind, str(error), **error.details)


def answer_broker_error(request: Request, error: Exception) -> Response:
    """Call `answer_error` as a handler of the framework does."""
    if not isinstance(error, BrokerError):
        raise error
    return answer_error(request.app.context, request.url.path, error)


def as_coroutine(answer: Answerer) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Wrap `answer` in a coroutine: Starlette calls plain functions in a thread, which must not touch the broker."""

    async def answer_here(request: Request, error: Exception) -> Response:
        return answer(request, error)

    return answer_here


def legacy_response(status: int, error: BrokerError) -> Response:
    """Return the answer for callers of the Atropos contract, who expect FastAPI's own form of errors."""
    if status == 400:
        return Response(str(error), status_code=status, media_type="text/plain")
    detail = [describe_invalid(error)] if status == 422 else str(error)
    return _json({"detail": detail, **error.details}, status, "application/json")


def describe_invalid(error: BrokerError) -> dict[str, Any]:
    """Return one entry of a 422 answer in FastAPI's form."""
    place = [
        int(part) if _INDEX.fullmatch(part) else part
        for part in re.split(r"[.\[\]]+", error.details.get("field", ""))
        if part not in {"", "body"}
    ]
    return {
        "type": error.kind,
        "loc": ["body", *place],
        "msg": str(error),
        "input": error.details.get("value"),
    }


def answer_unexpected(_: Request, __: Exception) -> Response:
    return fault_response()


def fault_response() -> Response:
    """Return the answer to a fault of the broker: the server logs it whole, the caller may repeat the request."""
    return problem_response(500, "internal-error", "an internal error of the broker; its log has the cause")


def answer_http_error(request: Request, error: Exception) -> Response:
    """Answer what the framework itself refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    response = problem_response(error.status_code, _title(error.status_code).lower().replace(" ", "-"), error.detail)
    response.headers.update(error.headers or {})
    if error.status_code == 405:
        # The framework names only the methods of the first route of that path.
        routes = (route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE)
        response.headers["Allow"] = ", ".join(sorted({method for route in routes for method in route.methods}))
    return response


def answer_client_gone(_: Request, __: Exception) -> Response:
    """Answer a caller that disconnected before its body was whole: no one receives the answer."""
    return Response(status_code=400)


def _note_store_failure(context: AppContext, error: StoreUnavailable) -> None:
    context.store_failure = str(error)
    context.store_failure_bytes = max(context.store_failure_bytes, error.refused_bytes)
    context.broker.state.counters.store_failures_total += 1
    logger.error("%s", error)
    if context.broker.state.store_inconsistent:
        # If the store cannot even be read, the next call tries again.
        with suppress(StoreUnavailable):
            context.broker.rebuild()


def _json(body: dict[str, Any], status: int, media_type: str) -> Response:
    headers = HEADERS_BY_STATUS.get(status)
    return Response(msgspec.json.encode(body), status_code=status, media_type=media_type, headers=headers)


def _title(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"
