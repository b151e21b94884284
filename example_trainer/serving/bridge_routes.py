"""Routes for a trainer: `/bridge/*`, `/bridge/broadcast/*`, and the health routes.

Reading is open; changing anything needs the bridge token. `/bridge/broadcast/*` is for weights that arrive over a
process group, from a trainer that may be on another host. In a publish to several servers each receives without loading
(`receive`), each is paused (`/bridge/publish/begin`), each loads (`load`), and each resumes under the new version
(`/bridge/publish/end`) or, if one could not load, returns to the old one (`/bridge/publish/abort`). Joining and
receiving have ids, so that either can be repeated after a lost answer. A server that has loaded and loses its trainer
cannot know whether the others have resumed, so it serves nothing until a whole publish reaches it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from example_trainer.options.publish import DRAIN_SECONDS, InFlight
from example_trainer.serving.auth import require_token
from example_trainer.serving.problems import Problem, engine_problems
from example_trainer.serving.startup import derived_values
from example_trainer.serving.state import ServerState, State
from example_trainer.weight_protocol.checkpoint_files import CheckpointSource

logger = logging.getLogger(__name__)

LARGEST_VERSION = 2**63 - 1


class Body(BaseModel):
    """The body of a request, which may have no other fields."""

    model_config = ConfigDict(extra="forbid")


class BeginPublish(Body):
    lease_seconds: float = Field(30.0, gt=0, le=600)
    drain_seconds: float = Field(DRAIN_SECONDS, ge=0, le=600)
    in_flight: InFlight = "drain"
    publish_id: str | None = Field(None, min_length=16, max_length=64)


class PublishId(Body):
    publish_id: str


class EndPublish(PublishId):
    version: int = Field(ge=0, le=LARGEST_VERSION)


class Reload(Body):
    path: str
    version: int = Field(ge=0, le=LARGEST_VERSION)
    drain_seconds: float = Field(DRAIN_SECONDS, ge=0, le=600)
    source: CheckpointSource | None = None
    """The files of the checkpoint, if the server may have to download them because it does not see the path."""


async def require_awake(state: State) -> None:
    """Refuse a call that uses weights, or has them used, while these are not in memory: it would end the engine.

    It is the last dependency and no plain function, which FastAPI would call in a thread: a server fell asleep between
    this check and the begin of a publish.
    """
    state.check_awake()


GUARDED = (Depends(require_token),)
CHANGES_WEIGHTS = (*GUARDED, Depends(require_awake))


def make_bridge_router() -> APIRouter:
    router = APIRouter(prefix="/bridge", tags=["bridge"], route_class=ProblemRoute)
    _add_reads(router)
    _add_publish(router)
    _add_reload(router)
    _add_switches(router)
    return router


def make_health_router() -> APIRouter:
    router = APIRouter(tags=["health"], route_class=ProblemRoute)

    @router.get("/readyz")
    async def readyz(state: State) -> dict[str, Any]:
        """Answer 200 if a request for tokens would be accepted now, else 503: no publish yet, paused, torn, joining."""
        state.check_ready()
        return {"status": "ready", "policy_version": state.policy_version}

    @router.get("/health_generate")
    async def health_generate(state: State) -> dict[str, Any]:
        return await state.prove_generation()

    return router


def _add_reads(router: APIRouter) -> None:
    @router.get("/info")
    async def info(state: State) -> dict[str, Any]:
        return state.info()

    @router.get("/state_dict_info")
    async def state_dict_info(state: State) -> dict[str, Any]:
        manifest = state.manifest
        if manifest is None:
            return {"tensors": {}, "parameters": {}, "tied": {}}
        return {
            "tensors": {name: {"shape": entry.shape, "dtype": entry.dtype} for name, entry in manifest.tensors.items()},
            "parameters": {
                name: {"shape": entry.shape, "dtype": entry.dtype} for name, entry in manifest.param_mappings.items()
            },
            "tied": manifest.tied,
        }

    @router.get("/debug")
    async def debug(request: Request, state: State, checksum: bool = False) -> dict[str, Any]:
        """Return counters; `?checksum=true`, with the token, adds that of the shared weights and reads them all."""
        if checksum:
            require_token(request, state)
        return await state.debug(with_checksum=checksum)

    @router.get("/is_paused")
    async def is_paused(state: State) -> dict[str, bool]:
        return {"is_paused": state.fence.paused}

    @router.get("/is_sleeping")
    async def is_sleeping(state: State) -> dict[str, bool]:
        return {"is_sleeping": state.sleeping}

    @router.get("/list_endpoints")
    async def list_endpoints(request: Request) -> dict[str, list[str]]:
        paths = {route.path for route in request.app.routes if hasattr(route, "path")}
        return {"endpoints": sorted({*paths, "/generate", "/health_generate"})}


def _add_publish(router: APIRouter) -> None:
    @router.post("/publish/begin", dependencies=CHANGES_WEIGHTS)
    async def begin(body: BeginPublish, state: State) -> dict[str, Any]:
        return await state.fence.begin(**body.model_dump())

    @router.post("/publish/renew", dependencies=GUARDED)
    async def renew(publish: PublishId, state: State) -> dict[str, Any]:
        return state.fence.renew(publish.publish_id)

    @router.post("/publish/end", dependencies=GUARDED)
    async def end(publish: EndPublish, state: State) -> dict[str, Any]:
        return dict(await state.fence.end(publish.publish_id, publish.version))

    @router.post("/publish/abort", dependencies=GUARDED)
    async def abort(publish: PublishId, state: State) -> dict[str, Any]:
        return await state.fence.abort(publish.publish_id)


def _add_reload(router: APIRouter) -> None:
    @router.post("/reload", dependencies=GUARDED)
    async def reload(body: Reload, state: State) -> dict[str, Any]:
        return dict(await state.reload(body.path, body.version, drain_seconds=body.drain_seconds, source=body.source))


def _add_switches(router: APIRouter) -> None:
    @router.post("/pause", dependencies=GUARDED)
    async def pause(state: State) -> dict[str, bool]:
        await state.fence.hold()
        return {"is_paused": state.fence.paused}

    @router.post("/resume", dependencies=CHANGES_WEIGHTS)
    async def resume(state: State) -> dict[str, bool]:
        async with state.switching:
            state.check_awake()  # again: it may have fallen asleep meanwhile
            await state.fence.release()
        return {"is_paused": state.fence.paused}

    @router.post("/sleep", dependencies=GUARDED)
    async def sleep(state: State, level: int = 1) -> dict[str, bool]:
        await state.sleep(level)
        return {"is_sleeping": state.sleeping}

    @router.post("/wake_up", dependencies=GUARDED)
    async def wake_up(state: State) -> dict[str, bool]:
        await state.wake_up()
        return {"is_sleeping": state.sleeping}


_POLL_SECONDS = 0.02


class Join(Body):
    address: str
    port: int = Field(ge=1, le=65535)
    rank: int = Field(ge=1)
    world_size: int = Field(ge=2)
    backend: Literal["gloo", "nccl"] = "gloo"
    group_id: str = Field(min_length=1, max_length=64)


class Load(PublishId):
    version: int = Field(ge=0, le=LARGEST_VERSION)
    transfer_id: str = Field(min_length=1, max_length=64)


class Receive(Body):
    buckets: list[list[tuple[str, list[int], str]]]
    transfer_id: str = Field(min_length=1, max_length=64)


def make_broadcast_router() -> APIRouter:
    router = APIRouter(prefix="/bridge/broadcast", tags=["bridge"], route_class=ProblemRoute)

    @router.post("/join", dependencies=CHANGES_WEIGHTS)
    async def join(body: Join, state: State) -> dict[str, Any]:
        workers = state.engine.workers
        if (last := body.rank + workers - 1) >= body.world_size:
            raise Problem(
                409,
                "cannot-receive",
                f"the {workers} worker processes of this server would join as ranks {body.rank} to {last} of "
                f"{body.world_size}; count those of every server (`workers` in /bridge/info)",
            )
        place = (body.address, body.port, body.rank, body.world_size, body.backend)
        joined = await _exchange(state, "atropos_join_broadcast", body.group_id, *place)
        return {"rank": body.rank, "gpus": [each["gpu"] for each in joined]}

    @router.post("/receive", dependencies=CHANGES_WEIGHTS)
    async def receive(body: Receive, state: State) -> dict[str, Any]:
        received = await _exchange(state, "atropos_receive_broadcast", body.transfer_id, body.buckets)
        if len(digests := {each["digest"] for each in received}) > 1:
            raise Problem(503, "broadcast-failed", f"the ranks of this server received different weights: {digests}", 1)
        return received[0]

    @router.post("/load", dependencies=CHANGES_WEIGHTS)
    async def load(body: Load, state: State) -> dict[str, Any]:
        state.fence.overwrite(body.publish_id, body.version, LoadedWeights(state, body.transfer_id))
        return await _call(state, "atropos_load_broadcast", body.transfer_id)

    @router.post("/leave", dependencies=GUARDED)
    async def leave(state: State) -> dict[str, Any]:
        return await _call(state, "atropos_leave_broadcast")

    return router


class LoadedWeights:
    """Implements `ReversibleUpdate`: weights that the worker has loaded, with a copy of the previous ones."""

    def __init__(self, state: ServerState, transfer_id: str) -> None:
        self._state = state
        self._transfer_id = transfer_id

    async def keep(self) -> None:
        await self._settle(keep=True)

    async def restore(self) -> bool:
        return await self._settle(keep=False)

    async def _settle(self, *, keep: bool) -> bool:
        try:
            await _call(self._state, "atropos_settle_broadcast", self._transfer_id, keep)
        except Problem as problem:
            logger.warning("%s", problem.detail)
            return False
        return True


async def _exchange(state: ServerState, method: str, *arguments: object) -> list[dict[str, Any]]:
    """Begin an exchange that waits for other processes, and return each worker's result once it has ended."""
    state.exchanges += 1
    try:
        await _call(state, method, *arguments)
        while True:
            progress = await _call_all(state, "atropos_broadcast_progress")
            if not any(each.get("running") for each in progress):
                return progress
            await asyncio.sleep(_POLL_SECONDS)
    finally:
        state.exchanges -= 1


