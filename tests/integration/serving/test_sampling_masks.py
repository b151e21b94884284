"""Truncated samples of the real vLLM get their own logprobs again in the trainer, by way of session and group."""

from __future__ import annotations

import asyncio

import pytest

from atropos_api.wire import Batch
from environments.sdk.config import APIServerConfig
from environments.sdk.groups import scored_group, to_wire
from environments.sdk.inference.vllm import VllmServer
from environments.sdk.session.session import ManagedSession
from environments.sdk.session.tokens_and_masks import SampleLog

pytestmark = pytest.mark.vllm

PROMPT = [5, 6, 7, 8]


async def sample(url, tokenizer, **truncation):
    server = VllmServer(APIServerConfig(server_type="vllm", base_url=f"{url}/v1"))
    session = ManagedSession(server, tokenizer, allow_truncated_sampling=True, sampling_mask_limit=250)
    await session.completion(input_ids=PROMPT, n=4, max_tokens=24, ignore_eos=True, temperature=0.8, **truncation)
    await server.channel.aclose()
    return session.get_state()["nodes"]


@pytest.fixture(scope="module")
def learner(plain_server):
    from example_trainer.config import TrainingConfig
    from example_trainer.model import load_policy
    from example_trainer.modeling.loading import PolicyOptions
    from example_trainer.step.train_step import make_train_step

    config = TrainingConfig(model_name=str(plain_server.model), dtype="float32", optimizer="adamw", seq_len=64)
    policy = load_policy(PolicyOptions(model_name=str(plain_server.model), dtype="float32", device="cpu"))
    return make_train_step(config, policy)


@pytest.mark.parametrize("truncation", [{"top_p": 0.6}, {"top_k": 7}, {"min_p": 0.5}, {"top_k": 200, "top_p": 0.9}])
def test_trainer_and_sampler_agree_over_the_sampling_masks(plain_server, learner, truncation):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(plain_server.model)
    nodes = asyncio.run(sample(plain_server.url, tokenizer, **truncation))
    group = to_wire(scored_group(nodes, [1.0, 0.0, 0.5, 0.25]), SampleLog("train"))
    assert group.generation_params["truncated_sampling"]
    prepared = learner.prepare(Batch(number=1, run_id="r", groups=[group]))
    training = prepared.training
    assert prepared.metrics["data/sampling_mask_fraction"] == 1.0
    scored = learner.learner.score(training.rows, training.targets)
    assert (scored - training.targets.rollout_logprobs).abs().max() < 1e-3
    group.sampling_masks = None
    plain = learner.prepare(Batch(number=1, run_id="r", groups=[group])).training
    unmasked = learner.learner.score(plain.rows, plain.targets) - plain.targets.rollout_logprobs
    assert unmasked.abs().mean() > 0.05, "without them the sampler's logprobs are of another distribution"
