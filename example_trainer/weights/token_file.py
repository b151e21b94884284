"""The bridge token of a server without a manifest, in a file that only its own user can read.

So a trainer of the same user needs to be told nothing; `/bridge/info` says where the file lies.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from example_trainer.weights.manifest import ManifestUnsafe

TOKEN_NAME = "vllm_bridge_token"  # noqa: S105  a file's name


def write_token(directory: Path, token: str) -> Path:
    """Put the token into `directory`, whole or not at all, readable by this user alone."""
    directory.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=directory, prefix=f".{TOKEN_NAME}.")  # mkstemp makes it 0600
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(token)
    return Path(temporary).replace(directory / TOKEN_NAME)


def read_token(path: str) -> str | None:
    """The token, or None where there is none to be read; refuses a file that another user may have written."""
    try:
        status = Path(path).stat()
        token = Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return None
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ManifestUnsafe(f"{path} is not yours alone (mode {status.st_mode & 0o777:o}); chmod 600 it or remove it")
    return token


def remove_token(directory: Path, token: str) -> None:
    """At a server's exit: take its token away, but not that of a server started since."""
    path = directory / TOKEN_NAME
    try:
        if path.read_text(encoding="utf-8") == token:
            path.unlink()
    except OSError:
        return
