"""Layer filters: numbers, ranges and shares name blocks; an invalid one is refused with the valid range."""

from __future__ import annotations

import pytest

from example_trainer.errors import BadLayerFilter
from example_trainer.modeling.layer_filter import trained_parameters
from example_trainer.options.layer_indices import parse_layer_indices

LLAMA = [f"model.layers.{index}.mlp.up_proj.weight" for index in range(4)] + ["model.embed_tokens.weight"]
GPT2 = [f"transformer.h.{index}.attn.c_attn.bias" for index in range(4)] + ["transformer.wte.weight"]


@pytest.mark.parametrize(
    ("text", "count", "blocks"),
    [
        ("20-31", 32, range(20, 32)),
        ("0-3,28-31", 32, [0, 1, 2, 3, 28, 29, 30, 31]),
        (" 5 , 7-8 ", 32, [5, 7, 8]),
        ("top-25%", 32, range(24, 32)),
        ("top-50%", 36, range(18, 36)),
        ("top-25%", 30, range(22, 30)),  # int(0.75 * 30) is 22
        ("top-100%", 4, range(4)),
        ("last-12", 32, range(20, 32)),
        ("0,last-1", 4, [0, 3]),
    ],
)
def test_a_filter_names_the_blocks_that_the_guide_says(text: str, count: int, blocks: list[int]) -> None:
    assert parse_layer_indices(text, count) == frozenset(blocks)


@pytest.mark.parametrize("text", ["32", "20-32", "5-3", "last-33", "last-0", "top-0%", "top-101%", "", "all", "1;2"])
def test_a_filter_that_names_no_block_is_reported_with_flag_value_and_valid_range(text: str) -> None:
    with pytest.raises(BadLayerFilter, match=r"--lora-layer-indices .*valid range is 0-31"):
        parse_layer_indices(text, 32, flag="--lora-layer-indices")


@pytest.mark.parametrize("names", [LLAMA, GPT2])
def test_only_parameters_of_the_named_blocks_are_trained_in_either_family(names: list[str]) -> None:
    assert trained_parameters(names, "1,last-1") == {names[1], names[3]}
    assert trained_parameters(names, None) == set(names)


def test_a_model_without_a_block_list_is_refused() -> None:
    with pytest.raises(BadLayerFilter, match="no block list named layers or h"):
        trained_parameters(["encoder.block.0.weight"], "0")
