"""The first batches of an engine are slow; they are run before the server says that it is healthy."""

from __future__ import annotations

import asyncio

from example_trainer.serving.engine import EngineAdapter

_SEQUENCES = 32
_TOKENS = 8


async def warm_up(engine: EngineAdapter) -> None:
    """Decode a few tokens for many sequences, sampled with logprobs as training requests are."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    limit = engine.async_llm.model_config.max_model_len
    vocabulary = engine.async_llm.model_config.get_vocab_size()
    tokens = max(1, min(_TOKENS, limit - 2))

    async def one(number: int) -> None:
        params = SamplingParams(
            max_tokens=tokens, logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, ignore_eos=True
        )
        async for _ in engine.generate([number % vocabulary], params):
            pass

    await asyncio.gather(*(one(number) for number in range(_SEQUENCES)))
