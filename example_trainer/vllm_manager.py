"""Starts and stops a vLLM server as a child of the trainer: its own process group, and nothing else.

The child gets a session of its own, so that it and all that it starts can be ended without asking
what they are called or which port they use; it dies with the process that started it, however that
ends; and it counts as ready when it answers and says that it serves the version it was started for.
A server that takes another's place listens on the same port beside it and answers nobody before it
is ready; the old one then takes no more connections, lets what runs end and is gone.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from example_trainer.running.leftovers import SharedMemoryLedger
from example_trainer.running.process_tree import end_processes, is_alive, open_process, wait_until
from example_trainer.running.program_log import last_lines, reason
from example_trainer.running.room import has_room, holds_gpu_memory
from example_trainer.weights import with_parent
from example_trainer.weights.errors import ServerExited, ServerRefused, ServerUnavailable
from example_trainer.weights.server_client import ServerClient, ServerInfo
from example_trainer.weights.waiting import NotYet, wait_for

logger = logging.getLogger(__name__)

STOP_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmOptions:
    """How the server is started, whatever model it serves."""

    host: str = "127.0.0.1"
    port: int = 9001
    log_path: Path
    served_model_name: str
    """The name that clients ask for, whichever checkpoint is behind it."""
    tokenizer: str
    dtype: str = "auto"
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    gpu: int | None = None
    seed: int = 0
    drain_seconds: float = 0.0
    """What running requests get to end in when the server is replaced; their clients repeat the rest."""
    ready_timeout_seconds: float = 600.0
    extra_arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    program: Sequence[str] = (sys.executable, "-m", "example_trainer.vllm_api_server")


@dataclass(frozen=True, kw_only=True, slots=True)
class Replacement:
    """How one server took another's place."""

    info: ServerInfo
    gap_seconds: float
    """For how long nothing was served."""
    beside: bool
    """Whether both ran for a while."""


