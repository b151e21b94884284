"""Starts and stops a vLLM server as a child of the trainer: its own process group, and nothing else.

The child gets a session of its own, so that it and all that it starts can be ended without asking
what they are called or which port they use; it dies with the process that started it, however that
ends; and it counts as ready when it answers and says that it serves the version it was started for.
"""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from example_trainer.running.leftovers import SharedMemoryLedger
from example_trainer.running.process_tree import end_processes, is_alive, open_process
from example_trainer.weights import with_parent
from example_trainer.weights.errors import ServerExited, ServerRefused, ServerUnavailable
from example_trainer.weights.server_client import ServerClient, ServerInfo
from example_trainer.weights.waiting import NotYet, wait_for

logger = logging.getLogger(__name__)

STOP_SECONDS = 10.0
_SHOWN_LOG_LINES = 20
_READ_LOG_BYTES = 16_000


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
    ready_timeout_seconds: float = 600.0
    extra_arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    program: Sequence[str] = (sys.executable, "-m", "example_trainer.vllm_api_server")


class VllmManager:
    """At most one vLLM server at a time, started and ended by this object."""

    def __init__(self, options: VllmOptions) -> None:
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._ledger: SharedMemoryLedger | None = None
        # The kernel's promise hangs on the thread that starts the child: this one lasts as long as the manager.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="vllm-starter")
        self.token = secrets.token_hex(16)
        self.url = f"http://{options.host}:{options.port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, model: str | Path, *, version: int) -> None:
        """Start serving `model` as this policy version; returns at once, see `wait_until_ready`."""
        if self._process is not None:
            raise RuntimeError("a server is running; stop it first")
        self._options.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._ledger = SharedMemoryLedger()
        command = self.command(model, version=version)
        self._process = self._starter.submit(self._spawn, command).result()
        logger.info("started vLLM for version %d (pid %d); its log is %s", version, self.pid, self._options.log_path)

    def wait_until_ready(self, version: int) -> ServerInfo:
        """Return once the server serves this version; raises with its last log lines if it ends before."""
        info = wait_for(
            lambda: self._poll_ready(version),
            what=f"vLLM to serve version {version}",
            timeout_seconds=self._options.ready_timeout_seconds,
        )
        self._note_shared_memory()
        return info

    def stop(self, *, grace_seconds: float = STOP_SECONDS) -> None:
        """End the server and everything it started, and remove what they left in shared memory."""
        process, self._process = self._process, None
        if process is None:
            return
        self._note_shared_memory(process.pid)

        def living() -> list[psutil.Process]:
            process.poll()  # collects the exit, so that it does not linger as a zombie
            return _session_members(process.pid)

        end_processes(living, grace_seconds=grace_seconds)
        process.wait(timeout=STOP_SECONDS)
        if self._ledger is not None:
            self._ledger.sweep()

    def close(self) -> None:
        self.stop()
        self._starter.shutdown()

    def log_tail(self) -> str:
        """The last lines the server has logged."""
        try:
            with self._options.log_path.open("rb") as log:
                log.seek(max(0, self._options.log_path.stat().st_size - _READ_LOG_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return "(no log)"
        return "\n".join(f"  {line}" for line in lines[-_SHOWN_LOG_LINES:])

    def command(self, model: str | Path, *, version: int) -> list[str]:
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
            "--policy-version": version,
        }
        given = [text for flag, value in flags.items() if value is not None for text in (flag, str(value))]
        return [*options.program, *given, "--no-share-weights", *options.extra_arguments]

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

    def _note_shared_memory(self, session: int | None = None) -> None:
        """What the server maps now, so that it can be removed should the server leave it behind."""
        if self._ledger is not None and (leader := session or self.pid) is not None:
            self._ledger.observe(_session_members(leader))

    def _poll_ready(self, version: int) -> ServerInfo:
        if not self.running:
            code = self._process.returncode if self._process is not None else None
            raise ServerExited(
                f"vLLM ended with exit code {code} before it served version {version}; "
                f"the end of {self._options.log_path}:\n{self.log_tail()}"
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
            raise NotYet(f"{self.url} serves version {info.policy_version}; does another server use this port?")
        return info


def _session_members(session: int) -> list[psutil.Process]:
    """Living processes of the session that a child leads; its number stays taken as long as one of them lives."""
    found = (open_process(pid) for pid in psutil.pids() if _session_of(pid) == session)
    return [process for process in found if process is not None and is_alive(process)]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None
