"""The files of a checkpoint that servers load: their names, sizes and checksums, by which a copy is known to be whole.

A server that finds the whole checkpoint under its path, on a disk that it shares with the trainer, reads it there; any
other downloads the files from the trainer in ranges, and continues a file that broke off where it ended. `read_header`
tells which tensors a safetensors file holds: it begins with eight bytes for the length of a JSON object that names each
tensor's dtype, shape and place.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from blake3 import blake3
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

LENGTH_BYTES = 8
LONGEST_HEADER_BYTES = 100 << 20


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
    with path.open("rb") as content:
        return hashlib.file_digest(content, blake3).hexdigest()  # type: ignore[arg-type]  # `update` returns the digest


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file: its type and shape, and the bytes from `begin` to `end` of the file."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def read(self, count: int, *, offset: int = 0) -> bytes:
        """Return the tensor's bytes from `offset` on: `count` of them, or all if there are fewer."""
        with self.path.open("rb") as file:
            file.seek(self.begin + offset)
            return file.read(min(count, self.end - self.begin - offset))


def read_header(path: Path) -> list[StoredTensor]:
    """Return the tensors of a safetensors file without their data; raise `ValueError` with the reason if it is none."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if not 2 <= length <= LONGEST_HEADER_BYTES:
            raise ValueError(f"its header would have {length} bytes")
        content = file.read(length)
    tensors = []
    try:
        for name, described in json.loads(content).items():
            if name != "__metadata__":
                begin, end = (LENGTH_BYTES + length + int(offset) for offset in described["data_offsets"])
                tensors.append(StoredTensor(name, path, described["dtype"], tuple(described["shape"]), begin, end))
    except (AttributeError, LookupError, OverflowError, TypeError) as error:
        raise ValueError(f"its header has another form ({type(error).__name__}: {error})") from error
    return tensors


def missing_bytes(path: Path, tensors: Iterable[StoredTensor]) -> tuple[int, int] | None:
    """Return the present and the full size of a file that ends before its last tensor; None if it is whole."""
    size, full = path.stat().st_size, max((tensor.end for tensor in tensors), default=0)
    return (size, full) if size < full else None
