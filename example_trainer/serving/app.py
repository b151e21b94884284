"""The running server: vLLM's application with Atropos' routes, from warm-up to an orderly stop.

vLLM builds its engine and its application; `ServerRun.serve` replaces vLLM's own function of that kind, the only place
where vLLM's start is intercepted. It answers once the previous server, if there is one, has handed over its
connections. Its stop has its own order too, because vLLM's waits for replies that a stopped engine never sends.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import signal
import socket
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from prometheus_client import REGISTRY
from starlette.types import ASGIApp

from atropos_api.client import AsyncBrokerClient
from atropos_api.common.identity import EVERYWHERE, host_in_url
from atropos_api.common.logs import LogContext
from example_trainer.errors import CannotServe
from example_trainer.processes.ports import BEGUN_ANSWERS_SECONDS, LOOPBACK, ServerSockets
from example_trainer.serving import startup
from example_trainer.serving.adapter_routes import make_lora_router
from example_trainer.serving.adapters import Adapters
from example_trainer.serving.admission import AdmissionGate
from example_trainer.serving.asgi import ServerASGI, keys_of, with_cors
from example_trainer.serving.auth import AllowedHosts, Headers, bearer
from example_trainer.serving.bridge_routes import make_bridge_router, make_broadcast_router, make_health_router
from example_trainer.serving.checkpoint_shapes import declared_shapes
from example_trainer.serving.config import RegistrationIdentity, ServerConfig
from example_trainer.serving.engine import EngineAdapter
from example_trainer.serving.fence import Fence
from example_trainer.serving.generate import GenerateHandler
from example_trainer.serving.handover import HandoverServer, hand_over, take_over
from example_trainer.serving.metrics import ServerMetrics
from example_trainer.serving.problems import Problem, answer_errors, list_served_names
from example_trainer.serving.registration import Registration
from example_trainer.serving.responses import Replies
from example_trainer.serving.startup import StartingAnswers
from example_trainer.serving.state import ServerState, head_dtype_of, warm_up
from example_trainer.serving.vllm.compat import end_engine, engine_processes
from example_trainer.serving.vllm.failure_cause import how_ended
from example_trainer.weight_protocol.base_record import read_base_record
from example_trainer.weight_protocol.manifest import (
    BridgeManifest,
    process_start_time,
    remove_token,
    write_manifest,
    write_token,
)
from example_trainer.weight_protocol.shm_header import SegmentHeader

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 2
_WATCH_SECONDS = 0.5
_DRAINING_LOOK_SECONDS = 5.0


class ServerRun:
    """Serves one application built by vLLM, from warm-up to stop."""

    def __init__(
        self,
        config: ServerConfig,
        sockets: ServerSockets,
        starting: StartingAnswers | None,
        *,
        boot_id: str,
        logs: LogContext,
        identity: RegistrationIdentity | None = None,
    ) -> None:
        """Keep the arguments; with `identity` the server registers at the broker."""
        self._config = config
        self._identity = identity
        self._logs = logs
        self._sockets = sockets
        self._starting = starting
        self._boot_id = boot_id
        self._made_at = time.monotonic()
        self._stop = asyncio.Event()
        self._token: str | None = None
        # Read before vLLM loads the files: a trainer may replace the directory later.
        self._base = read_base_record(config.model)
        self.ready = False
        self.engine_end: str | None = None
        """The cause of the engine's end, if it ended before it was stopped."""

    def tidy(self) -> None:
        """Remove the token file that was written for trainers."""
        if self._token is not None:
            remove_token(self._config.manifest_directory(os.environ), self._token, port=self._config.port)

    async def serve(self, app: FastAPI, sock: socket.socket, **options: Any) -> Awaitable[None]:
        """Replace vLLM's `serve_http`: return the awaitable that vLLM awaits once the engine is down."""
        stop = self._stop
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        state = await self._prepare(app)
        server = _make_server(self._make_asgi(app, state), options)
        app.state.server = server
        self.ready = True
        seconds = time.monotonic() - self._made_at
        logger.info("serving %s at %s, engine ready in %.1f s", self._config.model, self._url(), seconds)
        arrived = await take_over(self._sockets, self._starting, stop)
        if arrived is None:  # stopped before it could take over: it may answer no client
            end_engine(state.engine.async_llm)
            return _nothing()
        server.arrived = arrived
        serving = asyncio.ensure_future(server.serve(sockets=[sock]))
        registering = None if state.registration is None else asyncio.ensure_future(state.registration.run())
        self.engine_end = await _watch(serving, stop, state)
        if state.registration is not None and registering is not None:
            registering.cancel()
            await state.registration.drain()
        await _stop(serving, server, state, self._sockets.successor)
        if state.registration is not None:
            await state.registration.leave()
        return _nothing()

    async def _prepare(self, app: FastAPI) -> ServerState:
        engine = EngineAdapter(app.state.engine_client)
        await engine.check_engine_core()
        startup.check_replaceable(self._config, os.environ, **engine.derivations())
        token = self._config.token(os.environ) or secrets.token_urlsafe(24)
        manifest = await self._share(engine, token) if self._config.shares(os.environ) else None
        await warm_up(engine)
        gate = AdmissionGate()
        header = SegmentHeader(Path(manifest.header_path)) if manifest else None
        fence = Fence(engine, gate, header=header, awaits_adapter=self._config.awaits_policy(os.environ))
        adapters = self._make_adapters(app, engine, fence)
        await adapters.look_at_given()
        if self._config.adapter_path is not None:
            await self._serve_first(adapters, self._config.adapter_path)
        elif self._config.policy_version is not None:
            await fence.serve_fixed(self._config.policy_version)
        state = ServerState(
            config=self._config,
            boot_id=self._boot_id,
            bridge_token=token,
            hostname=socket.gethostname(),
            vllm_version=str(startup.installed_vllm()),
            engine=engine,
            fence=fence,
            gate=gate,
            adapters=adapters,
            manifest=manifest,
            base_digest=self._base.digest if self._base else None,
            head_dtype=await head_dtype_of(engine, self._config.model),
            checkpoint_shapes=declared_shapes(self._config.model, engine.async_llm.model_config.revision),
        )
        if self._identity is not None:
            state.registration = self._register(state, self._identity)
        self._write_for_trainers(state)
        app.state.atropos = state
        REGISTRY.register(ServerMetrics(state))
        self._logs.describe(lambda: {"policy_version": state.policy_version})
        app.include_router(make_bridge_router())
        app.include_router(make_lora_router())
        app.include_router(make_broadcast_router())
        app.include_router(make_health_router())
        answer_errors(app)
        app.middleware_stack = app.build_middleware_stack()  # vLLM has built it already, without these handlers
        list_served_names()
        return state

    def _write_for_trainers(self, state: ServerState) -> None:
        """Write the file by which a trainer on this host finds the weights, or the token that its calls need."""
        directory = self._config.manifest_directory(os.environ)
        if state.manifest is not None:
            startup.check_manifest(directory, self._config.port)  # again: another server may have started meanwhile
            state.manifest_path = write_manifest(state.manifest, directory)
            logger.info("weights are shared; trainers find them through %s", state.manifest_path)
        elif self._config.stores_token(os.environ):
            state.token_path = write_token(directory, state.bridge_token, port=self._config.port)
            self._token = state.bridge_token

    async def _share(self, engine: EngineAdapter, token: str) -> BridgeManifest:
        model_config = engine.async_llm.model_config
        startup.check_quantised_checkpoint(model_config.quantization)
        startup.check_shareable(model_config.hf_config.to_dict())
        shared = await engine.call_worker("atropos_share", self._boot_id, model_config.model, model_config.revision)
        if shared["unmapped"]:
            listed = "; ".join(shared["unmapped"][:3]) + (" ..." if len(shared["unmapped"]) > 3 else "")
            raise CannotServe(
                f"{self._config.model} cannot be shared, {len(shared['unmapped'])} tensors do not map exactly: "
                f"{listed}; serve it without --share-weights and train it with --weight-bridge-mode none"
            )
        return BridgeManifest(
            model=self._config.model,
            boot_id=self._boot_id,
            pid=os.getpid(),
            pid_start_time=process_start_time(os.getpid()) or 0.0,
            url=self._url(),
            bridge_token=token,
            dtype=str(model_config.dtype).removeprefix("torch."),
            vllm_version=str(startup.installed_vllm()),
            created_at=time.time(),
            **shared,
        )

    def _make_adapters(self, app: FastAPI, engine: EngineAdapter, fence: Fence) -> Adapters:
        models = app.state.openai_serving_models
        return Adapters(
            engine,
            models,
            enabled=self._config.enable_lora,
            model_names=[path.name for path in models.base_model_paths],
            boot_id=self._boot_id,
            keep=self._config.adapter_slots,
            on_active=fence.serve_adapters,
        )

    def _register(self, state: ServerState, identity: RegistrationIdentity) -> Registration:
        assert self._config.broker_url is not None
        token = state.bridge_token.encode()
        return Registration(
            AsyncBrokerClient(self._config.broker_url, token=self._config.broker_source(os.environ), retry_seconds=0.0),
            identity,
            state.load,
            is_trainer=lambda headers: secrets.compare_digest(bearer(headers), token),
            on_drain=lambda: self._end_when_drained(state.gate, state.fence),
        )

    def _end_when_drained(self, gate: AdmissionGate, fence: Fence) -> None:
        async def end() -> None:
            await until_drained(gate, fence)
            left = f", and with it {gate.inside} requests that nobody reads or resumes" if gate.inside else ""
            logger.info("drained; the server ends%s", left)
            self._stop.set()

        self._ending = asyncio.ensure_future(end())

    async def _serve_first(self, adapters: Adapters, path: str) -> None:
        version = self._config.policy_version
        name = "policy" if version is None else f"policy-v{version}"
        try:
            await adapters.load(name, path, version, activate=True)
        except Problem as problem:
            raise CannotServe(f"--adapter {path}: {problem.detail}") from problem

    def _url(self) -> str:
        """Return the address under which this machine reaches the server."""
        host = LOOPBACK if self._config.host in EVERYWHERE else host_in_url(self._config.host)
        return f"http://{host}:{self._config.port}"

    def _make_asgi(self, app: FastAPI, state: ServerState) -> ASGIApp:
        tokenizer = state.engine.async_llm.tokenizer
        replies = Replies(boot_id=self._boot_id, tokenizer=tokenizer)
        check: Callable[[Headers], None] = lambda _: None  # noqa: E731  an unregistered server refuses nothing
        if state.registration is not None:
            check = state.registration.check_unless_trainer
        generate = GenerateHandler(state.engine, state.fence, state.gate, state.adapters, replies, tokenizer, check)
        args: Namespace = app.state.args
        keys = keys_of(args, bridge_token=state.bridge_token)
        names = [state.hostname, *self._config.allowed_hosts]
        allowed_hosts = AllowedHosts(
            host=self._config.host, names=names, origins=args.allowed_origins, has_keys=bool(keys)
        )
        asgi = ServerASGI(
            app,
            generate,
            state.gate,
            root_path=args.root_path or "",
            keys=keys,
            allowed_hosts=allowed_hosts,
            check=check,
        )
        return with_cors(asgi, args)


