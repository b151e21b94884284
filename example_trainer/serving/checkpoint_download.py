"""The download of a checkpoint from a trainer, for a server that does not see its path on a shared disk."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path

import httpx

from example_trainer.serving.checkpoint_shapes import CheckpointUnreadable
from example_trainer.weight_protocol.checkpoint_files import CheckpointFile, CheckpointSource, has_file

logger = logging.getLogger(__name__)

ATTEMPTS = 5
PAUSE_SECONDS = 0.5
SILENCE_SECONDS = 20.0
"""Time without any byte after which a connection counts as broken."""

PIECE_BYTES = 1 << 20


async def download(source: CheckpointSource, directory: Path, *, transport: httpx.BaseTransport | None = None) -> None:
    """Write the files of `source` into an existing directory; raise `CheckpointUnreadable` if that fails."""
    abandoned = threading.Event()
    try:
        await asyncio.to_thread(_download, source, directory, transport, abandoned)
    except asyncio.CancelledError:
        abandoned.set()
        raise
    except OSError as error:
        raise CheckpointUnreadable(
            f"{directory} cannot hold the checkpoint: {error.strerror}; make room there, or start the server with "
            "TMPDIR on another disk"
        ) from error


def _download(
    source: CheckpointSource, directory: Path, transport: httpx.BaseTransport | None, abandoned: threading.Event
) -> None:
    headers = {"Authorization": f"Bearer {source.secret}", "Accept-Encoding": "identity"}
    with httpx.Client(transport=transport, headers=headers, timeout=SILENCE_SECONDS, trust_env=False) as client:
        for file in source.files:
            _download_file(client, f"{source.url.rstrip('/')}/{file.name}", file, directory / file.name, abandoned)


def _download_file(
    client: httpx.Client, url: str, file: CheckpointFile, path: Path, abandoned: threading.Event
) -> None:
    problem = "it broke off"
    for attempt in range(ATTEMPTS):
        try:
            _continue(client, url, file, path, abandoned)
        except httpx.HTTPError as error:
            problem = str(error) or type(error).__name__
            if isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500:
                break
        else:
            if has_file(path, file):
                return
            problem = "its checksum is another"
            path.unlink(missing_ok=True)
        logger.warning("%s: %s; attempt %d of %d", url, problem, attempt + 1, ATTEMPTS)
        if abandoned.wait(PAUSE_SECONDS):
            break
    raise CheckpointUnreadable(f"{url} cannot be downloaded: {problem}")


def _continue(client: httpx.Client, url: str, file: CheckpointFile, path: Path, abandoned: threading.Event) -> None:
    """Download the part of a file that is missing."""
    present = path.stat().st_size if path.exists() else 0
    if present >= file.size_bytes > 0:
        return
    with client.stream("GET", url, headers={"Range": f"bytes={present}-"} if present else {}) as answer:
        answer.raise_for_status()
        continues = answer.status_code == httpx.codes.PARTIAL_CONTENT
        with path.open("ab" if continues else "wb") as out:
            for piece in answer.iter_bytes(PIECE_BYTES):
                if abandoned.is_set():
                    return
                out.write(piece)
