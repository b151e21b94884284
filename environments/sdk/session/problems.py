"""What can go wrong with a request to a session, in the form of OpenAI's errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from environments.sdk.errors import (
    EnvironmentsError,
    InferenceRefused,
    InferenceUnavailable,
    RequestRefused,
    SamplingNotTrainable,
    ToolParserUnknown,
)

KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def problem_of(error: BaseException) -> tuple[int, dict[str, Any]]:
    """The status and the body that an error is answered with."""
    if isinstance(error, HTTPException):
        return error.status_code, _problem(error.status_code, str(error.detail))
    status = _status_of(error)
    message = str(error) if isinstance(error, EnvironmentsError) else f"{type(error).__name__} in the environment"
    return status, _problem(status, message, error.param if isinstance(error, RequestRefused) else None)


def problem_response(error: BaseException) -> Response:
    status, body = problem_of(error)
    return JSONResponse(body, status, headers={"WWW-Authenticate": "Bearer"} if status == 401 else None)


async def answer_problem(_: Request, error: Exception) -> Response:
    return problem_response(error)


PROBLEM_HANDLERS: Mapping[Any, Callable[[Request, Exception], Any]] = {
    HTTPException: answer_problem,
    EnvironmentsError: answer_problem,
    Exception: answer_problem,  # the framework raises it again, so that it is logged
}


def _status_of(error: BaseException) -> int:
    if isinstance(error, InferenceUnavailable):
        return 503
    return (
        400 if isinstance(error, InferenceRefused | RequestRefused | SamplingNotTrainable | ToolParserUnknown) else 500
    )


def _problem(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "code": status, "param": param}}
