"""Layer filters as text: a comma-separated list of block numbers, ranges and shares counted from the output end."""

from __future__ import annotations

import re

from example_trainer.errors import BadLayerFilter

TRAIN_FLAG = "--train-layer-indices"
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_SHARE = re.compile(r"top-(\d{1,3})%")
_LAST = re.compile(r"last-(\d+)")


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
