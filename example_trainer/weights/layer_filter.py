"""`--train-layer-indices`: which transformer blocks are trained, for any naming of the block list.

Blocks are recognised by their path: `model.layers.N.` (Llama, Qwen, Gemma, Phi, Mistral) and
`transformer.h.N.` (GPT-2, Falcon) among them. With a filter everything outside the named blocks,
embeddings and head included, stays as it was loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from example_trainer.weights.errors import BadLayerFilter

_BLOCK = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def block_index(parameter_name: str) -> int | None:
    """The number of the transformer block that a parameter lies in; None outside the blocks."""
    found = _BLOCK.search(parameter_name)
    return int(found.group(1)) if found else None


def parse_layer_indices(text: str, layer_count: int) -> frozenset[int]:
    """The blocks that `20-31` or `0-3,28-31` names in a model of `layer_count` blocks."""
    chosen: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise BadLayerFilter(
                f"--train-layer-indices {text!r}: {part.strip()!r} is not a number or range; write 20-31 or 0-3,28-31"
            )
        first, last = int(match.group(1)), int(match.group(2) or match.group(1))
        if first > last or last >= layer_count:
            raise BadLayerFilter(
                f"--train-layer-indices {text!r}: {part.strip()!r} lies outside this model's blocks; "
                f"the valid range is 0-{layer_count - 1}"
            )
        chosen.update(range(first, last + 1))
    return frozenset(chosen)


def trained_parameters(parameter_names: Iterable[str], layer_indices: str | None) -> frozenset[str]:
    """The names of the parameters to train: all, or those of the blocks that the filter names."""
    names = list(parameter_names)
    if layer_indices is None:
        return frozenset(names)
    blocks = {name: index for name in names if (index := block_index(name)) is not None}
    if not blocks:
        raise BadLayerFilter(
            f"--train-layer-indices {layer_indices!r}: this model has no block list named layers or h; "
            "leave the flag out to train all weights"
        )
    chosen = parse_layer_indices(layer_indices, max(blocks.values()) + 1)
    return frozenset(name for name, index in blocks.items() if index in chosen)
