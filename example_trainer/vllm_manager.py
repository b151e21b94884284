"""The vLLM server of a run as a child process of the trainer: `VllmManager` starts, replaces and stops it.

Under the launcher, `launcher.programs` makes the servers' command lines, except in the modes that restart the server;
what the process itself does is in `serving.start`.

The child leads a session of its own, so that it and all processes it starts can be ended without knowing their names or
ports. The kernel kills it when the process that started it ends, for whatever reason. It counts as ready when it
answers and reports the version it was started for.

The manager owns the listening socket, which outlives each server; while no server accepts, clients wait in its queue. A
replacement first loads without answering. The old server then stops accepting, lets running requests go on for
`drain_seconds`, hands its connections with the unanswered requests to the new one, and exits; only then does the new
one answer. A standby is a replacement that was started early: it has imported everything, and waits to be told what to
load.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil

from atropos_api.common.control_groups import free_memory_bytes
from atropos_api.common.identity import host_in_url
from example_trainer.errors import CannotServe, ServerExited, ServerRefused, ServerUnavailable
from example_trainer.options.server import server_settings
from example_trainer.options.training_options import TrainingOptions
from example_trainer.options.vllm_settings import as_arguments
from example_trainer.processes.child import STOP_SECONDS, ServerProcess, spawn
from example_trainer.processes.cleanup import SharedMemoryLedger
from example_trainer.processes.gpus import gpu_names, has_room, holds_gpu_memory
from example_trainer.processes.ports import (
    BEGUN_ANSWERS_SECONDS,
    INHERITED_SOCKETS,
    HandoverChannel,
    as_inherited,
    listen,
)
from example_trainer.processes.program_log import last_lines, reason
from example_trainer.processes.tree import wait_until
from example_trainer.weight_protocol.client import NotYet, ServerClient, ServerInfo, ShouldStop, never, wait_for

logger = logging.getLogger(__name__)

T = TypeVar("T")
STANDBY_FREE_BYTES = 4 << 30
"""Memory that must be free for a standby, which holds about one GiB of imported code and has to load while the server
runs.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmOptions:
    """Options for starting the server that do not depend on the model it serves."""

    host: str = "127.0.0.1"
    port: int = 9001
    log_path: Path
    model_name: str
    """The model whose tokenizer is served, and the name that clients request, whichever checkpoint is served."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings by the names of the server's options, as `options.server` determines them."""
    gpus: str | None = None
    """Numbers of the server's GPUs, with commas; None: the first that it sees."""
    drain_seconds: float = 0.0
    """Time that running requests get when the server is replaced; the next server restarts the others."""
    ready_timeout_seconds: float = 600.0
    standby: bool = False
    """True if the process of the next server is kept ready, where memory allows."""
    program: Sequence[str] = (sys.executable, "-m", "example_trainer.vllm_api_server")

    @classmethod
    def of(cls, config: TrainingOptions) -> Self:
        """Return the options with which the trainer starts a server of its own."""
        return cls(
            host=config.vllm_host,
            port=config.vllm_port,
            log_path=(config.log_dir or config.required_run_dir / "logs") / "vllm.log",
            model_name=config.model_name,
            settings=server_settings(config),
            gpus=config.server_gpus(),
            drain_seconds=config.drain_seconds,
            ready_timeout_seconds=config.wait_timeout,
            standby=not config.mode.server_outlives_publish
            and config.standby_server
            and config.restart_method == "restart",
        )

    def with_settings(self, **settings: Any) -> Self:
        """Return the same options with some settings replaced."""
        return replace(self, settings={**self.settings, **settings})


@dataclass(frozen=True, kw_only=True, slots=True)
class Replacement:
    """The result of replacing one server by another."""

    info: ServerInfo
    gap_seconds: float
    """The time for which requests waited for the new server."""
    overlapped: bool
    """True if the new server loaded while the old one still ran."""


