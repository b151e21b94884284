"""Routes for adapters: `/lora/*` lists them, takes one as tensors or from a directory, and unloads one.

Reading is open; changing anything needs the bridge token. `/v1/load_lora_adapter` and `/v1/unload_lora_adapter` are
answered here too: an adapter loaded there is requested by its own name.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import PlainTextResponse
from pydantic import AliasChoices, BaseModel, Field
from starlette.requests import ClientDisconnect

from example_trainer.serving.bridge_routes import CHANGES_WEIGHTS, GUARDED, LARGEST_VERSION, Body, ProblemRoute
from example_trainer.serving.forwarding import AdapterForwarder
from example_trainer.serving.problems import Problem
from example_trainer.serving.state import State

_MEBIBYTE = 1 << 20
MOST_FORWARDS = 1024


class LoadAdapter(Body):
    name: str = Field(min_length=1, validation_alias=AliasChoices("name", "adapter_name"))
    path: str = Field(validation_alias=AliasChoices("path", "adapter_path"))
    version: int | None = Field(None, ge=0, le=LARGEST_VERSION)
    activate: bool = True


class LoadByPath(BaseModel):
    """The body in vLLM's own format; `load_inplace` changes nothing, as a name is never used for two adapters."""

    lora_name: str = Field(min_length=1)
    lora_path: str
    load_inplace: bool = False


class UnloadByName(BaseModel):
    """The body in vLLM's own format."""

    lora_name: str


class NamedAdapter(Body):
    name: str


def make_lora_router() -> APIRouter:
    router = APIRouter(prefix="/lora", tags=["lora"], route_class=ProblemRoute)

    @router.get("/status")
    async def status(state: State) -> dict[str, Any]:
        return state.adapters.status()

    @router.post("/upload", dependencies=CHANGES_WEIGHTS)
    async def upload(
        request: Request,
        state: State,
        version: Annotated[int, Query(ge=0, le=LARGEST_VERSION)],
        name: Annotated[str | None, Query(min_length=1)] = None,
        activate: bool = True,
        forward_to: Annotated[list[str] | None, Query(max_length=MOST_FORWARDS)] = None,
        forward_seconds: Annotated[float, Query(gt=0, le=600)] = 60.0,
    ) -> dict[str, Any]:
        """Serve an adapter, and pass it on to the servers at `forward_to`; `forwarded` has those that it reached."""
        body = await read_limited(request, state.config.max_adapter_bytes)
        state.check_awake()  # again: it may have been sent to sleep while the body arrived
        used = name or f"policy-v{version}"
        answer = await state.adapters.upload(used, body, version, activate=activate)
        if forward_to:
            forwarder = AdapterForwarder(state.bridge_token)
            answer["forwarded"] = await forwarder.forward(
                used, version, body, forward_to, limit_seconds=forward_seconds
            )
        return answer

    @router.post("/load", dependencies=CHANGES_WEIGHTS)
    async def load(body: LoadAdapter, state: State) -> dict[str, Any]:
        return await state.adapters.load(body.name, body.path, body.version, activate=body.activate)

    @router.post("/activate", dependencies=GUARDED)
    async def activate(body: NamedAdapter, state: State) -> dict[str, Any]:
        return await state.adapters.activate(body.name)

    @router.post("/check", dependencies=CHANGES_WEIGHTS)
    async def check(body: NamedAdapter, state: State) -> dict[str, Any]:
        return await state.adapters.check(body.name)

    @router.post("/unload", dependencies=GUARDED)
    async def unload(body: NamedAdapter, state: State) -> dict[str, Any]:
        return await state.adapters.unload(body.name)

    _add_vllm_routes(router)
    return router


def _add_vllm_routes(router: APIRouter) -> None:
    """Add the routes that answer for vLLM's own, in their format."""

    @router.post("/load_lora_adapter", dependencies=CHANGES_WEIGHTS, include_in_schema=False)
    async def load_by_path(body: LoadByPath, state: State) -> PlainTextResponse:
        await state.adapters.load(body.lora_name, body.lora_path, None, activate=False)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post("/unload_lora_adapter", dependencies=GUARDED, include_in_schema=False)
    async def unload_by_name(body: UnloadByName, state: State) -> PlainTextResponse:
        await state.adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def read_limited(request: Request, limit_bytes: int) -> bytes:
    """Return the body; refuse it if its announced length or the bytes received exceed the limit."""
    too_large = Problem(
        413, "body-too-large", f"the adapter has more than {limit_bytes // _MEBIBYTE} MiB; see --max-adapter-mib"
    )
    if int(request.headers.get("content-length") or 0) > limit_bytes:
        raise too_large
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > limit_bytes:
                raise too_large
    except ClientDisconnect as error:
        raise Problem(400, "disconnected", f"the adapter broke off after {len(body)} bytes") from error
    return bytes(body)
