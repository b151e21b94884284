"""One interface to vLLM's `AsyncLLM`: one call for each task, with vLLM's private names used only here.

`EngineAdapter` also checks requests of every route where vLLM's input processor takes them. vLLM would accept some
requests and then answer them wrongly or with 500; here they are refused, with the reason, as the client's mistakes. A
request that cannot be passed on to the engine leaves no record.

`install` corrects the text of outputs whose prompt ends inside a character, as a prompt cut off at a length does. vLLM
starts decoding an output's tokens from the prompt's tokens. If these end inside a character, all of the prompt's text
came with the first token, and stop strings were found in it. Here decoding starts from the prompt's complete
characters.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from example_trainer.errors import CannotServe, WorkerFailed
from example_trainer.serving.drain import Running

_INCOMPLETE = "�"
_LOOK_BACK = 8
"""Number of last tokens decoded to see if the prompt ends in a complete character."""

LARGEST_SEED = 2**63 - 1
"""Largest seed of an output: vLLM's second model runner keeps seeds as 64 bits with a sign."""

_LONGEST_CHARACTER = 4
"""Bytes of the longest UTF-8 character; each byte may be a token of its own."""


@cache
def install() -> None:
    """Wrap vLLM's decoding of outputs, once per process."""
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

    FastIncrementalDetokenizer.__init__ = _from_complete_characters(FastIncrementalDetokenizer.__init__)


def _from_complete_characters(make: Any) -> Any:
    def making(detokenizer: Any, tokenizer: Any, request: Any) -> None:
        from tokenizers.decoders import DecodeStream

        make(detokenizer, tokenizer, request)
        prompt = request.prompt_token_ids or []
        complete = complete_characters(detokenizer.tokenizer, prompt)
        if len(complete) < len(prompt):
            detokenizer.stream = DecodeStream(ids=complete, skip_special_tokens=detokenizer.skip_special_tokens)

    return making


def complete_characters(tokenizer: Any, tokens: list[int]) -> list[int]:
    """Return the tokens without an incomplete character at their end; none if the last bytes are no text at all."""
    for end in range(len(tokens), max(0, len(tokens) - _LONGEST_CHARACTER), -1):
        if not tokenizer.decode(tokens[max(0, end - _LOOK_BACK) : end]).endswith(_INCOMPLETE):
            return tokens[:end]
    return []


def check_prompt(tokens: Sequence[int], vocabulary: int) -> None:
    """Refuse tokens that the model does not have: vLLM accepts all of its tokenizer's, and any without a tokenizer.

    The engine ends at a token for which there is no embedding.
    """
    from vllm.exceptions import VLLMValidationError

    for token in tokens:
        if not 0 <= token < vocabulary:
            raise VLLMValidationError(f"prompt: token id {token} is out of vocabulary, which has {vocabulary} tokens")


def check_sampling(params: Any, vocabulary: int) -> None:
    """Refuse sampling parameters that leave an output without a seed or without any token to sample."""
    from vllm.exceptions import VLLMValidationError

    if params.seed is not None and params.n > 1 and params.seed <= -1 < params.seed + params.n:
        raise VLLMValidationError(
            f"seed: with {params.seed} one of the {params.n} outputs would have the seed -1, which means none; "
            "use seeds from 0"
        )
    if params.seed is not None and params.seed + params.n - 1 > LARGEST_SEED:
        raise VLLMValidationError(
            f"seed: the last of the {params.n} outputs would have a seed above {LARGEST_SEED}; use a smaller one"
        )
    if leaves_nothing(params, vocabulary):
        raise VLLMValidationError(
            "allowed_token_ids, bad_words and the stop tokens that min_tokens forbids leave no token to sample"
        )


