"""Groups of the shipped environments from a real vLLM: their logprobs are those that the model itself gives."""

from __future__ import annotations

import json
import shutil

import msgspec
import pytest

from atropos_api.wire.groups import Group
from environments.gsm8k_server import GSM8kEnv
from environments.math_server_zero import MathZeroEnv
from environments.sdk.config import APIServerConfig
from environments.sdk.process import process
from environments.sdk.tools import FunctionCall, ToolCall
from environments.tool_server import ToolEnv

pytestmark = [pytest.mark.anyio, pytest.mark.vllm]

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '[' + message['role'] + ']' + (message['content'] or '') + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


class AlwaysCalls:
    """A parser that reads a call out of anything: a random model writes none of its own."""

    def parse(self, text):
        return text, [ToolCall(FunctionCall("python", json.dumps({"code": "print(6 * 7)"})))]


@pytest.fixture
def make(tiny_qwen2, plain_server, tmp_path):
    def build(cls, **settings):
        folder = tmp_path / "tokenizer"
        shutil.copytree(tiny_qwen2, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        data = tmp_path / "data.jsonl"
        data.write_text(json.dumps({"question": "What is 35 + 7?", "answer": "42"}) + "\n")
        config = cls.env_config_cls(
            data_path=data,
            tokenizer_name=str(folder),
            group_size=4,
            total_steps=1,
            ensure_scores_are_not_same=False,
            data_path_to_save_groups=str(tmp_path / "groups.jsonl"),
            use_wandb=False,
            **settings,
        )
        return cls(config, APIServerConfig(server_type="vllm", base_url=f"{plain_server.url}/v1"))

    return build


async def collect(env):
    """One group into a file."""
    try:
        await process(env)
    finally:
        await env.server.aclose()


def largest_error(group, reference):
    """|logprob sent - logprob recomputed| over all trained tokens, and how many they are."""
    errors = []
    for tokens, mask, logprobs in zip(group.tokens, group.masks, group.inference_logprobs, strict=True):
        expected = reference.logprobs(reference.base, tokens[:1], tokens[1:])
        for position, value in enumerate(mask):
            assert (value == -100) == (logprobs[position] == 1.0)
            if value != -100:
                assert value == tokens[position]
                errors.append(abs(logprobs[position] - expected[position - 1]))
    return max(errors), len(errors)


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (GSM8kEnv, {"max_token_length": 200}),
        (GSM8kEnv, {"max_token_length": 200, "prompt_template": "r1_zero"}),
        (MathZeroEnv, {"max_token_length": 1000, "start_tok_length": 200}),
        (ToolEnv, {"max_token_length": 3000, "max_new_tokens": 40, "max_turns": 3}),
    ],
    ids=["gsm8k", "gsm8k with a template", "math_zero", "tools over three turns"],
)
async def test_the_trainer_gets_the_logprobs_that_the_model_gives(make, reference, tmp_path, cls, settings):
    """R5: in fp32 within 1e-4."""
    env = make(cls, **settings)
    env.server.tool_parser = AlwaysCalls()
    await collect(env)
    group = msgspec.json.decode((tmp_path / "groups.jsonl").read_bytes(), type=Group)
    error, count = largest_error(group, reference)
    assert error <= 1e-4
    assert count > 4
    assert group.generation_params == {"temperature": 1.0}
    assert {version for spans in group.policy_versions for _, _, version in spans} == {7}
    if cls is ToolEnv:
        texts = [env.tokenizer.decode(tokens) for tokens in group.tokens]
        assert all(text.count("[tool]42") == 2 for text in texts)
