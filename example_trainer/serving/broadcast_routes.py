"""`/bridge/broadcast/*`: weights that arrive over a process group, from a trainer that may be on another host.

A publish to several servers: each receives aside (`receive`), each is paused (`/bridge/publish/begin`), each loads
(`load`), and each goes on under the new version (`/bridge/publish/end`) or, where one could not load, goes back to the
old one (`/bridge/publish/abort`). Joining and receiving have names, so that either can be asked for again where its
answer was lost. A server that has loaded and hears no more of its trainer cannot know whether the
others have gone on, so it serves nothing until a whole publish reaches it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field

from example_trainer.serving.bridge_routes import ProblemRoute, PublishId, State, require_token
from example_trainer.serving.problems import Problem
from example_trainer.serving.state import ServerState

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.02


class Join(BaseModel):
    model_config = ConfigDict(extra="forbid")

    address: str
    port: int = Field(ge=1, le=65535)
    rank: int = Field(ge=1)
    world_size: int = Field(ge=2)
    backend: Literal["gloo", "nccl"] = "gloo"
    group_id: str = Field(min_length=1, max_length=64)


class Load(PublishId):
    version: int = Field(ge=0)


class Receive(BaseModel):
    model_config = ConfigDict(extra="forbid")

    tensors: dict[str, tuple[list[int], str]]
    transfer_id: str = Field(min_length=1, max_length=64)


def make_broadcast_router() -> APIRouter:
    router = APIRouter(prefix="/bridge/broadcast", tags=["bridge"], route_class=ProblemRoute)
    guarded = [Depends(require_token)]

    @router.post("/join", dependencies=guarded)
    async def join(wanted: Join, state: State) -> dict[str, Any]:
        place = (wanted.address, wanted.port, wanted.rank, wanted.world_size, wanted.backend)
        return await _exchange(state, "atropos_join_broadcast", wanted.group_id, *place)

    @router.post("/receive", dependencies=guarded)
    async def receive(wanted: Receive, state: State) -> dict[str, Any]:
        return await _exchange(state, "atropos_receive_broadcast", wanted.transfer_id, wanted.tensors)

    @router.post("/load", dependencies=guarded)
    async def load(wanted: Load, state: State) -> dict[str, Any]:
        state.fence.overwrite(wanted.publish_id, wanted.version, LoadedWeights(state))
        return await _call(state, "atropos_load_broadcast")

    @router.post("/leave", dependencies=guarded)
    async def leave(state: State) -> dict[str, Any]:
        return await _call(state, "atropos_leave_broadcast")

    return router


class LoadedWeights:
    """Implements `Change`: weights that the worker has loaded, with a copy of those before."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def keep(self) -> None:
        await self._settle(keep=True)

    async def take_back(self) -> bool:
        return await self._settle(keep=False)

    async def _settle(self, *, keep: bool) -> bool:
        try:
            await _call(self._state, "atropos_settle_broadcast", keep)
        except Problem as problem:
            logger.warning("%s", problem.detail)
            return False
        return True


async def _exchange(state: ServerState, method: str, *arguments: object) -> dict[str, Any]:
    """Begin something that waits for others, and come back when it has ended."""
    await _call(state, method, *arguments)
    while True:
        told = await _call(state, "atropos_broadcast_progress")
        if not told.get("running"):
            return told
        await asyncio.sleep(_POLL_SECONDS)


async def _call(state: ServerState, method: str, *arguments: object) -> dict[str, Any]:
    if state.manifest is not None or state.config.enable_lora:
        raise Problem(409, "cannot-receive", "a server that shares its weights or serves adapters takes no broadcast")
    try:
        return dict(await state.engine.call_worker(method, *arguments))
    except Exception as error:
        raise Problem(503, "broadcast-failed", f"the broadcast did not succeed here: {error}", 1) from error
