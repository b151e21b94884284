"""Bodies that vLLM's own checks stumble over: mistakes of the client, which vLLM answers as errors of the server.

A number where `structured_outputs` takes an object, for one: the check of the body raises another error than checks do.
"""

from __future__ import annotations

from types import TracebackType

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

_CHECKS = ".protocol"
"""The end of the names of the modules in which vLLM describes the bodies of its routes."""


def refuse_malformed_bodies(app: FastAPI) -> None:
    """Answer with 400 what goes wrong in the checks of a body. Call it before the middleware is built."""
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
