"""A stock vLLM server: it is asked to sample from the model itself, whatever defaults it has."""

import pytest

from environments.sdk.inference.sampling import Sampling

from .test_inference_servers import PlainVllm, config, manager

pytestmark = pytest.mark.anyio


async def test_a_plain_vllm_is_told_what_truncates_nothing_so_that_no_default_of_the_model_does(tokenizer):
    """It takes what a request leaves out from the model's generation_config.json; its samples would not be marked."""
    plain = PlainVllm()
    servers = manager(tokenizer, config("vllm", model_name="base"), transport=plain)
    for more in ({}, {"top_p": 0.9}):
        await servers.servers[0].generate([3, 4], Sampling(max_tokens=2, temperature=0.7, more=more), "train")
    (_, whole), (_, truncated) = plain.asked
    neutral = {"top_p": 1, "top_k": 0, "min_p": 0}
    neutral |= {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
    assert {name: whole[name] for name in neutral} == neutral
    assert {name: truncated[name] for name in neutral} == neutral | {"top_p": 0.9}
    assert (whole["temperature"], whole["max_tokens"]) == (0.7, 2)
