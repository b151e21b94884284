"""The fingerprint of a model's stored weights, by which a resume finds that its base is not the one of the checkpoint.

It is the digest of each tensor's name, dtype, shape and of some of its bytes: a few MB of a model of any size. It is
the same for a model that was moved or split into other files, and differs after any training.
"""

from __future__ import annotations

import json
from pathlib import Path

from blake3 import blake3

from example_trainer.memory.shapes import find_file
from example_trainer.weight_protocol.checkpoint_files import StoredTensor, read_header

SAMPLED_BYTES = 4096
"""Bytes read in the middle of a tensor: some thousand weights."""
SAMPLED_TENSORS = 1024
"""Number of tensors up to which bytes of all are read, and beyond which of every second, third and so on."""

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def base_fingerprint(model_name: str) -> str | None:
    """Return the fingerprint of a directory or of a model in the local cache; None without safetensors files there."""
    digest = blake3()
    try:
        found = (tensor for path in _files(model_name) for tensor in read_header(path))
        tensors = sorted(found, key=lambda tensor: (_describe(tensor), tensor.path, tensor.begin))
        for number, tensor in enumerate(tensors):
            digest.update(_describe(tensor).encode())
            if number % (len(tensors) // SAMPLED_TENSORS + 1) == 0:
                not_read = max(0, tensor.end - tensor.begin - SAMPLED_BYTES)
                digest.update(tensor.read(SAMPLED_BYTES, offset=not_read // 2))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return digest.hexdigest() if tensors else None


def _describe(tensor: StoredTensor) -> str:
    return json.dumps([tensor.name, tensor.dtype, tensor.shape])


def _files(model_name: str) -> list[Path]:
    """Return the safetensors files that transformers loads of a model."""
    index, single = find_file(model_name, _INDEX), find_file(model_name, _SINGLE)
    if index is None or not index.is_file():
        return [] if single is None else [single]
    names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return [index.parent / name for name in names]
