"""`/lora/*`: which adapters are loaded, and loading and unloading them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field

from example_trainer.serving.bridge_routes import ProblemRoute, State, require_token


class LoadAdapter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1)
    path: str
    version: int | None = Field(None, ge=0)
    activate: bool = True


class UnloadAdapter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str


def make_lora_router() -> APIRouter:
    router = APIRouter(prefix="/lora", tags=["lora"], route_class=ProblemRoute)

    @router.get("/status")
    async def status(state: State) -> dict[str, Any]:
        return state.adapters.status()

    @router.post("/load", dependencies=[Depends(require_token)])
    async def load(wanted: LoadAdapter, state: State) -> dict[str, Any]:
        return await state.adapters.load(wanted.name, wanted.path, wanted.version, activate=wanted.activate)

    @router.post("/unload", dependencies=[Depends(require_token)])
    async def unload(wanted: UnloadAdapter, state: State) -> dict[str, Any]:
        return await state.adapters.unload(wanted.name)

    return router
