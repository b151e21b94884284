"""Layer filters: they select the transformer blocks that are trained or get an adapter.

Blocks are recognised by their path, for example `model.layers.N.` (Llama, Qwen, Gemma, Phi, Mistral) or
`transformer.h.N.` (GPT-2, Falcon). A filter is a comma-separated list of block numbers, ranges (`20-31`, `0-3,28-31`)
and shares counted from the output end (`top-25%`, `last-12`). With a filter everything outside the named blocks,
including embeddings and head, stays as it was loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from example_trainer.errors import BadLayerFilter
from example_trainer.options.layer_indices import TRAIN_FLAG, parse_layer_indices

_BLOCK = re.compile(r"(?:^|\.)(layers|h)\.(\d+)\.")


def block_index(parameter_name: str) -> int | None:
    """Return the number of the transformer block that a parameter belongs to; None outside the blocks."""
    found = _BLOCK.search(parameter_name)
    return int(found.group(2)) if found else None


def block_list_name(parameter_name: str) -> str | None:
    """Return the name of the block list in a parameter's path: `layers` or `h`; None outside the blocks."""
    found = _BLOCK.search(parameter_name)
    return found.group(1) if found else None


def chosen_blocks(names: Iterable[str], layer_indices: str, *, flag: str = TRAIN_FLAG) -> frozenset[int]:
    """Return the blocks that a filter names in the model with these parameter or module names."""
    blocks = {index for name in names if (index := block_index(name)) is not None}
    if not blocks:
        raise BadLayerFilter(
            f"{flag} {layer_indices!r}: this model has no block list named layers or h; leave the flag out"
        )
    return parse_layer_indices(layer_indices, max(blocks) + 1, flag=flag)


def trained_parameters(parameter_names: Iterable[str], layer_indices: str | None) -> frozenset[str]:
    """Return the names of the parameters to train: all, or those of the blocks that the filter names."""
    names = list(parameter_names)
    if layer_indices is None:
        return frozenset(names)
    chosen = chosen_blocks(names, layer_indices)
    return frozenset(name for name in names if block_index(name) in chosen)
