"""An adapter on its way from trainer to server: one safetensors body, its PEFT configuration in the metadata.

The body is what `adapter_model.safetensors` would hold, so a body written to a file beside its configuration is an
adapter that PEFT and a stock vLLM load. Reading the header needs no torch; whoever receives a body checks it so far
before anything is handed on.
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
"""How the path of an adapter begins that lies in no file."""

_CONFIG = "adapter_config"

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class AdapterPayload:
    """A body with its header read."""

    body: bytes
    config: dict[str, Any]
    """The content of `adapter_config.json`."""
    layout: dict[str, Any]
    """The header's entry of each tensor: dtype, shape, place."""
    data_start: int

    @classmethod
    def write(cls, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> AdapterPayload:
        """From tensors under their PEFT names, contiguous, on any device."""
        from safetensors.torch import save

        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        body = save(plain, metadata={_CONFIG: json.dumps(config, default=_plain), "format": "pt"})
        return cls.read(body)

    @classmethod
    def read(cls, body: bytes) -> AdapterPayload:
        """Raises `ValueError` with the reason where the body is none of ours."""
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
        """The tensors, in memory of their own."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            return dict(load(self.body))
        except SafetensorError as error:
            raise ValueError(f"the body is no safetensors file: {error}") from error

    def digest(self) -> str:
        """A checksum over configuration and tensors; the same on both sides if nothing was lost on the way.

        Of the body's text the order of the metadata's entries does not count: it differs from one writing to the next.
        """
        told = json.dumps([self.config, self.layout], sort_keys=True).encode()
        total = hashlib.blake2b(told, digest_size=16)
        total.update(memoryview(self.body)[self.data_start :])
        return total.hexdigest()


def _plain(value: Any) -> Any:
    """PEFT's configuration holds sets and enumerations."""
    return sorted(value) if isinstance(value, (set, frozenset)) else str(getattr(value, "value", value))
