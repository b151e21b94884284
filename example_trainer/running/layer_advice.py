"""`atropos doctor --layers MODEL`: the numbers that layer filters may name for a model, from its config.json alone."""

from __future__ import annotations

import json
from collections.abc import Iterator

from example_trainer.errors import ModelNotFound
from example_trainer.running.memory_advice import config_path
from example_trainer.weights.layer_filter import parse_layer_indices, valid_range

PRESETS = ("top-25%", "top-50%", "last-12")
_COUNTS = ("num_hidden_layers", "n_layer")


def advise_on_layers(name: str) -> Iterator[str]:
    """The lines of the report for a directory, or a Hugging Face id in the local cache; raises `ModelNotFound`."""
    count = layer_count(name)
    filters = "--train-layer-indices and --lora-layer-indices"
    yield f"{name}: {count} transformer blocks; {filters} take {valid_range(count)}"
    for preset in PRESETS:
        if preset == "last-12" and count < 12:
            continue
        chosen = parse_layer_indices(preset, count)
        yield f"  {preset} is {min(chosen)}-{max(chosen)}, {len(chosen)} blocks"


def layer_count(name: str) -> int:
    """How many transformer blocks the configuration of a model names."""
    path = config_path(name, flag="--layers")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        text = config.get("text_config") or config
        return int(next(text[field] for field in _COUNTS if text.get(field)))
    except (OSError, ValueError, AttributeError, StopIteration) as error:
        raise ModelNotFound(
            f"--layers {name}: {path} names no number of layers ({type(error).__name__}); is it a language model's?"
        ) from None
