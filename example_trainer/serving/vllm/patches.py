"""Corrections of errors in vLLM and one addition, each installed once per process, but for `end_broken_reload`.

`end_broken_reload` is called after a failed reload of the model's weights. vLLM leaves every layer that was not
complete without memory, and counts what had arrived for it towards the next reload: that one dropped the last part of a
fused parameter and computed with random memory in its place. Here all layers get their tensors back.

`install_failing_calls` makes a call to the engine core fail if the engine ends. vLLM fails the requests of an engine
that has died, but not the calls (`collective_rpc`, `get_supported_tasks`, ...) that wait for its answer: a server whose
engine is killed during such a call waits for ever and reacts to no signal. Here the call raises `EngineDeadError`.

`install_grammar_libraries` lets guided decoding use the library chosen for each request. vLLM chooses one for each
request (xgrammar, or another if xgrammar does not support the grammar), and then compiles all of them with the first
request's choice, so the first request on a server decides which grammars it accepts. Here each library has its own
manager, and they write masks of one width, so one batch may mix them. Guidance's own masks are as wide as its
tokenizer, which may have more tokens than the model (Gemma 3 1B has one more): the engine ended at the first such mask
in a step with one of another width, on a GPU at any. Here each mask is as wide as the model's vocabulary.

`install_output_lengths` keeps the length of a request's list of outputs under asynchronous scheduling. There a new
token stands as -1 in the list until it is needed, which is the case in steps that have a request with penalties or bad
words. In such a step vLLM replaces all -1 of each request by the one newest token, so a list that had several lost the
rest, and `min_tokens` excluded the stop tokens for longer than asked (5 of 20,000 answers of random requests). Here the
list keeps its -1 in the places of the others.

`install_quantised_heads` (the addition) serves a model whose output head is quantised. vLLM refuses, while it profiles
the first batch, to compute such a head in another dtype than the model's. Here the head is computed in the model's.

`install_logprob_token_ids` returns logprobs of named tokens only to the request that names them. In vLLM's sampler
`logprob_token_ids` replaces the most likely tokens by the named ones for the whole batch: another request of the step
that asks for alternatives gets token 0 with the probability 0. Here only the rows that name tokens get them.

`install_seeds_on_cpu` lets a request have its own seed on a CPU, where vLLM's engine would fail. A step samples for
every request of the batch, also for one whose prompt has been read only in part. vLLM discards that token and sets the
request's generator back by an offset, which a CPU generator does not have: the error ends the engine. Here the
generator of such a request is left out of the step, with the same result: one seed gives the same tokens no matter how
a prompt is split, and whether or not the request is paused and computed again.

`install_thinking_budgets` ends a request's `thinking_token_budget` with it, in vLLM's first model runner. When a
request ends, the last row of the batch moves into its place. If only the ended one had a budget, vLLM left that budget
in the row, and forced the end of thinking into the answer of the other. Here it is removed.
"""

from __future__ import annotations

import asyncio
import copy
from functools import cache, wraps
from typing import Any

_LIFE_CHECK_SECONDS = 0.5
"""Interval of the checks that the engine is alive, while a call waits for its answer."""


def end_broken_reload(model: Any) -> None:
    """Give each layer its tensors back after a reload that has failed, so that the next one starts clean."""
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)  # noqa: SLF001  vLLM calls it for layers without weights
            info.reset()


def install_failing_calls() -> None:
    """Wrap the asynchronous client of vLLM's engine core, in the server's own process."""
    from vllm.v1.engine.core_client import AsyncMPClient

    call = AsyncMPClient._call_utility_async  # noqa: SLF001  the one function that all calls go through
    if not hasattr(call, "__wrapped__"):
        AsyncMPClient._call_utility_async = failing_with_the_engine(call)  # noqa: SLF001


