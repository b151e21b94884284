"""The rotary factors of LongRoPE in training: of its two lists the one that the server uses, for all sequences.

Transformers takes the long factors if the longest row of a forward is beyond the original context, else the short ones.
So the logprobs of a short row would depend on the rows in its micro-batch. vLLM keeps keys in a cache and chooses once:
the long factors if its context is beyond the original one, also for sequences that are shorter. It is a file of its own
because it changes a configuration and needs no model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_NAMES = ("factor", "mscale")


def use_one_factor(hf_config: Any, context_length: int | None) -> None:
    """Set short and long factors to those of a server with this context length; None: the model's longest context."""
    text = hf_config.get_text_config()
    context = context_length or getattr(text, "max_position_embeddings", 0)
    for parameters in _long_rope(getattr(text, "rope_parameters", None)):
        original = parameters.get("original_max_position_embeddings")
        original = original or getattr(text, "original_max_position_embeddings", None)
        if original is None:
            continue
        chosen, other = ("long", "short") if context > original else ("short", "long")
        for name in _NAMES:
            if f"{chosen}_{name}" in parameters:
                parameters[f"{other}_{name}"] = parameters[f"{chosen}_{name}"]


def _long_rope(parameters: Any) -> Iterator[dict[str, Any]]:
    """Yield the parameters of LongRoPE: a configuration has one dictionary, or one for each kind of layer."""
    if not isinstance(parameters, dict):
        return
    if parameters.get("rope_type") == "longrope":
        yield parameters
        return
    for own in parameters.values():
        yield from _long_rope(own)
