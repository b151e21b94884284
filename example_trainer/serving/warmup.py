"""The first batches of an engine are slow; they are run before the server says that it is healthy."""

from __future__ import annotations

import asyncio

from example_trainer.serving.engine import EngineAdapter

_SEQUENCES = 32
_TOKENS = 8


async def warm_up(engine: EngineAdapter) -> None:
    """Decode a few tokens for many sequences, sampled with logprobs as training requests are."""
    model_config = engine.async_llm.model_config
    vocabulary = model_config.get_vocab_size()
    tokens = max(1, min(_TOKENS, model_config.max_model_len - 2))
    await asyncio.gather(*(sample_tokens(engine, [number % vocabulary], tokens) for number in range(_SEQUENCES)))


async def sample_tokens(engine: EngineAdapter, prompt: list[int], count: int) -> None:
    """Have the engine sample `count` tokens and throw them away."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=count, logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, ignore_eos=True
    )
    async for _ in engine.generate(prompt, params):
        pass
