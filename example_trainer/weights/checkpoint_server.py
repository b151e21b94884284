"""The files of the newest checkpoint over HTTP, for servers that do not see the trainer's disk.

It listens at `MASTER_ADDR`, where the servers reach the trainer, and asks for a secret that only they are told.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from example_trainer.processes.ports import LOOPBACK
from example_trainer.weight_protocol.checkpoint_files import CheckpointFile, CheckpointSource

START_SECONDS = 20.0


class CheckpointServer:
    """Serves one directory at a time, from a thread."""

    def __init__(self) -> None:
        self._secret = secrets.token_urlsafe(24)
        self._directory: Path | None = None
        self._names: frozenset[str] = frozenset()
        host = os.environ.get("MASTER_ADDR", LOOPBACK)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, int(os.environ.get("MASTER_PORT", "0"))), family=family)
        shown = f"[{host}]" if ":" in host else host
        self._url = f"http://{shown}:{self._listening.getsockname()[1]}"
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
        self._thread.join(START_SECONDS)
        self._listening.close()

    async def _answer(self, request: Request) -> Response:
        given = request.headers.get("authorization", "")
        if not secrets.compare_digest(given.encode(), f"Bearer {self._secret}".encode()):
            return Response("the secret of the checkpoint is needed", 401)
        name = request.path_params["name"]
        if self._directory is None or name not in self._names:
            return Response("there is no such file", 404)
        return FileResponse(self._directory / name, media_type="application/octet-stream")
