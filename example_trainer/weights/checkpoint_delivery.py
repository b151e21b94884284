"""The delivery of whole checkpoints: each server reads one into its weights, from a shared disk or by a download.

A version is written once, and stays on the disk until the next one is there, for servers that join meanwhile. Servers
read it independently of each other, each under its own fence.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from atropos_api.common.identity import host_in_url
from example_trainer.errors import PublishFailed, ServerUnavailable, TrainerError
from example_trainer.modeling.loading import policy_options
from example_trainer.options.training_options import TrainingOptions
from example_trainer.processes.ports import LOOPBACK
from example_trainer.weight_protocol.checkpoint_files import CheckpointFile, CheckpointSource, describe
from example_trainer.weight_protocol.client import ServerInfo
from example_trainer.weights.base import PublishReport
from example_trainer.weights.broadcast_exchange import SLOWEST_BYTES_PER_SECOND, trainer_address
from example_trainer.weights.delivery import Delivered, Proof, WeightDelivery, refuse_other_weights, serves
from example_trainer.weights.members import Member, MemberCalls, look
from example_trainer.weights.served_model import whole_policy, write_served_checkpoint

if TYPE_CHECKING:
    from example_trainer.modeling.policy import Policy

LEAST_LIMIT_SECONDS = 60.0
STOP_SECONDS = 20.0


class CheckpointDelivery(WeightDelivery):
    """Implements `WeightDelivery` by checkpoints that running servers read."""

    def __init__(self, config: TrainingOptions, calls: MemberCalls) -> None:
        self._options = policy_options(config)
        self._weights_dir = config.required_run_dir / "served"
        self._calls = calls
        self._drain_seconds = config.drain_seconds
        self._world_size = config.world_size
        self._policy: Policy | None = None
        self._server: CheckpointServer | None = None
        self._offered: tuple[int, CheckpointSource] | None = None
        """The version that is on the disk, and its files."""

    def attach(self, policy: Policy) -> None:
        self._policy = policy

    def examine(self, info: ServerInfo, url: str) -> None:
        refuse_other_weights(info, url, "load a checkpoint")

    def deliver(self, members: Sequence[Member], version: int, *, limit_seconds: float) -> Delivered:
        source = self._offer(version)
        size_bytes = sum(file.size_bytes for file in source.files)
        limit_seconds = max(limit_seconds, LEAST_LIMIT_SECONDS, size_bytes / SLOWEST_BYTES_PER_SECOND)
        delivered = Delivered([member for member in members if serves(member.info, version)])

        def load(member: Member) -> float:
            member.client.patience_seconds = limit_seconds + self._drain_seconds
            try:
                answer = member.client.reload(
                    self._directory(version), version, drain_seconds=self._drain_seconds, source=source
                )
            except ServerUnavailable:
                if not serves(look(member), version):
                    raise
                return 0.0  # the answer was lost
            return float(answer["fence_seconds"])

        outdated = [member for member in members if member not in delivered.served]
        for member, answer in self._calls.each(outdated, load).items():
            if isinstance(answer, TrainerError):
                delivered.lost[member] = answer
            else:
                delivered.served.append(member)
                delivered.cost.fence_seconds = max(delivered.cost.fence_seconds, answer)
        return delivered

    def check(self, member: Member, version: int) -> None:
        """Do nothing: a downloaded file has its checksum, and the logprobs are compared."""

    def proof(self) -> Proof:
        assert self._policy is not None
        assert self._offered is not None
        return Proof(whole_policy(self._policy, self._options, self._directory(self._offered[0])))

    def note(self, report: PublishReport) -> None:
        """Do nothing: publishes are spaced by `--vllm-restart-interval`."""

    def close(self, members: Sequence[Member]) -> None:  # noqa: ARG002 - servers keep nothing of a publish
        if self._server is not None:
            self._server.close()
            self._server = None

    def _offer(self, version: int) -> CheckpointSource:
        """Have the weights on the disk under this version; return their files."""
        if self._offered is None or self._offered[0] != version:
            assert self._policy is not None
            directory = write_served_checkpoint(self._policy, self._directory(version))
            if self._server is None:
                self._server = CheckpointServer(*trainer_address(self._world_size, os.environ))
            self._offered = version, self._server.offer(directory, describe(directory))
            self._remove_all_but(directory)
        return self._offered[1]

    def _directory(self, version: int) -> Path:
        return self._weights_dir / f"policy-v{version}"

    def _remove_all_but(self, kept: Path) -> None:
        for path in (*self._weights_dir.glob("policy-v*"), *self._weights_dir.glob(".policy-v*.part")):
            if path != kept:
                shutil.rmtree(path, ignore_errors=True)


class CheckpointServer:
    """Serves one directory at a time, from a thread, for servers that do not see the trainer's disk.

    It asks for a secret that only they get.
    """

    def __init__(self, host: str = LOOPBACK, port: int | None = None) -> None:
        """Listen there; without `port` on any that is free. Raises `PublishFailed` if that is not possible."""
        self._secret = secrets.token_urlsafe(24)
        self._directory: Path | None = None
        self._names: frozenset[str] = frozenset()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listening = socket.create_server((host, port or 0), family=family)
        except OSError as error:
            raise PublishFailed(
                f"checkpoints cannot be offered at {host}:{port or 'any port'}: {error.strerror}; set MASTER_ADDR to "
                "an address of this host that the servers reach, and MASTER_PORT to a free port"
            ) from error
        self._url = f"http://{host_in_url(host)}:{self._listening.getsockname()[1]}"
        app = Starlette(routes=[Route("/{name}", self._answer)])
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._listening]}, name="checkpoints", daemon=True
        )
        self._thread.start()

    def offer(self, directory: Path, files: list[CheckpointFile]) -> CheckpointSource:
        """Serve these files of a directory from here on, and no others."""
        self._directory, self._names = directory, frozenset(file.name for file in files)
        return CheckpointSource(files=files, url=self._url, secret=self._secret)

    def close(self) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(STOP_SECONDS)
        self._listening.close()

    async def _answer(self, request: Request) -> Response:
        given = request.headers.get("authorization", "")
        if not secrets.compare_digest(given.encode(), f"Bearer {self._secret}".encode()):
            return Response("the secret of the checkpoint is needed", 401)
        name = request.path_params["name"]
        if self._directory is None or name not in self._names:
            return Response("there is no such file", 404)
        return FileResponse(self._directory / name, media_type="application/octet-stream")