def _make_server(asgi: ASGIApp, options: dict[str, Any]) -> HandoverServer:
    """Return a uvicorn server with vLLM's settings for it."""
    for ours in ("enable_ssl_refresh", "peer_loads"):
        options.pop(ours, None)
    limits = {name: options.pop(name, None) for name in ("h11_max_incomplete_event_size", "h11_max_header_count")}
    config = uvicorn.Config(asgi, timeout_graceful_shutdown=_GRACE_SECONDS, **options)
    for name, value in limits.items():
        if value is not None:
            setattr(config, name, value)
    config.load()
    return HandoverServer(config)


async def until_drained(gate: AdmissionGate, fence: Fence) -> None:
    """Return once no request is inside that could still end.

    No publish reaches a draining server, so requests that are paused with torn weights never end; and a client may have
    stopped reading its answer.
    """
    while gate.inside:
        await fence.wait_for_running(math.inf, quiet_seconds=BEGUN_ANSWERS_SECONDS)
        if fence.torn or not fence.publishing:
            return
        await asyncio.sleep(_DRAINING_LOOK_SECONDS)  # requests that the publish has paused go on after it


async def _watch(serving: asyncio.Future[None], stop: asyncio.Event, state: ServerState) -> str | None:
    """Return when told to stop, when the HTTP server has ended, or, with the cause, when the engine has failed."""
    failure = None
    stopping = asyncio.ensure_future(stop.wait())
    awaited: set[asyncio.Future[Any]] = {serving, stopping}
    while not (serving.done() or stopping.done()):
        await asyncio.wait(awaited, timeout=_WATCH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if state.engine.async_llm.errored:
            failure = how_ended(engine_processes(state.engine.async_llm))
            logger.error("vLLM's engine has failed (%s); the server stops", failure)
            break
    stopping.cancel()
    return failure


async def _stop(
    serving: asyncio.Future[None], server: HandoverServer, state: ServerState, successor: socket.socket | None
) -> None:
    """Hand all connections over to the next server, or end them here; then stop the engine."""
    server.stop_accepting()
    can_drain = not (state.engine.async_llm.errored or state.fence.torn)  # torn weights have paused what runs
    drain_seconds = state.config.drain_seconds if can_drain else 0.0
    state.fence.stop(refuse=False)
    handed_over = successor is not None and await hand_over(
        server.server_state.connections,
        successor,
        drain_seconds=drain_seconds,
        is_drained=lambda: state.gate.inside == 0,
    )
    state.fence.stop()
    if not handed_over:
        await state.gate.wait_until_empty(drain_seconds)
    if not state.engine.async_llm.errored:
        ended = await state.engine.abort_all()
        if ended:
            logger.info("ended %d requests in flight", ended)
        await state.gate.wait_until_empty(_GRACE_SECONDS)
    server.should_exit = True
    await asyncio.wait({serving}, timeout=_GRACE_SECONDS + 1)
    if not serving.done():
        serving.cancel()
    end_engine(state.engine.async_llm)


async def _nothing() -> None:
    """Do nothing: vLLM awaits this after its engine is down, when everything is done."""
