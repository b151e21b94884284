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

TRAIN_FLAG = "--train-layer-indices"
_BLOCK = re.compile(r"(?:^|\.)(layers|h)\.(\d+)\.")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_SHARE = re.compile(r"top-(\d{1,3})%")
_LAST = re.compile(r"last-(\d+)")


def block_index(parameter_name: str) -> int | None:
    """Return the number of the transformer block that a parameter belongs to; None outside the blocks."""
    found = _BLOCK.search(parameter_name)
    return int(found.group(2)) if found else None


def block_list_name(parameter_name: str) -> str | None:
    """Return the name of the block list in a parameter's path: `layers` or `h`; None outside the blocks."""
    found = _BLOCK.search(parameter_name)
    return found.group(1) if found else None


def valid_range(layer_count: int) -> str:
    """Return the block numbers of a model as a range for error messages."""
    return f"0-{layer_count - 1}"


def parse_layer_indices(text: str, layer_count: int, *, flag: str = TRAIN_FLAG) -> frozenset[int]:
    """Return the blocks that a filter names in a model of `layer_count` blocks; `flag` is for error messages.

    Raises `BadLayerFilter`, which names the valid range, for an invalid filter or a block that does not exist.
    """
    chosen: set[int] = set()
    for part in (each.strip() for each in text.split(",")):
        bounds = _bounds(part, layer_count)
        if bounds is None:
            raise BadLayerFilter(
                f"{flag} {text!r}: {part!r} is not a number, range or share; write 20-31, 0-3,28-31, top-25% or "
                f"last-12 (the valid range is {valid_range(layer_count)})"
            )
        first, last = bounds
        if not 0 <= first <= last < layer_count:
            raise BadLayerFilter(
                f"{flag} {text!r}: {part!r} is outside this model's blocks; "
                f"the valid range is {valid_range(layer_count)}"
            )
        chosen.update(range(first, last + 1))
    return frozenset(chosen)


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


def _bounds(part: str, layer_count: int) -> tuple[int, int] | None:
    """Return first and last block of one part of a filter, without range check; None if it cannot be parsed."""
    if match := _RANGE.fullmatch(part):
        return int(match.group(1)), int(match.group(2) or match.group(1))
    if match := _SHARE.fullmatch(part):
        # The first block is int((1 - share) * N), as in the published presets.
        return (100 - int(match.group(1))) * layer_count // 100, layer_count - 1
    if match := _LAST.fullmatch(part):
        return layer_count - int(match.group(1)), layer_count - 1
    return None
