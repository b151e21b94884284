"""`/lora/*`: which adapters are loaded; sending one as tensors, loading one from a directory, and unloading.

`/v1/load_lora_adapter` and `/v1/unload_lora_adapter` end here too: what they load is asked for by its own name.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import PlainTextResponse
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from example_trainer.serving.bridge_routes import LARGEST_VERSION, ProblemRoute, State, require_token
from example_trainer.serving.problems import Problem

_MEBIBYTE = 1 << 20


class LoadAdapter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, validation_alias=AliasChoices("name", "adapter_name"))
    path: str = Field(validation_alias=AliasChoices("path", "adapter_path"))
    version: int | None = Field(None, ge=0, le=LARGEST_VERSION)
    activate: bool = True


class LoadByPath(BaseModel):
    """VLLM's own form; `load_inplace` changes nothing, as a name is never used for two adapters."""

    lora_name: str = Field(min_length=1)
    lora_path: str
    load_inplace: bool = False


class UnloadByName(BaseModel):
    """VLLM's own form."""

    lora_name: str


class NamedAdapter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str


def make_lora_router() -> APIRouter:
    router = APIRouter(prefix="/lora", tags=["lora"], route_class=ProblemRoute)
    guarded = [Depends(require_token)]

    @router.get("/status")
    async def status(state: State) -> dict[str, Any]:
        return state.adapters.status()

    @router.post("/upload", dependencies=guarded)
    async def upload(
        request: Request,
        state: State,
        version: Annotated[int, Query(ge=0, le=LARGEST_VERSION)],
        name: Annotated[str | None, Query(min_length=1)] = None,
        activate: bool = True,
    ) -> dict[str, Any]:
        body = await read_limited(request, state.config.max_adapter_bytes)
        return await state.adapters.upload(name or f"policy-v{version}", body, version, activate=activate)

    @router.post("/load", dependencies=guarded)
    async def load(wanted: LoadAdapter, state: State) -> dict[str, Any]:
        return await state.adapters.load(wanted.name, wanted.path, wanted.version, activate=wanted.activate)

    @router.post("/activate", dependencies=guarded)
    async def activate(wanted: NamedAdapter, state: State) -> dict[str, Any]:
        return await state.adapters.activate(wanted.name)

    @router.post("/check", dependencies=guarded)
    async def check(wanted: NamedAdapter, state: State) -> dict[str, Any]:
        return await state.adapters.check(wanted.name)

    @router.post("/unload", dependencies=guarded)
    async def unload(wanted: NamedAdapter, state: State) -> dict[str, Any]:
        return await state.adapters.unload(wanted.name)

    @router.post("/load_lora_adapter", dependencies=guarded, include_in_schema=False)
    async def load_by_path(wanted: LoadByPath, state: State) -> PlainTextResponse:
        await state.adapters.load(wanted.lora_name, wanted.lora_path, None, activate=False)
        return PlainTextResponse(f"Success: LoRA adapter '{wanted.lora_name}' added successfully.")

    @router.post("/unload_lora_adapter", dependencies=guarded, include_in_schema=False)
    async def unload_by_name(wanted: UnloadByName, state: State) -> PlainTextResponse:
        await state.adapters.unload(wanted.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{wanted.lora_name}' removed successfully.")

    return router


async def read_limited(request: Request, limit_bytes: int) -> bytes:
    """The body; refused at its announced length already, and where it grows beyond the limit."""
    too_large = Problem(
        413, "body-too-large", f"the adapter has more than {limit_bytes // _MEBIBYTE} MiB; see --max-adapter-mib"
    )
    if int(request.headers.get("content-length") or 0) > limit_bytes:
        raise too_large
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit_bytes:
            raise too_large
    return bytes(body)