async def _call(state: ServerState, method: str, *arguments: object) -> dict[str, Any]:
    """Call a method in every worker; return the reply of rank 0."""
    return (await _call_all(state, method, *arguments))[0]


async def _call_all(state: ServerState, method: str, *arguments: object) -> list[dict[str, Any]]:
    if state.manifest is not None or state.config.enable_lora:
        raise Problem(
            409, "cannot-receive", "a server that shares its weights or serves adapters cannot receive a broadcast"
        )
    if reason := state.engine.parts():
        raise Problem(409, "cannot-receive", f"{reason}, and a broadcast is for all; serve the model without that")
    if reason := derived_values(**state.engine.derivations()):
        raise Problem(409, "cannot-receive", f"{reason}, which a broadcast would leave as they are")
    try:
        return await state.engine.call_workers(method, *arguments)
    except Exception as error:
        raise Problem(503, "broadcast-failed", f"the broadcast failed on this server: {error}", 1) from error


class ProblemRoute(APIRoute):
    """A route that answers problems and invalid bodies itself, because the application's own handlers are vLLM's."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                with engine_problems():
                    return await handle(request)
            except Problem as problem:
                return problem.response()
            except RequestValidationError as error:
                return Problem(422, "bad-request", explain_validation(error)).response()

        return answer


def explain_validation(error: RequestValidationError) -> str:
    """Return all mistakes in a body, each with its field and the value sent."""
    return "; ".join(
        f"{'.'.join(map(str, mistake['loc'][1:])) or 'body'}: {mistake['msg']}, got {mistake.get('input')!r}"
        for mistake in error.errors()
    )
