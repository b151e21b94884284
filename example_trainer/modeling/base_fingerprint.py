"""The fingerprint of a model's stored weights, by which a resume finds that its base is not the one of the checkpoint.

It is the digest of each tensor's name, dtype, shape and of some of its bytes: a few MB of a model of any size. It is
the same for a model that was moved or split into other files, and differs after any training.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blake3 import blake3

from atropos_api.common.files import expand_home

SAMPLED_BYTES = 4096
"""Bytes read in the middle of a tensor: some thousand weights."""
SAMPLED_TENSORS = 1024
"""Number of tensors up to which bytes of all are read, and beyond which of every second, third and so on."""

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def base_fingerprint(model_name: str) -> str | None:
    """Return the fingerprint of a directory or of a model in the local cache; None without safetensors files there."""
    digest = blake3()
    try:
        tensors = sorted(tensor for path in _files(model_name) for tensor in _tensors(path))
        for number, (description, path, begin, end) in enumerate(tensors):
            digest.update(description.encode())
            if number % (len(tensors) // SAMPLED_TENSORS + 1) == 0:
                digest.update(_sample(path, begin, end))
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None
    return digest.hexdigest() if tensors else None


def _files(model_name: str) -> list[Path]:
    """Return the safetensors files that transformers loads of a model."""
    index = _find(model_name, _INDEX)
    if index is None:
        single = _find(model_name, _SINGLE)
        return [] if single is None else [single]
    names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return [index.parent / name for name in names]


def _find(model_name: str, file: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    directory = expand_home(model_name)
    if directory.is_dir():
        return directory / file if (directory / file).is_file() else None
    try:
        found = try_to_load_from_cache(model_name, file)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _tensors(path: Path) -> Iterator[tuple[str, Path, int, int]]:
    """Yield of each tensor in a file its description, and the first and last place of its bytes there."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (8 + length + int(offset) for offset in entry["data_offsets"])
            yield json.dumps([name, entry["dtype"], entry["shape"]]), path, begin, end


def _sample(path: Path, begin: int, end: int) -> bytes:
    size = min(SAMPLED_BYTES, end - begin)
    with path.open("rb") as file:
        file.seek(begin + (end - begin - size) // 2)
        return file.read(size)
