"""Whether a checkpoint is whole: the sizes and checksums of its files, noted when it was written.

The rename that gives a checkpoint its name makes it whole or absent on the disk it was written to. The
seal is for what happens to it afterwards: a copy that broke off, a disk that filled up, a changed byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3


def seal(directory: Path) -> dict[str, dict[str, Any]]:
    """`{file: {bytes, blake3}}` of all files in a directory."""
    return {
        path.name: {"bytes": path.stat().st_size, "blake3": _checksum(path)}
        for path in sorted(directory.iterdir())
        if path.is_file()
    }


def broken_seal(directory: Path, sealed: Mapping[str, Mapping[str, Any]]) -> str | None:
    """What is wrong with the files of a directory, or None; sizes are compared before anything is read."""
    for name, expected in sealed.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != expected["bytes"]:
            return f"{name} has {size} of {expected['bytes']} bytes"
    for name, expected in sealed.items():
        if _checksum(directory / name) != expected["blake3"]:
            return f"{name} has changed since it was written"
    return None


def _checksum(path: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
