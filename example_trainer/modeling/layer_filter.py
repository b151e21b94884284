"""Layer filters: which transformer blocks are trained or get an adapter, for any naming of the block list.

Blocks are recognised by their path: `model.layers.N.` (Llama, Qwen, Gemma, Phi, Mistral) and
`transformer.h.N.` (GPT-2, Falcon) among them. A filter is a comma-separated list of block numbers,
ranges (`20-31`, `0-3,28-31`) and shares counted from the output end (`top-25%`, `last-12`). With a
filter everything outside the named blocks, embeddings and head included, stays as it was loaded.
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
    """The number of the transformer block that a parameter lies in; None outside the blocks."""
    found = _BLOCK.search(parameter_name)
    return int(found.group(2)) if found else None


def block_list_name(parameter_name: str) -> str | None:
    """What the list of blocks is called on the way to a parameter: `layers` or `h`; None outside the blocks."""
    found = _BLOCK.search(parameter_name)
    return found.group(1) if found else None


def valid_range(layer_count: int) -> str:
    """The block numbers of a model, as messages name them."""
    return f"0-{layer_count - 1}"


def parse_layer_indices(text: str, layer_count: int, *, flag: str = TRAIN_FLAG) -> frozenset[int]:
    """The blocks that a filter names in a model of `layer_count` blocks; `flag` is for messages.

    Raises `BadLayerFilter`, which names the valid range, for what is not a filter or names no such block.
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
                f"{flag} {text!r}: {part!r} lies outside this model's blocks; "
                f"the valid range is {valid_range(layer_count)}"
            )
        chosen.update(range(first, last + 1))
    return frozenset(chosen)


def chosen_blocks(names: Iterable[str], layer_indices: str, *, flag: str = TRAIN_FLAG) -> frozenset[int]:
    """The blocks that a filter names in the model that these parameters or modules belong to."""
    blocks = {index for name in names if (index := block_index(name)) is not None}
    if not blocks:
        raise BadLayerFilter(
            f"{flag} {layer_indices!r}: this model has no block list named layers or h; leave the flag out"
        )
    return parse_layer_indices(layer_indices, max(blocks) + 1, flag=flag)


def trained_parameters(parameter_names: Iterable[str], layer_indices: str | None) -> frozenset[str]:
    """The names of the parameters to train: all, or those of the blocks that the filter names."""
    names = list(parameter_names)
    if layer_indices is None:
        return frozenset(names)
    chosen = chosen_blocks(names, layer_indices)
    return frozenset(name for name in names if block_index(name) in chosen)


def _bounds(part: str, layer_count: int) -> tuple[int, int] | None:
    """First and last block of one part of a filter, unchecked; None where it has no known form."""
    if match := _RANGE.fullmatch(part):
        return int(match.group(1)), int(match.group(2) or match.group(1))
    if match := _SHARE.fullmatch(part):
        # From int((1 - share) * N) on, as the published presets count it.
        return (100 - int(match.group(1))) * layer_count // 100, layer_count - 1
    if match := _LAST.fullmatch(part):
        return layer_count - int(match.group(1)), layer_count - 1
    return None
