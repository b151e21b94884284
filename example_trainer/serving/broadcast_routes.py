"""`/bridge/broadcast/*`: weights that arrive over a process group, from a trainer that may be on another host.

A publish to several servers: each receives aside (`receive`), each is paused (`/bridge/publish/begin`), each loads
(`load`), and each goes on under the new version (`/bridge/publish/end`).
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field

from example_trainer.serving.bridge_routes import ProblemRoute, PublishId, State, require_token
from example_trainer.serving.problems import Problem
from example_trainer.serving.state import ServerState


class Join(BaseModel):
    model_config = ConfigDict(extra="forbid")

    address: str
    port: int = Field(ge=1, le=65535)
    rank: int = Field(ge=1)
    world_size: int = Field(ge=2)
    backend: Literal["gloo", "nccl"] = "gloo"


class Receive(BaseModel):
    model_config = ConfigDict(extra="forbid")

    tensors: dict[str, tuple[list[int], str]]


def make_broadcast_router() -> APIRouter:
    router = APIRouter(prefix="/bridge/broadcast", tags=["bridge"], route_class=ProblemRoute)
    guarded = [Depends(require_token)]

    @router.post("/join", dependencies=guarded)
    async def join(wanted: Join, state: State) -> dict[str, Any]:
        place = (wanted.address, wanted.port, wanted.rank, wanted.world_size, wanted.backend)
        return await _call(state, "atropos_join_broadcast", *place)

    @router.post("/receive", dependencies=guarded)
    async def receive(wanted: Receive, state: State) -> dict[str, Any]:
        return await _call(state, "atropos_receive_broadcast", wanted.tensors)

    @router.post("/load", dependencies=guarded)
    async def load(publish: PublishId, state: State) -> dict[str, Any]:
        state.fence.overwrite(publish.publish_id)
        return await _call(state, "atropos_load_broadcast")

    return router


async def _call(state: ServerState, method: str, *arguments: object) -> dict[str, Any]:
    if state.manifest is not None or state.config.enable_lora:
        raise Problem(409, "cannot-receive", "a server that shares its weights or serves adapters takes no broadcast")
    try:
        return dict(await state.engine.call_worker(method, *arguments))
    except Exception as error:
        raise Problem(503, "broadcast-failed", f"the broadcast did not succeed here: {error}", 1) from error
