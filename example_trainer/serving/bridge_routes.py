"""`/bridge/*`: what a trainer asks and does. Reading is open; changing anything needs the bridge token."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field

from example_trainer.options.publish import InFlight
from example_trainer.serving.guard import bearer, refuse_foreign_page
from example_trainer.serving.problems import Problem, engine_problems
from example_trainer.serving.state import ServerState

LARGEST_VERSION = 2**63 - 1


class BeginPublish(BaseModel):
    model_config = ConfigDict(extra="forbid")

    lease_seconds: float = Field(30.0, gt=0, le=600)
    drain_seconds: float = Field(0.5, ge=0, le=600)
    in_flight: InFlight = "drain"
    publish_id: str | None = Field(None, min_length=16, max_length=64)


class PublishId(BaseModel):
    model_config = ConfigDict(extra="forbid")

    publish_id: str


class EndPublish(PublishId):
    version: int = Field(ge=0, le=LARGEST_VERSION)


class Reload(BaseModel):
    model_config = ConfigDict(extra="forbid")

    path: str
    version: int = Field(ge=0, le=LARGEST_VERSION)
    drain_seconds: float = Field(0.5, ge=0, le=600)


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.atropos
    return state


State = Annotated[ServerState, Depends(state_of)]


def require_token(request: Request, state: State) -> None:
    """Refuse what comes without the token, or from another site's page."""
    headers = request.scope["headers"]
    refuse_foreign_page(headers)
    if not holds_token(request, state):
        detail = (
            "changing weights needs 'Authorization: Bearer <bridge token>': "
            "bridge_token in the manifest, or what --bridge-token was given"
        )
        raise Problem(401, "token-needed", detail)


def holds_token(request: Request, state: ServerState) -> bool:
    return secrets.compare_digest(bearer(request.scope["headers"]), state.bridge_token.encode())


class ProblemRoute(APIRoute):
    """Answers problems and bodies that do not fit by itself: the application's own handlers are vLLM's."""

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
    """All mistakes in a body, each with its field and what was sent."""
    return "; ".join(
        f"{'.'.join(map(str, mistake['loc'][1:])) or 'body'}: {mistake['msg']}, got {mistake.get('input')!r}"
        for mistake in error.errors()
    )


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
        """Whether a request for tokens would be taken now: 503 and why not before the first publish, paused or torn."""
        state.door.check()
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
    async def debug(request: Request, state: State) -> dict[str, Any]:
        """Counters for everybody; the checksum, for which all weights are read, for who holds the bridge token."""
        return await state.debug(with_checksum=holds_token(request, state))

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
    guarded = [Depends(require_token)]

    @router.post("/publish/begin", dependencies=guarded)
    async def begin(wanted: BeginPublish, state: State) -> dict[str, Any]:
        state.check_awake()
        return await state.fence.begin(**wanted.model_dump())

    @router.post("/publish/renew", dependencies=guarded)
    async def renew(publish: PublishId, state: State) -> dict[str, Any]:
        return state.fence.renew(publish.publish_id)

    @router.post("/publish/end", dependencies=guarded)
    async def end(publish: EndPublish, state: State) -> dict[str, Any]:
        return dict(await state.fence.end(publish.publish_id, publish.version))

    @router.post("/publish/abort", dependencies=guarded)
    async def abort(publish: PublishId, state: State) -> dict[str, Any]:
        return await state.fence.abort(publish.publish_id)


def _add_reload(router: APIRouter) -> None:
    @router.post("/reload", dependencies=[Depends(require_token)])
    async def reload(wanted: Reload, state: State) -> dict[str, Any]:
        return dict(await state.reload(wanted.path, wanted.version, drain_seconds=wanted.drain_seconds))


def _add_switches(router: APIRouter) -> None:
    guarded = [Depends(require_token)]

    @router.post("/pause", dependencies=guarded)
    async def pause(state: State) -> dict[str, bool]:
        await state.fence.hold()
        return {"is_paused": state.fence.paused}

    @router.post("/resume", dependencies=guarded)
    async def resume(state: State) -> dict[str, bool]:
        await state.fence.release()
        return {"is_paused": state.fence.paused}

    @router.post("/sleep", dependencies=guarded)
    async def sleep(state: State, level: int = 1) -> dict[str, bool]:
        await state.sleep(level)
        return {"is_sleeping": state.sleeping}

    @router.post("/wake_up", dependencies=guarded)
    async def wake_up(state: State) -> dict[str, bool]:
        await state.wake_up()
        return {"is_sleeping": state.sleeping}
