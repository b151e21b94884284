"""The format in which an adapter is sent from trainer to server: one safetensors body with its PEFT configuration.

The configuration is in the safetensors metadata. The body is what `adapter_model.safetensors` would hold, so a body
that is written to a file next to its configuration is an adapter that PEFT and a stock vLLM can load. Reading the
header needs no torch; the receiver checks the header before it passes a body on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MEMORY_PATH = "memory:"
"""Prefix of the path of an adapter that is kept in memory and not in a file."""

_CONFIG = "adapter_config"

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class AdapterPayload:
    """A safetensors body together with its parsed header."""

    body: bytes
    config: dict[str, Any]
    """The content of `adapter_config.json`."""
    layout: dict[str, Any]
    """The header's entry for each tensor: dtype, shape and data offsets."""
    data_start: int

    @classmethod
    def write(cls, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> AdapterPayload:
        """Build a payload from tensors under their PEFT names; they may be on any device."""
        from safetensors.torch import save

        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        body = save(plain, metadata={_CONFIG: json.dumps(config, default=_plain), "format": "pt"})
        return cls.read(body)

    @classmethod
    def read(cls, body: bytes) -> AdapterPayload:
        """Parse a body; raise `ValueError` with the reason if it is not an adapter in this format."""
        length = int.from_bytes(body[:_LENGTH_BYTES], "little")
        if len(body) < _LENGTH_BYTES or length > len(body) - _LENGTH_BYTES:
            raise ValueError("the body is no safetensors file: its header is longer than the body")
        try:
            header = json.loads(body[_LENGTH_BYTES : _LENGTH_BYTES + length])
            config = dict(json.loads(header["__metadata__"][_CONFIG]))
        except (ValueError, KeyError, TypeError) as error:
            reason = f"its metadata lack {_CONFIG}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"the body is no adapter in safetensors form: {reason}") from error
        layout = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return cls(body, config, layout, _LENGTH_BYTES + length)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors as copies in their own memory."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            return dict(load(self.body))
        except SafetensorError as error:
            raise ValueError(f"the body is no safetensors file: {error}") from error

    def digest(self) -> str:
        """Return a checksum over configuration and tensors; it is equal on both sides if nothing was lost in transfer.

        The order of the metadata's entries does not count, because it differs from one serialisation to the next.
        """
        told = json.dumps([self.config, self.layout], sort_keys=True).encode()
        total = hashlib.blake2b(told, digest_size=16)
        total.update(memoryview(self.body)[self.data_start :])
        return total.hexdigest()


def _plain(value: Any) -> Any:
    """Convert the sets and enumerations in PEFT's configuration to JSON values."""
    return sorted(value) if isinstance(value, (set, frozenset)) else str(getattr(value, "value", value))
