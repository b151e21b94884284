"""What is said of a model or a route that is not served: the names of those that are."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from example_trainer.serving.problems import Problem

_INSTALLED = "atropos_installed"


def list_served_names() -> None:
    """Let `/v1` name the models that are served: vLLM's own message cuts names that look like paths."""
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
    """Name the route that was asked for, and the one that lists all others. Call it before the middleware is built."""
    from vllm.entrypoints.serve.exception_handling.handlers.http import http_exception_handler

    async def not_found(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.detail != "Not Found":
            answer: Response = await http_exception_handler(request, error)
            return answer
        detail = f"{request.method} {request.url.path} is not served here; GET /bridge/list_endpoints lists what is"
        return Problem(404, "not-served", detail).response()

    app.add_exception_handler(404, not_found)
