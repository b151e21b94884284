"""vLLM's `AsyncLLM` as the rest of this package sees it: one call for each thing, private names kept in here."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

from example_trainer.serving import admission, prompt_ends
from example_trainer.serving.fence import Counters


class EngineAdapter:
    """Pausing, stamping and generating. Requests of every route pass `_admit` inside vLLM's input processor."""

    def __init__(self, async_llm: Any) -> None:
        self.async_llm = async_llm
        self._salt: str | None = None
        self.serves_adapter: Callable[[str], bool] = lambda _: True
        """Whether an adapter of this name may be given to a new request."""
        self._numbers = itertools.count()
        prompt_ends.install()
        self._admit_everything()
        admission.refuse_what_cannot_be_sent(async_llm)
        admission.blame_impossible_grammars(async_llm)

    @property
    def most_characters(self) -> int:
        """No longer text fits into the context, however it is cut into tokens."""
        return int(self.async_llm.model_config.max_model_len * self.async_llm.tokenizer.max_chars_per_token)

    async def pause(self, *, discard: bool) -> Counters:
        return await self._count("atropos_pause", discard)

    async def resume(self, version: str | None) -> Counters:
        return await self._count("atropos_resume", version)

    async def stamp(self, version: str) -> None:
        await self.async_llm.update_weight_version(version)

    async def counters(self) -> Counters:
        return await self._count("atropos_counters")

    def salt_prefixes(self, salt: str) -> None:
        self._salt = salt

    async def call_worker(self, method: str, *arguments: object) -> Any:
        """A method of the worker extension; its reply is JSON text."""
        replies = await self.async_llm.collective_rpc(method, args=arguments)
        return json.loads(replies[0])

    def adapters_in_use(self) -> set[str]:
        """Names of the adapters that requests of any route are running with."""
        states = self.async_llm.output_processor.request_states.values()
        return {state.lora_name for state in states if state.lora_name is not None}

    def requests_known(self) -> int:
        """Requests that vLLM's side of the HTTP process has taken and not yet ended."""
        return len(self.async_llm.output_processor.request_states)

    def forget_adapter(self, name: str) -> None:
        """Take a dropped adapter out of `/metrics`: vLLM keeps a row for every set that ever ran at once."""
        manager = self.async_llm.logger_manager
        for log in manager.stat_loggers if manager is not None else ():
            gauge = getattr(log, "gauge_lora_info", None)
            if gauge is None:
                continue
            for sample in gauge.collect()[0].samples:
                told = [sample.labels["running_lora_adapters"], sample.labels["waiting_lora_adapters"]]
                if any(name in names.split(",") for names in told):
                    gauge.remove_by_labels(sample.labels)

    async def abort_all(self) -> int:
        """End every request in flight; each caller gets what it has so far."""
        processor = self.async_llm.output_processor
        running = [*processor.request_states, *processor.parent_requests]
        if running:
            await self.async_llm.abort(running, internal=True)
        return len(running)

    def generate(self, prompt_token_ids: list[int], params: Any, lora_request: Any = None) -> AsyncGenerator[Any, None]:
        prompt = {"type": "token", "prompt_token_ids": prompt_token_ids}
        request_id = f"generate-{next(self._numbers)}"
        stream: AsyncGenerator[Any, None] = self.async_llm.generate(
            prompt, params, request_id, lora_request=lora_request
        )
        return stream

    async def _count(self, method: str, *arguments: object) -> Counters:
        counters: Counters = await self.async_llm.engine_core.call_utility_async(method, *arguments)
        return counters

    def _admit_everything(self) -> None:
        from vllm.exceptions import VLLMValidationError

        processor = self.async_llm.input_processor
        process = processor.process_inputs
        vocabulary = self.async_llm.model_config.get_vocab_size()

        def admit(*args: Any, **kwargs: Any) -> Any:
            try:
                request = process(*args, **kwargs)
            except (OverflowError, UnicodeEncodeError, TypeError) as error:
                raise VLLMValidationError(f"the request holds what is no text or number: {error}") from error
            if request.sampling_params is not None:
                admission.check_sampling(request.sampling_params, vocabulary)
            adapter = request.lora_request
            if adapter is not None and not self.serves_adapter(adapter.lora_name):
                raise VLLMValidationError(f"model: adapter {adapter.lora_name!r} is not served any more; ask again")
            if self._salt is not None:
                request.cache_salt = f"{self._salt}:{request.cache_salt or ''}"
            return request

        processor.process_inputs = admit