def check_sizes(params: Any) -> None:
    """Refuse lists that are longer than the rows that vLLM's second model runner has for them: its engine would end."""
    from vllm import envs
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.worker.gpu.sample import logit_bias as rows

    bad_words = sum(map(len, params.bad_words_token_ids or ()))
    stop_tokens = len(params.all_stop_token_ids) if params.min_tokens else 0
    for name, size, most in (
        ("allowed_token_ids", len(params.allowed_token_ids or ()), rows.MAX_NUM_ALLOWED_TOKEN_IDS),
        ("logit_bias", len(params.logit_bias or ()), rows.MAX_NUM_LOGIT_BIAS_TOKENS),
        ("stop_token_ids with min_tokens", stop_tokens, rows.MAX_NUM_STOP_TOKEN_IDS),
        ("bad_words", bad_words, envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS),
    ):
        if size > most:
            raise VLLMValidationError(f"{name}: {size} tokens are more than the {most} that this server takes")


def check_adapted_head(params: Any, name: str) -> None:
    """Refuse prompt logprobs of an adapter of the output head: on a GPU vLLM computes them without that part of it."""
    from vllm.exceptions import VLLMValidationError

    if params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None:
        raise VLLMValidationError(
            f"prompt_logprobs: the adapter {name!r} changes the output head, which vLLM leaves out of prompt logprobs "
            "on a GPU; ask for logprobs of sampled tokens, or use an adapter without lm_head"
        )


def within_context(params: Any, context: int) -> None:
    """Reduce token limits beyond the context to it, which ends every output: vLLM's second model runner has 32 bits."""
    params.max_tokens = min(params.max_tokens, context)
    params.min_tokens = min(params.min_tokens, context)


def leaves_nothing(params: Any, vocabulary: int) -> bool:
    """Return True if no first token is possible. A limit that excludes every later token only shows in the answer."""
    forbidden = {ids[0] for ids in params.bad_words_token_ids or () if len(ids) == 1}
    if params.min_tokens and params.structured_outputs is None:
        forbidden |= params.all_stop_token_ids
    if params.allowed_token_ids is not None:
        return forbidden.issuperset(params.allowed_token_ids)
    return len(forbidden) >= vocabulary


def check_id(request_id: str) -> None:
    """Refuse an id with half a surrogate pair before vLLM records it: with n > 1 vLLM's own refusal fails."""
    from vllm.exceptions import VLLMValidationError

    try:
        request_id.encode()
    except UnicodeEncodeError as error:
        raise VLLMValidationError(f"the request has an id that cannot be passed to the engine: {error}") from error


def refuse_what_cannot_be_sent(async_llm: Any) -> None:
    """Report integers beyond 64 bits and lone surrogates to the client, and remove the request that has them.

    vLLM records a request before it serialises it for the engine, and would keep the record and its adapter for ever.
    """
    from vllm.exceptions import VLLMValidationError

    send = async_llm.engine_core.add_request_async
    add = async_llm._add_request  # noqa: SLF001  the call in which vLLM records a request and then sends it

    async def sending(request: Any) -> None:
        try:
            await send(request)
        except (OverflowError, UnicodeEncodeError) as error:
            raise VLLMValidationError(
                f"the request has a value that cannot be passed to the engine: {error}"
            ) from error

    async def adding(request: Any, *args: Any) -> None:
        try:
            await add(request, *args)
        except BaseException:
            with suppress(UnicodeEncodeError):  # if the id itself cannot be sent: the record is removed all the same
                await async_llm.abort(request.request_id, internal=True)
            raise

    async_llm.engine_core.add_request_async = sending
    async_llm._add_request = adding  # noqa: SLF001