class VllmManager:
    """The manager of one run's vLLM server: it starts, replaces and stops the server."""

    def __init__(self, options: VllmOptions, *, should_stop: ShouldStop = never) -> None:
        """Keep the arguments; waits for a server end once `should_stop` returns True."""
        self._options = options
        self._should_stop = should_stop
        self._server: ServerProcess | None = None
        self._command: list[str] = []
        """The command line of the server, or of the newest one."""
        self._standby: ServerProcess | None = None
        self._standby_follows: HandoverChannel | None = None
        """Channel of the server whose connections the standby will take over."""
        self._listening: socket.socket | None = None
        self._waiting_connections: HandoverChannel | None = None
        """Channel with the connections of a stopped server that no other server has taken over yet."""
        # The kernel kills the child when the thread that started it ends, so this thread lasts as long as the manager.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="vllm-starter")
        self.token = secrets.token_hex(16)
        self.url = f"http://{host_in_url(options.host)}:{options.port}"

    @property
    def pid(self) -> int | None:
        return self._server.pid if self._server is not None else None

    @property
    def running(self) -> bool:
        return self._server is not None and self._server.running

    def start(self, model: str | Path, *, version: int | None) -> None:
        """Start serving `model` as this policy version and return at once; None if the trainer will send the policy."""
        if self._server is not None:
            raise RuntimeError("a server is running; stop it first")
        self._command = self.command(model, version=version)
        self._server = self._start(self._command, version)

    def wait_until_ready(self, version: int | None) -> ServerInfo:
        """Return once the server serves this version; raise with its last log lines if it exits before."""
        if self._server is None:
            raise RuntimeError("no server is running; start one first")
        return self._wait_until_ready(self._server, version)

    def replace(self, model: str | Path, *, version: int, **more: Any) -> Replacement:
        """Replace the current server by one that serves `model`; return when it serves and the old one has exited.

        If memory allows, the new server loads while the old one still runs. If it exits while loading, or memory is
        short, the old server is stopped first. Either way no client of the old server is rejected.
        """
        self._command = command = self.command(model, version=version, **more)
        settings = {"model": model, "policy_version": version, **more}
        old = self._server
        overlapped = old is not None and old.running and self._has_room(old)
        new = self._load_next_to(old, command, settings) if old is not None and overlapped else None
        began = time.monotonic()
        if old is not None:
            pids = [process.pid for process in old.members()]
            old.hand_over(grace_seconds=self._options.drain_seconds + BEGUN_ANSWERS_SECONDS + STOP_SECONDS)
            if self._waiting_connections is None:
                self._waiting_connections = old.channel
            else:  # the old server never became ready, so it has no connections to hand over
                old.channel.close()
            if new is None:
                wait_until(lambda: not holds_gpu_memory(pids), STOP_SECONDS)
        if self._waiting_connections is not None:
            self._waiting_connections.end()
        before = self._waiting_connections
        self._server = new or self._take_standby(before, settings) or self._start(command, version, before=before)
        info = self._wait_until_ready(self._server, version)
        return Replacement(info=info, gap_seconds=time.monotonic() - began, overlapped=new is not None)

    def prepare_standby(self) -> None:
        """Start a standby for the next `replace`, unless there is one, memory is short or the options say no."""
        if self._server is None or not self._options.standby or (self._standby is not None and self._standby.running):
            return
        if free_memory_bytes(psutil.virtual_memory().available) < STANDBY_FREE_BYTES:
            logger.info("no standby server is started: less than %d GiB of memory is free", STANDBY_FREE_BYTES >> 30)
            return
        self._drop_standby()
        self._standby = self._start(self._command, None, before=self._server.channel, waits=True)
        self._standby_follows = self._server.channel

    def stop(self, *, grace_seconds: float = STOP_SECONDS) -> None:
        """Stop the server and everything it started, and remove the shared memory they left."""
        self._drop_standby()
        server, self._server = self._server, None
        if server is not None:
            server.stop(grace_seconds=grace_seconds)

    def close(self) -> None:
        self.stop()
        for held in (self._listening, self._waiting_connections):
            if held is not None:
                held.close()
        self._listening = self._waiting_connections = None
        self._starter.shutdown()

    def log_tail(self) -> str:
        """Return the last lines of the server's log."""
        return "\n".join(f"  {line}" for line in last_lines(self._options.log_path)) or "(no log)"

    def command(self, model: str | Path, *, version: int | None, **more: Any) -> list[str]:
        """Return the command line that serves `model` as this version, with `more` settings of the server."""
        options = self._options
        settings = {
            "model": model,
            "tokenizer": options.model_name,
            "served_model_name": options.model_name,
            "host": options.host,
            "port": options.port,
            **options.settings,
            "drain_seconds": options.drain_seconds,
            "policy_version": version,
            "share_weights": False,
            "bridge_dir": options.log_path.parent,
            "await_policy": True if version is None else None,
            **more,
        }
        return [*options.program, *as_arguments(settings)]

    def _has_room(self, old: ServerProcess) -> bool:
        share = self._options.settings.get("gpu_memory_utilization")
        return has_room(old.members(), gpus=self._options.gpus, gpu_share=share)

    def _load_next_to(
        self, old: ServerProcess, command: list[str], settings: Mapping[str, Any]
    ) -> ServerProcess | None:
        """Start a second server, or use the standby; return it once it has loaded, or None if it exits before that."""
        version = settings["policy_version"]
        new = self._take_standby(old.channel, settings) or self._start(command, version, before=old.channel)
        try:
            self._wait_for(new, version, lambda: _poll_loaded(new))
        except ServerExited as error:
            logger.warning("the new server did not start next to the old one, which is stopped first: %s", error)
            new.stop(grace_seconds=0)
            return None
        except BaseException:
            new.stop(grace_seconds=0)
            raise
        return new

    def _take_standby(self, before: HandoverChannel | None, settings: Mapping[str, Any]) -> ServerProcess | None:
        """Return the standby, told to serve; None if there is none, or if it was started to follow another server."""
        standby = self._standby
        if standby is None or not standby.running or self._standby_follows is not before:
            self._drop_standby()
            return None
        self._standby = None
        standby.serve(settings)
        logger.info("the standby server (pid %d) loads version %s", standby.pid, settings["policy_version"])
        return standby

    def _drop_standby(self) -> None:
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.discard()

    def _start(
        self, command: list[str], version: int | None, *, before: HandoverChannel | None = None, waits: bool = False
    ) -> ServerProcess:
        self._options.log_path.parent.mkdir(parents=True, exist_ok=True)
        if self._listening is None:
            self._listening = _listen(self._options.host, self._options.port)
        ledger, channel = SharedMemoryLedger(), HandoverChannel()
        loaded, tells_loaded = socket.socketpair()
        sockets = {"listening": self._listening, "successor": channel.sender, "loaded": tells_loaded}
        if before is not None:
            sockets["predecessor"] = before.receiver
        standby, waiting = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) if waits else (None, None)
        if waiting is not None:
            sockets["standby"] = waiting
        with tells_loaded, waiting or contextlib.nullcontext():
            process = self._starter.submit(self._spawn, command, sockets).result()
        what = "a policy to come" if version is None else f"version {version}"
        logger.info("started vLLM for %s (pid %d); its log is %s", what, process.pid, self._options.log_path)
        return ServerProcess(process, ledger, channel, loaded, standby)

    def _wait_until_ready(self, server: ServerProcess, version: int | None) -> ServerInfo:
        info = self._wait_for(server, version, lambda: self._poll_ready(server, version))
        server.note_shared_memory()
        if self._waiting_connections is not None:
            self._waiting_connections.close()
            self._waiting_connections = None
        return info

    def _wait_for(self, server: ServerProcess, version: int | None, poll: Callable[[], T]) -> T:
        def poll_living() -> T:
            if not server.running:
                raise ServerExited(
                    f"vLLM ended with exit code {server.exit_code} before it served version {version}"
                    f"{reason(last_lines(self._options.log_path))}; the end of {self._options.log_path}:\n"
                    f"{self.log_tail()}",
                    exit_code=server.exit_code,
                )
            return poll()

        what = "vLLM to start" if version is None else f"vLLM to serve version {version}"
        limit_seconds = self._options.ready_timeout_seconds
        return wait_for(poll_living, what=what, timeout_seconds=limit_seconds, should_stop=self._should_stop)

    def _spawn(self, command: list[str], sockets: Mapping[str, socket.socket]) -> subprocess.Popen[bytes]:
        environment = {"ATROPOS_BRIDGE_TOKEN": self.token, INHERITED_SOCKETS: as_inherited(sockets)}
        if self._options.gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu_names(self._options.gpus, os.environ, "--vllm-gpu")
        descriptors = [each.fileno() for each in sockets.values()]
        return spawn(command, environment=environment, log_path=self._options.log_path, pass_fds=descriptors)

    def _poll_ready(self, server: ServerProcess, version: int | None) -> ServerInfo:
        _poll_loaded(server)  # no request before that: while no server accepts, it blocks until its timeout
        try:
            # With the token: a server with $VLLM_API_KEY shows its state to no other caller.
            with contextlib.closing(ServerClient(self.url, self.token)) as client:
                if not client.healthy():
                    raise NotYet("no answer to /health")
                info = client.info()
        except (ServerUnavailable, ServerRefused) as error:
            raise NotYet(str(error)) from error
        if info.policy_version != version:
            raise NotYet(f"{self.url} serves version {info.policy_version} so far")
        return info


def _poll_loaded(server: ServerProcess) -> None:
    if not server.is_loaded():
        raise NotYet("it is still loading its model")


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listen(host, port, flag="--vllm-port")
    except CannotServe as error:
        raise ServerUnavailable(f"vLLM cannot be started: {error}") from error