class VllmManager:
    """The vLLM server of one run, started, replaced and ended by this object."""

    def __init__(self, options: VllmOptions) -> None:
        self._options = options
        self._server: _Child | None = None
        # The kernel's promise hangs on the thread that starts the child: this one lasts as long as the manager.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="vllm-starter")
        self.token = secrets.token_hex(16)
        self.url = f"http://{options.host}:{options.port}"

    @property
    def pid(self) -> int | None:
        return self._server.pid if self._server is not None else None

    @property
    def running(self) -> bool:
        return self._server is not None and self._server.running

    def start(self, model: str | Path, *, version: int | None, arguments: Sequence[str] = ()) -> None:
        """Start serving `model` as this policy version, None for one that a trainer is to send; returns at once."""
        if self._server is not None:
            raise RuntimeError("a server is running; stop it first")
        _require_free(self._options.host, self._options.port)
        self._server = self._start(model, version, arguments)

    def wait_until_ready(self, version: int | None) -> ServerInfo:
        """Return once the server serves this version; raises with its last log lines if it ends before."""
        if self._server is None:
            raise RuntimeError("no server is running; start one first")
        return self._wait_until_ready(self._server, version)

    def replace(self, model: str | Path, *, version: int, arguments: Sequence[str] = ()) -> Replacement:
        """Serve `model` in place of what is served now; returns when it does and the old server is gone.

        Where memory allows the new server starts beside the old one, on the same port, and takes over when it is
        ready; if it does not get that far, or without the memory, the old one ends first.
        """
        old = self._server
        if old is None or not old.running:
            return self._replace_after(old, model, version, arguments)
        if not has_room(old.members(), gpu=self._options.gpu, gpu_share=self._options.gpu_memory_utilization):
            return self._replace_after(old, model, version, arguments)
        new = self._start(model, version, arguments)
        try:
            info = self._wait_until_ready(new, version)
        except ServerExited as error:
            logger.warning("no second server came up beside the first, which ends now instead: %s", error)
            new.stop(grace_seconds=0)
            return self._replace_after(old, model, version, arguments)
        except BaseException:
            new.stop(grace_seconds=0)
            raise
        self._server = new
        old.stop(grace_seconds=self._options.drain_seconds + STOP_SECONDS)
        return Replacement(info=info, gap_seconds=0.0, beside=True)

    def stop(self, *, grace_seconds: float = STOP_SECONDS) -> None:
        """End the server and everything it started, and remove what they left in shared memory."""
        server, self._server = self._server, None
        if server is not None:
            server.stop(grace_seconds=grace_seconds)

    def close(self) -> None:
        self.stop()
        self._starter.shutdown()

    def log_tail(self) -> str:
        """The last lines the server has logged."""
        return "\n".join(f"  {line}" for line in last_lines(self._options.log_path)) or "(no log)"

    def command(self, model: str | Path, *, version: int | None, arguments: Sequence[str] = ()) -> list[str]:
        """The command line that serves `model` as this version."""
        options = self._options
        flags: dict[str, object] = {
            "--model": model,
            "--tokenizer": options.tokenizer,
            "--served-model-name": options.served_model_name,
            "--host": options.host,
            "--port": options.port,
            "--dtype": options.dtype,
            "--max-model-len": options.max_model_len,
            "--gpu-memory-utilization": options.gpu_memory_utilization,
            "--seed": options.seed,
            "--drain-seconds": options.drain_seconds,
            "--policy-version": version,
        }
        given = [text for flag, value in flags.items() if value is not None for text in (flag, str(value))]
        awaited = ["--await-policy"] if version is None else []
        ours = ["--no-share-weights", "--share-port", "--bridge-dir", str(options.log_path.parent), *awaited]
        return [*options.program, *given, *ours, *options.extra_arguments, *arguments]

    def _start(self, model: str | Path, version: int | None, arguments: Sequence[str]) -> _Child:
        self._options.log_path.parent.mkdir(parents=True, exist_ok=True)
        ledger = SharedMemoryLedger()
        command = self.command(model, version=version, arguments=arguments)
        process = self._starter.submit(self._spawn, command).result()
        what = "an adapter to come" if version is None else f"version {version}"
        logger.info("started vLLM for %s (pid %d); its log is %s", what, process.pid, self._options.log_path)
        return _Child(process, ledger)

    def _replace_after(
        self, old: _Child | None, model: str | Path, version: int, arguments: Sequence[str]
    ) -> Replacement:
        if old is None:
            _require_free(self._options.host, self._options.port)
        began = time.monotonic()
        self._server = None
        if old is not None:
            pids = [process.pid for process in old.members()]
            old.stop(grace_seconds=self._options.drain_seconds + STOP_SECONDS)
            wait_until(lambda: not holds_gpu_memory(pids, self._options.gpu), STOP_SECONDS)
        self._server = self._start(model, version, arguments)
        info = self._wait_until_ready(self._server, version)
        return Replacement(info=info, gap_seconds=time.monotonic() - began, beside=False)

    def _wait_until_ready(self, server: _Child, version: int | None) -> ServerInfo:
        info = wait_for(
            lambda: self._poll_ready(server, version),
            what="vLLM to start" if version is None else f"vLLM to serve version {version}",
            timeout_seconds=self._options.ready_timeout_seconds,
        )
        server.note_shared_memory()
        return info

    def _spawn(self, command: list[str]) -> subprocess.Popen[bytes]:
        guarded = [sys.executable, "-I", "-S", with_parent.__file__, str(os.getpid()), *command]
        environment = {**os.environ, "ATROPOS_BRIDGE_TOKEN": self.token, **self._options.environment}
        if self._options.gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = str(self._options.gpu)
        with self._options.log_path.open("ab") as log:
            return subprocess.Popen(
                guarded,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def _poll_ready(self, server: _Child, version: int | None) -> ServerInfo:
        if not server.running:
            raise ServerExited(
                f"vLLM ended with exit code {server.exit_code} before it served version {version}"
                f"{reason(last_lines(self._options.log_path))}; the end of {self._options.log_path}:\n{self.log_tail()}"
            )
        client = ServerClient(self.url)
        try:
            if not client.healthy():
                raise NotYet("no answer to /health")
            info = client.info()
        except (ServerUnavailable, ServerRefused) as error:
            raise NotYet(str(error)) from error
        finally:
            client.close()
        if info.policy_version != version:
            raise NotYet(f"{self.url} serves version {info.policy_version} so far")
        return info


class _Child:
    """One server process with all that it starts: the members of the session that it leads."""

    def __init__(self, process: subprocess.Popen[bytes], ledger: SharedMemoryLedger) -> None:
        self._process = process
        self._ledger = ledger

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def members(self) -> list[psutil.Process]:
        return _session_members(self.pid)

    def note_shared_memory(self) -> None:
        """What the server maps now, so that it can be removed should the server leave it behind."""
        self._ledger.observe(self.members())

    def stop(self, *, grace_seconds: float) -> None:
        self.note_shared_memory()

        def living() -> list[psutil.Process]:
            self._process.poll()  # collects the exit, so that it does not linger as a zombie
            return self.members()

        end_processes(living, grace_seconds=grace_seconds)
        try:
            self._process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            # On a machine without a moment to spare a killed process takes long to let go of its memory.
            logger.warning("vLLM (pid %d) was killed and is still on its way out", self.pid)
        self._ledger.sweep()


def _require_free(host: str, port: int) -> None:
    """A stranger's server on the port is told at once: ours would share the port, and its requests, with it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ServerUnavailable(
                f"vLLM cannot be started on {host}:{port} ({error.strerror}): choose another port with --vllm-port"
            ) from error


def _session_members(session: int) -> list[psutil.Process]:
    """Living processes of the session that a child leads; its number stays taken as long as one of them lives."""
    found = (open_process(pid) for pid in psutil.pids() if _session_of(pid) == session)
    return [process for process in found if process is not None and is_alive(process)]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None
