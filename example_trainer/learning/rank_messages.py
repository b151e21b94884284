"""What the ranks of a run tell each other, as bytes: JSON with the bytes of tensors behind it, and nothing that is run.

A pickled message would let whoever reaches the port of the process group execute code in every rank.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

_KIND: Final = "$kind"
_HEAD: Final = struct.Struct("<Q")


def encode(value: Any) -> bytes:
    """`value` as bytes: None, numbers, texts, bytes, paths, CPU tensors, and lists, tuples and mappings of them."""
    tensors: list[Tensor] = []
    text = json.dumps(_pack(value, tensors)).encode()
    return b"".join([_HEAD.pack(len(text)), text, *map(_bytes_of, tensors)])


def decode(message: bytes) -> Any:
    """The value that `encode` was given; tuples, keys that are numbers, and each bit of a tensor included."""
    (length,) = _HEAD.unpack_from(message)
    start = _HEAD.size + length
    content = json.loads(message[_HEAD.size : start])
    return _unpack(content, _Blob(message, start))


def _bytes_of(tensor: Tensor) -> bytes:
    # An expanded tensor of one element counts as contiguous whatever its stride; a fresh one has the stride of its own.
    fresh = torch.empty(tensor.numel(), dtype=tensor.dtype)
    return fresh.copy_(tensor.reshape(-1)).view(torch.uint8).numpy().tobytes()


class _Blob:
    """The bytes of the tensors, taken in the order in which they were packed."""

    def __init__(self, message: bytes, start: int) -> None:
        self._message = message
        self._at = start

    def take(self, dtype: torch.dtype, shape: list[int]) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        flat = tensor.reshape(-1).view(torch.uint8)
        piece = self._message[self._at : self._at + flat.numel()]
        self._at += flat.numel()
        if piece:
            flat.copy_(torch.frombuffer(bytearray(piece), dtype=torch.uint8))
        return tensor


def _pack(value: Any, tensors: list[Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_pack(item, tensors) for item in value]
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return {_KIND: "tensor", "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if isinstance(value, Mapping):
        pairs = [[_pack(key, tensors), _pack(item, tensors)] for key, item in value.items()]
        return {_KIND: "mapping", "pairs": pairs}
    return (
        {_KIND: "tuple", "items": [_pack(item, tensors) for item in value]} if isinstance(value, tuple) else _tag(value)
    )


def _tag(value: Any) -> dict[str, str]:
    if isinstance(value, Path):
        return {_KIND: "path", "text": str(value)}
    if isinstance(value, bytes):
        return {_KIND: "bytes", "hex": value.hex()}
    raise TypeError(f"a {type(value).__name__} is no message between ranks; send its fields")


def _unpack(content: Any, blob: _Blob) -> Any:
    if isinstance(content, list):
        return [_unpack(item, blob) for item in content]
    if not isinstance(content, dict):
        return content
    kind = content[_KIND]
    if kind == "tensor":
        return blob.take(getattr(torch, content["dtype"]), content["shape"])
    if kind == "tuple":
        return tuple(_unpack(item, blob) for item in content["items"])
    if kind == "mapping":
        return {_unpack(key, blob): _unpack(item, blob) for key, item in content["pairs"]}
    return Path(content["text"]) if kind == "path" else bytes.fromhex(content["hex"])
