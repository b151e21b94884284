"""Weights laid out as vLLM lays them out, for the stand-in server: fused, padded and transposed, each piece traced."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from example_trainer.weights.layout import Piece, TensorMap

_FUSED = (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj")))
_VOCABULARY_PADDING = 64


def lay_out_as_vllm(
    weights: Mapping[str, torch.Tensor], transposed: set[str]
) -> tuple[dict[str, torch.Tensor], dict[str, tuple[str, int]]]:
    """The parameters as vLLM has them, and for each checkpoint tensor the parameter and row where it begins."""
    gathered: dict[str, list[torch.Tensor]] = {}
    sources: dict[str, tuple[str, int]] = {}
    for name, weight in weights.items():
        parameter = name
        for fused, parts in _FUSED:
            for part in parts:
                parameter = parameter.replace(part, fused)
        rows = gathered.setdefault(parameter, [])
        sources[name] = (parameter, sum(len(row) for row in rows))
        rows.append(weight.t().contiguous() if name in transposed else weight)
    parameters = {name: torch.cat(rows) for name, rows in gathered.items()}
    vocabulary = {name for name in parameters if name.endswith(("embed_tokens.weight", "lm_head.weight", "wte.weight"))}
    parameters.update({name: _pad_rows(parameters[name]) for name in vocabulary})
    return parameters, sources


def _pad_rows(weight: torch.Tensor) -> torch.Tensor:
    missing = -len(weight) % _VOCABULARY_PADDING
    return torch.cat([weight, weight.new_zeros(missing, *weight.shape[1:])])


def trace(weight: torch.Tensor, offset: int, stride: tuple[int, ...], first_row: int, transposed: bool) -> TensorMap:
    source = weight.t() if transposed else weight
    piece = Piece(
        storage="0",
        offset=offset + first_row * stride[0],
        shape=list(source.shape),
        stride=list(stride),
        source_offset=0,
        source_shape=list(source.shape),
        source_stride=list(source.stride()),
    )
    return TensorMap(pieces=[piece], shape=list(weight.shape), dtype=str(weight.dtype).removeprefix("torch."))