def failing_with_the_engine(call: Any) -> Any:
    """Return `call` changed so that it raises `EngineDeadError` if the engine ends before it answers."""
    from vllm.v1.engine.exceptions import EngineDeadError

    @wraps(call)
    async def calling(client: Any, *args: Any, **kwargs: Any) -> Any:
        answer = asyncio.ensure_future(call(client, *args, **kwargs))
        try:
            while not answer.done():
                await asyncio.wait({answer}, timeout=_LIFE_CHECK_SECONDS)
                if not answer.done() and client.resources.engine_dead:
                    raise EngineDeadError
        finally:
            answer.cancel()
        return answer.result()

    return calling


_INSTALLED = "atropos_installed"
_MANAGERS = "atropos_managers"
_TOKENS_PER_WORD = 32
"""A mask has one bit for each token."""


def install_grammar_libraries() -> None:
    """Wrap vLLM's grammar initialisation, once per process."""
    from vllm.v1.structured_output import StructuredOutputManager

    if hasattr(StructuredOutputManager, _INSTALLED):
        return
    setattr(StructuredOutputManager, _INSTALLED, True)
    StructuredOutputManager.grammar_init = with_each_library(StructuredOutputManager.grammar_init)
    install_mask_widths()


def with_each_library(begin: Any) -> Any:
    """Return `begin` changed so that each library begins a request's grammar in a manager of its own."""

    def beginning(manager: Any, request: Any) -> None:
        if request.structured_output_request is None:
            return
        library = request.sampling_params.structured_outputs._backend  # noqa: SLF001
        chosen = _manager_for(manager, library)
        try:
            begin(chosen, request)
        except Exception:  # vLLM's own manager makes the masks, so it must not be left with a library that cannot
            if chosen.backend is None:
                del vars(manager)[_MANAGERS][library]
            raise

    return beginning


def _manager_for(manager: Any, library: str) -> Any:
    """Return the manager of a library: the first is vLLM's own, which makes all masks; others are copies of it."""
    managers = vars(manager).setdefault(_MANAGERS, {})
    if library not in managers:
        managers[library] = copy.copy(manager) if managers else manager
        if managers[library] is not manager:
            managers[library].backend = None
    return managers[library]


@cache
def install_mask_widths() -> None:
    """Wrap the masks of the library Guidance, once per process."""
    from vllm.v1.structured_output.backend_guidance import GuidanceBackend, GuidanceGrammar

    def allocate(backend: Any, rows: int) -> Any:
        from llguidance.torch import allocate_token_bitmask  # not before it is used: vLLM imports it as late

        return allocate_token_bitmask(rows, backend.vocab_size)

    GuidanceBackend.allocate_token_bitmask = allocate
    GuidanceGrammar.fill_bitmask = cutting_masks(GuidanceGrammar.fill_bitmask)


