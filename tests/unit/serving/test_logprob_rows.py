"""A request's row of a batch is independent of the others, on small examples."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

from example_trainer.serving.engine import complete_characters, leaves_nothing
from example_trainer.serving.vllm.patches import leaving_quantised_heads


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # in vLLM's imports
@pytest.mark.parametrize(("quantised", "computed"), [(False, torch.float32), (True, torch.bfloat16)])
def test_a_quantised_head_keeps_its_own_dtype_and_says_so(quantised, computed):
    """vLLM itself refuses another head dtype, but only in the first batch."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    weight, states = torch.randn(5, 4, dtype=torch.bfloat16), torch.randn(3, 4, dtype=torch.bfloat16)
    own = SimpleNamespace(apply=lambda layer, states, bias: states @ layer.weight.t())
    method = own if quantised else UnquantizedEmbeddingMethod()
    head = SimpleNamespace(weight=weight, quant_method=method)
    processor = SimpleNamespace(head_dtype=torch.float32)
    apply = inspect.unwrap(LogitsProcessor._apply_head)
    if quantised:
        with pytest.raises(ValueError, match="unquantized lm_head"):
            apply(processor, head, states, None)
    logits = leaving_quantised_heads(apply)(processor, head, states, None)
    assert logits.dtype == processor.head_dtype == computed


def params(**fields):
    plain = {"bad_words_token_ids": None, "allowed_token_ids": None, "min_tokens": 0, "all_stop_token_ids": {0}}
    return SimpleNamespace(**plain | {"structured_outputs": None} | fields)


@pytest.mark.parametrize(
    ("limits", "nothing"),
    [
        ({}, False),
        ({"allowed_token_ids": [0]}, False),
        ({"allowed_token_ids": [0], "min_tokens": 1}, True),
        ({"allowed_token_ids": [0, 1], "min_tokens": 1}, False),
        ({"allowed_token_ids": [0], "min_tokens": 1, "structured_outputs": "a grammar"}, False),
        ({"allowed_token_ids": [1], "bad_words_token_ids": [[1]]}, True),
        ({"allowed_token_ids": [1], "bad_words_token_ids": [[1, 1]]}, False),
        ({"allowed_token_ids": [0, 1], "bad_words_token_ids": [[1], [2, 3]], "min_tokens": 2}, True),
        ({"bad_words_token_ids": [[1], [2], [3]]}, False),
        ({"bad_words_token_ids": [[1], [2], [3]], "min_tokens": 1}, True),
    ],
)
def test_limits_that_leave_no_first_token_are_found(limits, nothing):
    assert leaves_nothing(params(**limits), vocabulary=4) is nothing


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, tokens):
        return bytes(tokens).decode(errors="replace")


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        (b"", 0),
        (b"abc", 3),
        ("né".encode(), 3),
        ("né".encode()[:2], 1),
        ("n€".encode()[:2], 1),
        ("n€".encode()[:3], 1),
        ("n\U0001f600".encode()[:4], 1),
        ("€€€€€".encode(), 15),
        (b"ab\xff\xff\xff\xff\xff", 0),
    ],
)
def test_a_prompts_complete_characters_end_before_one_that_is_begun(text, complete):
    assert complete_characters(Bytes(), list(text)) == list(text[:complete])
