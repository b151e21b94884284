"""Mistakes of clients that vLLM would answer badly: unknown names and routes, and bodies that its checks fail on.

A name or route that is not served is answered with those that are. A body on which vLLM's own checks raise is answered
with 400, a mistake of the client; vLLM would answer 500.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response

from example_trainer.serving.problems import Problem

_INSTALLED = "atropos_installed"


def list_served_names() -> None:
    """Make `/v1` list the served models in its error: vLLM's own message cuts names that look like paths."""
    from vllm.entrypoints.serve.engine.serving import BaseServing

    if hasattr(BaseServing, _INSTALLED):
        return
    setattr(BaseServing, _INSTALLED, True)
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


def tell_unknown_routes(app: FastAPI) -> None:
    """Name in a 404 the requested route and the one that lists all others. Call it before the middleware is built."""
    from vllm.entrypoints.serve.exception_handling.handlers.http import http_exception_handler

    async def not_found(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.detail != "Not Found":
            answer: Response = await http_exception_handler(request, error)
            return answer
        detail = f"{request.method} {request.url.path} is not served here; GET /bridge/list_endpoints lists what is"
        return Problem(404, "not-served", detail).response()

    app.add_exception_handler(404, not_found)


_CHECKS = ".protocol"
"""Suffix of the names of vLLM's modules that define the bodies of its routes."""


def refuse_malformed_bodies(app: FastAPI) -> None:
    """Answer 400 if the checks of a body raise an error. Call it before the middleware is built."""
    from vllm.entrypoints.serve import create_error_response

    async def answer(_: Request, error: Exception) -> Response:
        if not _raised_by_checks(error.__traceback__):
            raise error
        told = create_error_response(f"the body does not have the form that this route takes: {error}")
        return JSONResponse(told.model_dump(), 400)

    for kind in (AttributeError, LookupError):
        app.add_exception_handler(kind, answer)


def _raised_by_checks(traceback: TracebackType | None) -> bool:
    while traceback is not None:
        if traceback.tb_frame.f_globals.get("__name__", "").endswith(_CHECKS):
            return True
        traceback = traceback.tb_next
    return False
