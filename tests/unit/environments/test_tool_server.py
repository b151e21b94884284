"""The tool environment: several turns in a sequence, the tool's text untrained, the last answer scored."""

from __future__ import annotations

import json

import pytest

from environments.sdk.config import APIServerConfig
from environments.sdk.runtime.commands import evaluate_alone
from environments.sdk.server_manager import ServerManager
from environments.sdk.testing import FakeInference, InProcess
from environments.sdk.tools import FunctionCall, ToolCall
from environments.tool_server import ToolEnv, ToolEnvConfig

pytestmark = pytest.mark.anyio


def call(code: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'python', 'arguments': {'code': code}})}\n</tool_call>"


@pytest.fixture
async def make(tokenizer_folder, tmp_path, math_verifier, monkeypatch):
    """Return an environment whose model gives these turns in every chat, and its inference server."""

    async def build(turns, **settings):
        monkeypatch.setattr("environments.rewards.math.MathVerifier", lambda: math_verifier)
        data = tmp_path / "data.jsonl"
        data.write_text(json.dumps({"question": "What is 35 + 7?", "answer": "42"}) + "\n")
        config = ToolEnvConfig(
            data_path=data,
            val_data_path=data,
            tokenizer_name=str(tokenizer_folder),
            group_size=2,
            max_token_length=3000,
            # Code is isolated where that is possible; this test does not need it.
            require_isolation=False,
            **settings,
        )
        server = APIServerConfig(server_type="vllm", base_url="http://fake/v1")
        env = ToolEnv(config, server)

        def respond(prompt, index):
            return [*env.tokenizer.encode(turns[env.tokenizer.decode(prompt).count("<|assistant|>") - 1]), 1]

        fake = FakeInference(respond, end=1)
        env.server = ServerManager([server], load_tokenizer=lambda: env.tokenizer, transport=InProcess(fake))
        await env.setup()
        return env, fake

    return build


def split(env, group, row):
    """Return the pieces of text that are trained on, and those that are not."""
    trained, untrained, last = [], [], None
    for token, mask in zip(group["tokens"][row], group["masks"][row], strict=True):
        into = trained if mask != -100 else untrained
        if last is not into:
            into.append([])
        into[-1].append(token)
        last = into
    return ["".join(env.tokenizer.decode(p)) for p in trained], ["".join(env.tokenizer.decode(p)) for p in untrained]


async def test_turns_and_results_become_one_sequence_of_which_the_models_words_are_trained(make):
    turns = [f"I calculate. {call('print(35 + 7)')}", f"Again. {call('1/0')}", "So it is \\boxed{42}"]
    env, fake = await make(turns)
    group, _ = await env.collect_trajectories(await env.get_next_item())
    assert group["scores"] == [1.0, 1.0]
    for row in range(2):
        trained, untrained = split(env, group, row)
        assert trained == [f"{turn}<|end|>" for turn in turns]
        assert "42" in untrained[1]
        assert "ZeroDivisionError" in untrained[2]
    assert len(fake.requests) == 6


async def test_a_template_without_tools_is_helped_by_the_system_prompt(make):
    env, fake = await make(["\\boxed{42}"])
    await env.collect_trajectories(await env.get_next_item())
    assert '{"name": "python", "arguments"' in env.tokenizer.decode(fake.requests[0]["prompt"]["prompt_token_ids"])


@pytest.mark.parametrize(
    ("turns", "score", "requests"),
    [
        (["\\boxed{41}"], -1.0, 1),
        (["\\boxed{42\\%}"], 1.0, 1),
        ([f"\\boxed{{42}} {call('1')}"] * 5, 1.0, 2),
        ([call("1")] * 5, -1.0, 2),
        (['<tool_call>{"name": "shell", "arguments": {"code": 1}}</tool_call>', "\\boxed{42}"], 1.0, 2),
    ],
    ids=["wrong", "in percent", "answered beside a call", "never answered", "no such tool"],
)
async def test_only_the_last_word_counts(make, turns, score, requests):
    env, fake = await make(turns, max_turns=2)
    group, _ = await env.collect_trajectories(await env.get_next_item())
    assert group["scores"] == [score] * 2
    assert len(fake.requests) == 2 * requests


@pytest.mark.parametrize(
    "arguments", ["{", '{"code": ' + "9" * 5000 + "}", "[" * 100_000], ids=["cut off", "long", "deep"]
)
async def test_a_call_whose_arguments_cannot_be_read_is_told_so(make, arguments):
    env, _ = await make(["\\boxed{42}"])
    result = await env.call(ToolCall(FunctionCall("python", arguments)))
    assert result["content"].startswith("Error: the only tool is python")


async def test_a_chat_that_is_full_ends_and_no_sequence_is_longer_than_the_trainer_takes(make):
    env, fake = await make([call("print('x' * 3900)"), "\\boxed{42}"])
    env.max_token_len = 2000
    group, _ = await env.collect_trajectories(await env.get_next_item())
    assert group["scores"] == [-1.0, -1.0]
    assert len(fake.requests) == 2
    assert all(len(tokens) < 2000 for tokens in group["tokens"])


async def test_a_first_answer_without_end_is_no_longer_than_the_trainer_takes(make):
    env, fake = await make(["x" * 4000], max_new_tokens=3000)
    env.max_token_len = 2000
    group, _ = await env.collect_trajectories(await env.get_next_item())
    assert len(fake.requests) == 2
    assert [len(tokens) for tokens in group["tokens"]] == [1999, 1999]


async def test_an_evaluation_tells_how_often_the_tool_was_called(make, tmp_path):
    env, _ = await make([call("35 + 7"), "\\boxed{42}"], data_dir_to_save_evals=str(tmp_path / "evals"))
    await evaluate_alone(env)
    document = json.loads((tmp_path / "evals/metrics.json").read_text())
    assert document["results"]["all"]["eval/accuracy"] == 1.0
    assert document["config_general"]["generation_parameters"]["max_new_tokens"] == env.config.max_new_tokens
    assert json.loads((tmp_path / "evals/samples.jsonl").read_text())["tool_calls"] == 1
