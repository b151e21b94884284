"""GSM8K under a prompt template, from a real vLLM into a file: its logprobs are the model's own.

`served/` tests the other servers, all at once, with a real vLLM.
"""

from __future__ import annotations

import json
import shutil

import msgspec
import pytest

from atropos_api.wire.groups import Group
from environments.gsm8k_server import GSM8kEnv, GSM8kEnvConfig
from environments.sdk.config import APIServerConfig
from environments.sdk.errors import TokenizerMismatch
from environments.sdk.inference.server import compare_vocabulary
from environments.sdk.runtime.commands import process
from environments.sdk.server_manager import ServerManager
from environments.sdk.tokenizer import load_tokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.vllm]


@pytest.fixture
def env(tiny_qwen2, plain_server, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"question": "What is 35 + 7?", "answer": "42"}) + "\n")
    config = GSM8kEnvConfig(
        data_path=data,
        prompt_template="r1_zero",
        max_token_length=200,
        tokenizer_name=str(tiny_qwen2),
        group_size=4,
        total_steps=1,
        ensure_scores_are_not_same=False,
        data_path_to_save_groups=str(tmp_path / "groups.jsonl"),
        use_wandb=False,
    )
    return GSM8kEnv(config, APIServerConfig(server_type="vllm", base_url=f"{plain_server.url}/v1"))


async def collect(env):
    """Collect one group into a file."""
    try:
        await process(env)
    finally:
        await env.server.aclose()


def largest_error(group, reference):
    """Return the largest |logprob sent - logprob recomputed| of the trained tokens, and their number."""
    errors = []
    for tokens, mask, logprobs in zip(group.tokens, group.masks, group.inference_logprobs, strict=True):
        expected = reference.logprobs(reference.base, tokens[:1], tokens[1:])
        for position, value in enumerate(mask):
            assert (value == -100) == (logprobs[position] == 1.0)
            if value != -100:
                assert value == tokens[position]
                errors.append(abs(logprobs[position] - expected[position - 1]))
    return max(errors), len(errors)


async def test_the_trainer_gets_the_logprobs_that_the_model_gives(env, reference, tmp_path):
    """R5: they differ in fp32 by at most 1e-4."""
    await collect(env)
    group = msgspec.json.decode((tmp_path / "groups.jsonl").read_bytes(), type=Group)
    error, count = largest_error(group, reference)
    assert error <= 1e-4
    assert count > 4
    assert group.generation_params == {"temperature": 1.0}
    assert {version for spans in group.policy_versions for _, _, version in spans} == {7}


@pytest.mark.parametrize("dialect", ["compact", "plain"])
async def test_what_is_streamed_is_what_is_answered_at_once(tiny_qwen2, plain_server, dialect):
    """Both our `/generate` and vLLM's own route, as on a plain vLLM, are compared."""
    server = APIServerConfig(server_type="vllm", base_url=f"{plain_server.url}/v1", model_name=str(tiny_qwen2))
    manager = ServerManager([server], load_tokenizer=lambda: load_tokenizer(str(tiny_qwen2)))
    manager.servers[0]._dialect = dialect
    if dialect == "plain":
        manager.follow(str(tiny_qwen2), 7)  # which tells the version there
    pieces = {0: [], 1: []}
    asked = {"prompt": "What is 35 + 7?", "max_tokens": 40, "seed": 5, "n": 2}
    try:
        async with manager.managed_server() as whole, manager.managed_server() as streamed:
            await whole.completion(**asked)
            answer = await streamed.completion(**asked, on_delta=lambda delta: pieces[delta.index].append(delta))
    finally:
        await manager.aclose()
    for index, (once, bit_by_bit) in enumerate(zip(whole.nodes, streamed.nodes, strict=True)):
        assert bit_by_bit.tokens == once.tokens
        assert bit_by_bit.policy_versions == once.policy_versions
        assert bit_by_bit.logprobs == pytest.approx(once.logprobs, abs=1e-4)
        assert len(pieces[index]) > 10
        assert "".join(piece.text for piece in pieces[index]) == answer.choices[index].text
        assert pieces[index][-1].finish_reason == bit_by_bit.finish_reason
    assert {version for node in streamed.nodes for _, _, version in node.policy_versions} == {7}


@pytest.fixture
def swapped(tiny_qwen2, tmp_path):
    """Return the model's tokenizer with two ids exchanged."""
    folder = tmp_path / "swapped"
    shutil.copytree(tiny_qwen2, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    document = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return folder


async def test_a_tokenizer_with_swapped_ids_is_refused_by_fingerprint_and_by_text(
    env, swapped, tiny_qwen2, plain_server
):
    env.config.tokenizer_name = str(swapped)
    with pytest.raises(TokenizerMismatch, match="their vocabularies differ"):
        await collect(env)
    config = APIServerConfig(server_type="vllm", base_url=f"{plain_server.url}/v1")
    manager = ServerManager([config], load_tokenizer=lambda: None)
    try:
        await compare_vocabulary(manager.servers[0], load_tokenizer(str(tiny_qwen2)), None, None)
        with pytest.raises(TokenizerMismatch, match="is token"):
            await compare_vocabulary(manager.servers[0], load_tokenizer(str(swapped)), None, None)
    finally:
        await manager.aclose()


async def test_where_no_tokenizer_is_named_it_is_that_of_the_served_model(env, tiny_qwen2):
    env.config.tokenizer_name = None
    await collect(env)
    assert env.config.tokenizer_name == str(tiny_qwen2)