def blame_impossible_grammars(async_llm: Any) -> None:
    """Report a failure of guided decoding as a client error: the grammar is the cause, not the server."""
    generate = async_llm.generate

    def generating(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        outputs: AsyncIterator[Any] = generate(prompt, sampling_params, *args, **kwargs)
        return outputs if sampling_params.structured_outputs is None else _without_errors(outputs)

    async_llm.generate = generating


async def _without_errors(outputs: Any) -> AsyncIterator[Any]:
    from vllm.exceptions import VLLMValidationError

    try:
        async for output_so_far in outputs:
            if any(output.finish_reason == "error" for output in output_so_far.outputs):
                raise VLLMValidationError(
                    "structured_outputs: the grammar does not compile, or no output satisfies it and the other "
                    "limits of the request"
                )
            yield output_so_far
    finally:
        await outputs.aclose()


class EngineAdapter:
    """Pauses, stamps and generates. Requests of every route are checked inside vLLM's input processor."""

    def __init__(self, async_llm: Any) -> None:
        self.async_llm = async_llm
        self._salt: str | None = None
        self.serves_adapter: Callable[[str], bool] = lambda _: True
        """Returns True if an adapter of this name may be given to a new request."""
        self.adapts_head: Callable[[str], bool] = lambda _: False
        """Returns True if the adapter of this name changes the output head."""
        self._numbers = itertools.count()
        install()
        self._admit_everything()
        refuse_what_cannot_be_sent(async_llm)
        blame_impossible_grammars(async_llm)

    @property
    def most_characters(self) -> int:
        """Upper limit of a prompt's characters: no longer text fits into the context, however it is tokenised."""
        return int(self.async_llm.model_config.max_model_len * self.async_llm.tokenizer.max_chars_per_token)

    async def pause(self, *, discard: bool) -> Counters:
        return await self._count("atropos_pause", discard)

    async def resume(self, version: str | None) -> Counters:
        return await self._count("atropos_resume", version)

    async def stamp(self, version: str) -> None:
        await self.async_llm.update_weight_version(version)

    async def counters(self) -> Counters:
        return await self._count("atropos_counters")

    async def running(self) -> Running:
        found: Running = await self.async_llm.engine_core.call_utility_async("atropos_running")
        return found

    def salt_prefixes(self, salt: str) -> None:
        self._salt = salt

    async def call_worker(self, method: str, *arguments: object) -> Any:
        """Call a method of the worker extension in every worker; return the reply of rank 0, parsed from JSON.

        Raise `WorkerFailed` if any rank has failed.
        """
        return (await self.call_workers(method, *arguments))[0]

    async def call_workers(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of the worker extension in every worker; return the replies in order of engines and ranks.

        Raise `WorkerFailed` if any rank has failed.
        """
        call = self.async_llm.engine_core.call_utility_all_async
        answers = await call("collective_rpc", "atropos_call", None, (method, *arguments), None)
        return worker_replies([answer for each in answers for answer in each])

    async def check_engine_core(self) -> None:
        """Raise `CannotServe` if the process of vLLM's engine core lacks the additions for publishes."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await self.counters()
        except EngineDeadError:
            raise
        except Exception as error:
            raise CannotServe(
                f"the process of vLLM's engine core lacks the server's additions ({error}): it calls vLLM's plugins, "
                "and the installed ones do not include this package's; run pip install -e . again"
            ) from error

    @property
    def workers(self) -> int:
        """The number of worker processes, each with a part of every layer, or with some of the layers."""
        return int(self.async_llm.vllm_config.parallel_config.world_size)

    def parts(self) -> str | None:
        """Return the option that divides the layers among workers, or requests among engines; None if there is none."""
        parallel = self.async_llm.vllm_config.parallel_config
        if parallel.pipeline_parallel_size > 1:
            return f"--pipeline-parallel-size {parallel.pipeline_parallel_size} gives each worker some of the layers"
        if parallel.data_parallel_size > 1:
            return f"--data-parallel-size {parallel.data_parallel_size} divides the requests among several engines"
        return None

    def derivations(self) -> dict[str, Any]:
        """Return the settings of the loaded model by which vLLM derives values from its weights."""
        vllm_config = self.async_llm.vllm_config
        model = vllm_config.model_config
        return {
            "quantization": model.quantization,
            "kv_cache_dtype": vllm_config.cache_config.cache_dtype,
            "is_mla": bool(model.use_mla),
        }

    def adapters_in_use(self) -> set[str]:
        """Return the names of the adapters that running requests of any route use."""
        states = self.async_llm.output_processor.request_states.values()
        return {state.lora_name for state in states if state.lora_name is not None}

    def requests_known(self) -> int:
        """Return the number of requests that vLLM's code in the HTTP process has accepted and not yet finished."""
        return len(self.async_llm.output_processor.request_states)

    def forget_adapter(self, name: str) -> None:
        """Remove a dropped adapter from `/metrics`: vLLM keeps a row for every set that ever ran at once."""
        manager = self.async_llm.logger_manager
        for log in manager.stat_loggers if manager is not None else ():
            gauge = getattr(log, "gauge_lora_info", None)
            if gauge is None:
                continue
            for sample in gauge.collect()[0].samples:
                labels = [sample.labels["running_lora_adapters"], sample.labels["waiting_lora_adapters"]]
                if any(name in names.split(",") for names in labels):
                    gauge.remove_by_labels(sample.labels)

    async def abort_all(self) -> int:
        """Abort every request in flight and return their number; each client gets the tokens so far."""
        processor = self.async_llm.output_processor
        running = [*processor.request_states, *processor.parent_requests]
        if running:
            await self.async_llm.abort(running, internal=True)
        return len(running)

    @property
    def is_traced(self) -> bool:
        """True if vLLM sends traces (`--otlp-traces-endpoint`)."""
        return self.async_llm.vllm_config.observability_config.otlp_traces_endpoint is not None

    def generate(
        self,
        prompt_token_ids: list[int],
        params: Any,
        lora_request: Any = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[Any, None]:
        prompt = {"type": "token", "prompt_token_ids": prompt_token_ids}
        request_id = f"generate-{next(self._numbers)}"
        stream: AsyncGenerator[Any, None] = self.async_llm.generate(
            prompt, params, request_id, lora_request=lora_request, trace_headers=trace_headers
        )
        return stream

    async def _count(self, method: str, *arguments: object) -> Counters:
        """Return the sum of the engines' counts; by the first engine's alone a drain would end while others compute."""
        found: list[Counters] = await self.async_llm.engine_core.call_utility_all_async(method, *arguments)
        return {name: sum(each[name] for each in found) // (len(found) if name in _SHARES else 1) for name in found[0]}

    def _admit_everything(self) -> None:
        from vllm.exceptions import VLLMValidationError
        from vllm.platforms import current_platform

        processor = self.async_llm.input_processor
        process = processor.process_inputs
        vocabulary, tokenizer = self.async_llm.model_config.get_vocab_size(), self.async_llm.tokenizer
        # A tokenizer may have more tokens than the model: often one that was added for padding.
        vllm_accepts_more = tokenizer is None or tokenizer.max_token_id >= vocabulary
        context = int(self.async_llm.model_config.max_model_len)
        on_cpu = bool(current_platform.is_cpu())
        second_runner = bool(self.async_llm.vllm_config.use_v2_model_runner)

        def admit(*args: Any, **kwargs: Any) -> Any:
            try:
                request = process(*args, **kwargs)
            except (OverflowError, UnicodeEncodeError, TypeError) as error:
                raise VLLMValidationError(
                    f"the request has a value that is neither text nor number: {error}"
                ) from error
            check_id(request.request_id)
            if vllm_accepts_more and not request.mm_features:  # an image's tokens need no embeddings
                check_prompt(request.prompt_token_ids or [], vocabulary)
            if request.sampling_params is not None:
                check_sampling(request.sampling_params, vocabulary)
                within_context(request.sampling_params, context)
                if second_runner:
                    check_sizes(request.sampling_params)
            adapter = request.lora_request
            if adapter is not None and not self.serves_adapter(adapter.lora_name):
                raise VLLMValidationError(f"model: adapter {adapter.lora_name!r} is not served any more; ask again")
            if adapter is not None and request.sampling_params and not on_cpu and self.adapts_head(adapter.lora_name):
                check_adapted_head(request.sampling_params, adapter.lora_name)
            if self._salt is not None:
                request.cache_salt = f"{self._salt}:{request.cache_salt or ''}"
            return request

        processor.process_inputs = admit


Counters = dict[str, int]
_SHARES = frozenset({"kv_used_per_mille"})
"""Counts of which several engines have the mean."""


def worker_replies(answers: list[dict[str, str | None]]) -> list[Any]:
    """Return the replies of all workers, in order of ranks; raise `WorkerFailed` with the error of each that failed."""
    failed = {rank: answer["error"] for rank, answer in enumerate(answers) if answer["error"] is not None}
    if failed:
        alone = len(answers) == 1
        raise WorkerFailed("; ".join(f"{text}" if alone else f"rank {rank}: {text}" for rank, text in failed.items()))
    return [json.loads(answer["reply"] or "null") for answer in answers]
