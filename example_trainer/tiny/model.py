"""The tiny model itself: a two-layer Qwen2 with embeddings of its own at both ends, in fp32.

They are untied, because an inference server that packs the output layer may keep a stale copy of a tied one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

if TYPE_CHECKING:
    from collections.abc import Sequence

CONTEXT_LENGTH = 1024
PADDED_VOCABULARY_SIZE = 384


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Return a fresh model; the caller seeds torch."""
    config = Qwen2Config(
        vocab_size=PADDED_VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=False,
        initializer_range=0.04,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None
    )
    return model


@torch.no_grad()
def generate_texts(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    *,
    temperature: float,
    max_new_tokens: int = 34,
) -> list[str]:
    """Return one completion for each prompt, all sampled step by step in one batch; temperature 0 is greedy."""
    inputs = tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left")
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=max_new_tokens,
        **sampling,
    )
    completions = cast("torch.Tensor", output)[:, inputs["input_ids"].shape[1] :]
    return list(tokenizer.batch_decode(completions, skip_special_tokens=True))