def cutting_masks(fill: Any) -> Any:
    """Return `fill` changed so that a row of another width than the tokenizer's gets its mask, as far as both go.

    What a wider row has beyond is no token of the tokenizer: Mistral's may have fewer than the model.
    """
    import torch

    @wraps(fill)
    def filling(grammar: Any, masks: Any, row: int) -> None:
        words = -(-grammar.ll_tokenizer.vocab_size // _TOKENS_PER_WORD)
        if masks.shape[1] == words:
            fill(grammar, masks, row)
            return
        whole = torch.full((1, words), -1, dtype=torch.int32)
        fill(grammar, whole, 0)
        width = min(words, masks.shape[1])
        masks[row, :width] = whole[0, :width]
        masks[row, width:] = 0

    return filling


@cache
def install_quantised_heads() -> None:
    """Wrap vLLM's product with the output head, once per process."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    LogitsProcessor._apply_head = leaving_quantised_heads(LogitsProcessor._apply_head)  # noqa: SLF001  no public hook


def leaving_quantised_heads(apply: Any) -> Any:
    """Return `apply` changed so that a quantised head is computed in the dtype of the states, as without `head_dtype`.

    The processor's `head_dtype` then names that dtype, so that the worker reports what is computed.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    @wraps(apply)
    def applying(processor: Any, lm_head: Any, states: Any, bias: Any) -> Any:
        if not isinstance(lm_head.quant_method, UnquantizedEmbeddingMethod | UnquantizedLinearMethod):
            processor.head_dtype = states.dtype
        return apply(processor, lm_head, states, bias)

    return applying


_ASKED = "atropos_most_likely"


@cache
def install_logprob_token_ids() -> None:
    """Wrap vLLM's sampler, once per process."""
    from vllm.v1.sample.sampler import Sampler

    forward = Sampler.forward

    def noting(sampler: Any, logits: Any, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        setattr(sampler, _ASKED, sampling_metadata.max_num_logprobs or 0)
        return forward(sampler, logits, sampling_metadata, *args, **kwargs)

    Sampler.forward = noting
    Sampler.gather_specific_token_logprobs = _gather


def _gather(sampler: Any, logprobs: Any, named: dict[int, list[int]], sampled: Any) -> Any:
    """Return each row's sampled token, then its named or most likely tokens; rows are padded with -inf."""
    import torch
    from vllm.v1.outputs import LogprobsTensors

    likely = sampler.gather_logprobs(logprobs, getattr(sampler, _ASKED), sampled)
    missing = max(0, 1 + max(map(len, named.values())) - likely.logprobs.shape[1])
    tokens = torch.nn.functional.pad(likely.logprob_token_ids, (0, missing))
    values = torch.nn.functional.pad(likely.logprobs, (0, missing), value=-torch.inf)
    for row, wanted in named.items():
        end = 1 + len(wanted)
        ids = torch.as_tensor(wanted, dtype=torch.int64, device=logprobs.device)
        tokens[row, 1:end] = ids.to(tokens.dtype)
        values[row, 1:end] = logprobs[row, ids]
        values[row, end:] = -torch.inf
    return LogprobsTensors(tokens, values, likely.selected_token_ranks)


@cache
def install_output_lengths() -> None:
    """Wrap the update of output lists of vLLM's input batch, once per process."""
    from vllm.v1.worker.gpu_input_batch import InputBatch

    InputBatch.update_async_output_token_ids = keeping_output_lengths(InputBatch.update_async_output_token_ids)


def keeping_output_lengths(update: Any) -> Any:
    """Return `update` changed so that it shortens no list of outputs, except with speculative decoding."""

    @wraps(update)
    def updating(batch: Any) -> None:
        sampled, lists = batch.sampled_token_ids_cpu, batch.sampling_metadata.output_token_ids
        if sampled is None or sampled.shape[-1] != 1:  # with speculative decoding rejected tokens must go
            update(batch)
            return
        lengths = [len(tokens) for tokens in lists]
        update(batch)
        for tokens, length in zip(lists, lengths, strict=True):
            tokens[-1:-1] = [-1] * (length - len(tokens))

    return updating


def install_seeds_on_cpu() -> None:
    """Wrap the sampling of vLLM's runner for CPUs."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    CPUModelRunner.sample_tokens = _without_unfinished_generators(CPUModelRunner.sample_tokens)


def _without_unfinished_generators(sample: Any) -> Any:
    def sampling(runner: Any, *args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        if not batch.generators:
            return sample(runner, *args, **kwargs)
        (unfinished,) = runner.discard_request_mask.np[: batch.num_reqs].nonzero()
        set_aside = {row: batch.generators.pop(row) for row in unfinished.tolist() if row in batch.generators}
        try:
            return sample(runner, *args, **kwargs)
        finally:
            batch.generators.update(set_aside)

    return sampling


@cache
def install_thinking_budgets() -> None:
    """Wrap the moves of thinking budgets between rows, once per process."""
    from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

    ThinkingBudgetStateHolder.sync_batch = ending_budgets(ThinkingBudgetStateHolder.sync_batch)


def ending_budgets(sync: Any) -> Any:
    """Return `sync` changed so that a row that a request moves into keeps no budget of the one that has ended there."""
    from vllm.v1.sample.logits_processor.interface import MoveDirectionality

    @wraps(sync)
    def syncing(holder: Any, update: Any) -> None:
        for _, row, direction in update.moved if update else ():
            if direction == MoveDirectionality.UNIDIRECTIONAL:
                holder._state.pop(row, None)  # noqa: SLF001  no public way
        sync(holder, update)

    return syncing
