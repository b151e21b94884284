"""A request's row of a batch is independent of the others, on small examples."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

from example_trainer.serving.engine import complete_characters, leaves_nothing
from example_trainer.serving.vllm.patches import (
    cutting_masks,
    ending_budgets,
    install_mask_widths,
    keeping_output_lengths,
    leaving_quantised_heads,
    with_each_library,
)


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


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # in vLLM's imports
def test_a_request_that_joins_does_not_shorten_the_outputs_of_others():
    """With `min_tokens` 5 the stop tokens were excluded at the sixth token as well, since the list had lost one."""
    from vllm.v1.worker.gpu_input_batch import InputBatch

    def batch():
        return SimpleNamespace(
            sampling_metadata=SimpleNamespace(output_token_ids=[[-1, -1], [3, -1], [], [-1]]),
            req_ids=["two steps ago", "one step ago", "new", "not in the last step"],
            prev_req_id_to_index={"two steps ago": 0, "one step ago": 1, "new": 2},
            sampled_token_ids_cpu=torch.tensor([[7], [8], [9]]),
            async_copy_ready_event=SimpleNamespace(synchronize=lambda: None),
        )

    update, own, kept = inspect.unwrap(InputBatch.update_async_output_token_ids), batch(), batch()
    update(own)
    assert own.sampling_metadata.output_token_ids[0] == [7], "vLLM has mended it: remove the correction"
    first = kept.sampling_metadata.output_token_ids[0]
    keeping_output_lengths(update)(kept)
    assert kept.sampling_metadata.output_token_ids == [[-1, 7], [3, 8], [], [-1]]
    assert kept.sampling_metadata.output_token_ids[0] is first, "the processor of min_tokens holds this list"


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # in vLLM's imports
def test_a_thinking_budget_ends_with_its_request():
    """The request that moves into the row had the end of thinking forced into its answer."""
    from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality
    from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

    begin, end, sync = 7, 8, inspect.unwrap(ThinkingBudgetStateHolder.sync_batch)

    def forced(sync):
        words = SimpleNamespace(reasoning_start_token_ids=[begin], reasoning_end_token_ids=[end])
        holder = ThinkingBudgetStateHolder(words, 4, 0, torch.device("cpu"), False)
        with_budget, without = (SimpleNamespace(thinking_token_budget=budget) for budget in (2, None))
        rows = [(0, with_budget, [begin], []), (1, without, [1], []), (2, with_budget, [begin], [3, 3])]
        sync(holder, BatchUpdate(batch_size=3, removed=[], added=rows, moved=[]))
        moved = [(1, 0, MoveDirectionality.UNIDIRECTIONAL), (0, 2, MoveDirectionality.SWAP)]
        sync(holder, BatchUpdate(batch_size=2, removed=[], added=[], moved=moved))
        holder.update_state([[3, 3], [], [4, 4, 4]], None)
        return holder.apply_to_logits(torch.zeros(3, 10), False, None)[:, end].bool().tolist()

    assert forced(sync) == [True, False, True], "vLLM has mended it: remove the correction"
    assert forced(ending_budgets(sync)) == [True, False, False]


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # in vLLM's imports
def test_masks_of_guidance_are_as_wide_as_the_models_if_the_tokenizer_has_more_tokens():
    """Xgrammar and vLLM's second model runner take only that width, and the engine ended at another."""
    import llguidance
    from vllm.v1.structured_output.backend_guidance import GuidanceBackend, GuidanceGrammar

    tokenizer, vocabulary = llguidance.LLTokenizer("byte"), 250
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_regex("[a-z]"))
    grammar = GuidanceGrammar(matcher, tokenizer, vocabulary)
    fill, masks = inspect.unwrap(GuidanceGrammar.fill_bitmask), torch.full((2, 8), -1, dtype=torch.int32)
    with pytest.raises(ValueError, match="buffer size"):  # else vLLM has mended it: remove the correction
        fill(grammar, masks, 1)
    cutting_masks(fill)(grammar, masks, 1)
    whole = torch.full((2, 9), -1, dtype=torch.int32)
    cutting_masks(fill)(grammar, whole, 1)
    assert tokenizer.vocab_size > 8 * 32
    assert masks.tolist() == whole[:, :8].tolist()
    assert masks[1].tolist() == [0, 0, 0, sum(1 << number for number in range(1, 27)), 0, 0, 0, 0], "a to z"
    install_mask_widths()
    wider = torch.full((1, 10), -1, dtype=torch.int32)
    cutting_masks(fill)(grammar, wider, 0)
    assert wider[0].tolist() == [*whole[1].tolist(), 0], "the tokenizer has no such token"
    made = GuidanceBackend.allocate_token_bitmask(SimpleNamespace(vocab_size=vocabulary, ll_tokenizer=tokenizer), 3)
    assert made.shape == (3, 8)


def test_a_library_for_grammars_that_does_not_start_leaves_the_others_able_to():
    """The first library's manager makes the masks of all, and the engine ended if it had no library."""

    def begin(manager, request):
        if request.sampling_params.structured_outputs._backend == "broken":
            raise ValueError(request)
        manager.backend = manager.backend or request.sampling_params.structured_outputs._backend

    def guided(library):
        chosen = SimpleNamespace(structured_outputs=SimpleNamespace(_backend=library))
        return SimpleNamespace(structured_output_request="a grammar", sampling_params=chosen)

    manager, beginning = SimpleNamespace(backend=None), with_each_library(begin)
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            beginning(manager, guided("broken"))
    beginning(manager, guided("first"))
    with pytest.raises(ValueError, match="broken"):
        beginning(manager, guided("broken"))
    beginning(manager, guided("second"))
    beginning(manager, SimpleNamespace(structured_output_request=None))
    assert manager.backend == "first"
    assert [made.backend for made in vars(manager)["atropos_managers"].values()] == ["first", "second"]


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
