"""The files of a checkpoint that servers load: their names, sizes and checksums, by which a copy is known to be whole.

A server that finds the whole checkpoint under its path, on a disk that it shares with the trainer, reads it there; any
other downloads the files from the trainer in ranges, and continues a file that broke off where it ended.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from blake3 import blake3
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

READ_BYTES = 1 << 22


def _is_plain(name: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", name) is None:
        raise ValueError("a file's name has letters, digits and . _ - only")
    return name


class CheckpointFile(BaseModel):
    """One file of a checkpoint."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, AfterValidator(_is_plain)]
    size_bytes: int = Field(ge=0)
    digest: str = Field(min_length=64, max_length=64)
    """BLAKE3 of its content, as hexadecimal digits."""


class CheckpointSource(BaseModel):
    """A checkpoint that a trainer offers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    files: list[CheckpointFile] = Field(min_length=1, max_length=4096)
    url: str = Field(pattern=r"^https?://")
    """Address below which each file has its name."""
    secret: str = Field(min_length=8, max_length=200, repr=False)
    """Token for that address."""


def describe(directory: Path) -> list[CheckpointFile]:
    """Return the files of a complete checkpoint."""
    return [
        CheckpointFile(name=path.name, size_bytes=path.stat().st_size, digest=digest_of(path))
        for path in sorted(directory.iterdir())
        if path.is_file()
    ]


def is_whole(directory: Path, files: Iterable[CheckpointFile]) -> bool:
    """Return True if the directory has all these files with exactly this content."""
    return all(has_file(directory / file.name, file) for file in files)


def has_file(path: Path, file: CheckpointFile) -> bool:
    try:
        return path.stat().st_size == file.size_bytes and digest_of(path) == file.digest
    except OSError:
        return False


def digest_of(path: Path) -> str:
    total = blake3()
    with path.open("rb") as content:
        while piece := content.read(READ_BYTES):
            total.update(piece)
    return total.hexdigest()
