"""Answers judged by another model, and answers with a teacher's logprobs."""

from __future__ import annotations

import json
import re

import pytest

from environments.distill_server import DistillEnv, DistillEnvConfig
from environments.judge_server import JudgeEnv, JudgeEnvConfig, VerdictUnreadable
from environments.sdk.config import APIServerConfig
from environments.sdk.errors import GoldMissing
from environments.sdk.runtime.cli import read_command
from environments.sdk.runtime.commands import evaluate_alone, process, validate
from environments.sdk.server_manager import ServerManager
from environments.sdk.testing import FakeInference, InProcess

pytestmark = pytest.mark.anyio

ANSWERS = ["bad", "good answer", "very good answer"]
SERVER = APIServerConfig(server_type="vllm", base_url="http://fake/v1")
TEACHER = APIServerConfig(server_type="vllm", base_url="http://teacher/v1")


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": "Say something good.", "response": "good answer"}) + "\n")
    return path


def managed(env, respond):
    fake = FakeInference(lambda prompt, index: [*env.tokenizer.encode(respond(prompt, index)), 1], end=1)
    return ServerManager([SERVER], load_tokenizer=lambda: env.tokenizer, transport=InProcess(fake)), fake


@pytest.fixture
def make(tokenizer_folder, data):
    """Return an environment whose judge prefers longer answers, and the count of requested verdicts."""

    async def build(verdict, **settings):
        config = JudgeEnvConfig(
            data_path=data, val_data_path=data, tokenizer_name=str(tokenizer_folder), group_size=3, **settings
        )
        env = JudgeEnv(config, SERVER)
        env.server, _ = managed(env, lambda _, index: ANSWERS[index])
        await env.setup()
        env.judge, judge = managed(env, lambda prompt, _: verdict(env.tokenizer.decode(prompt)))
        return env, judge

    return build


def prefer_longer(text):
    first, second = re.search(r"Answer A:\n(.*)\n\nAnswer B:\n(.*)\n\nGive", text).groups()
    return f"By length: [[{'A' if len(first) > len(second) else 'B'}]]"


async def test_validate_says_that_a_judge_cannot_be_checked_and_asks_none(make):
    env, judge = await make(prefer_longer)
    with pytest.raises(GoldMissing, match="another model's opinion"):
        await validate(env)
    assert judge.requests == []


@pytest.mark.parametrize(("both", "requests"), [(True, 6), (False, 3)])
async def test_answers_are_worth_the_share_of_comparisons_that_they_win(make, both, requests):
    env, judge = await make(prefer_longer, judge_both_orders=both)
    group, _ = await env.collect_trajectories(await env.get_next_item())
    assert group["scores"] == [0.0, 0.5, 1.0]
    assert len(judge.requests) == requests
    assert len(group["tokens"]) == 3


async def test_a_judge_that_prefers_a_place_tells_nothing_apart(make):
    env, _ = await make(lambda _: "[[A]]")
    group, _ = await env.collect_trajectories(await env.get_next_item())
    assert group["scores"] == [0.5] * 3


async def test_a_comparison_without_a_verdict_is_a_tie(make):
    env, _ = await make(lambda _: "Both are fine.")
    group, _ = await env.collect_trajectories(await env.get_next_item())
    assert group["scores"] == [0.5] * 3


async def test_marks_go_from_nothing_to_one(make):
    env, judge = await make(lambda text: f"[[3]] no, [[{10 if 'very' in text else 1}]]", judge_method="marks")
    group, _ = await env.collect_trajectories(await env.get_next_item())
    assert group["scores"] == [0.0, 0.0, 1.0]
    assert len(judge.requests) == 3


async def test_a_mark_that_cannot_be_read_is_never_a_score(make):
    env, _ = await make(lambda _: "eleven [[11]]", judge_method="marks")
    with pytest.raises(ExceptionGroup) as failure:
        await env.collect_trajectories(await env.get_next_item())
    assert failure.group_contains(VerdictUnreadable, match="'11'")


async def test_reasons_that_were_cut_off_hold_no_verdict(make):
    env, judge = await make(lambda _: "")
    judge.respond = lambda *_: env.tokenizer.encode("It may end with a mark like [[5]] or with [[A]], so")
    assert await env._prefers({"prompt": "?", "completion": "x"}, {"completion": "y"}) == 0.5
    with pytest.raises(VerdictUnreadable, match="judge_max_tokens"):
        await env.mark(await env.get_next_item(), "x")


async def test_an_evaluation_compares_with_the_reference(make, tmp_path):
    env, _ = await make(prefer_longer, data_dir_to_save_evals=str(tmp_path / "evals"))
    setup_judge = env.judge

    async def keep_judge():
        env.held_out = env.load_held_out()
        env.judge = setup_judge

    env.setup = keep_judge
    await evaluate_alone(env)
    document = json.loads((tmp_path / "evals/metrics.json").read_text())
    assert document["results"]["all"]["eval/judged"] == 0.0
    assert document["config_general"]["generation_parameters"]["max_new_tokens"] == env.config.max_new_tokens == 512


async def test_without_a_server_of_its_own_the_model_judges_itself(tokenizer_folder, data):
    env = JudgeEnv(JudgeEnvConfig(data_path=data, val_data_path=data, tokenizer_name=str(tokenizer_folder)), SERVER)
    await env.setup()
    assert env.judge is env.server


async def test_the_judges_key_comes_from_the_environment_alone(tokenizer_folder, data, monkeypatch):
    monkeypatch.setenv("ATROPOS_JUDGE_API_KEY", "secret")
    config = JudgeEnvConfig(data_path=data, val_data_path=data, judge_base_url="http://judge/v1")
    env = JudgeEnv(config, SERVER)
    await env.setup()
    assert env.judge.config.api_key == "secret"
    assert "secret" not in config.model_dump_json()


async def test_a_teachers_logprobs_stand_beside_every_token(tokenizer_folder, tmp_path, math_verifier, monkeypatch):
    monkeypatch.setattr("environments.rewards.math.MathVerifier", lambda: math_verifier)
    data, path = tmp_path / "data.jsonl", tmp_path / "groups.jsonl"
    data.write_text(json.dumps({"question": "6 * 7?", "answer": "42"}) + "\n")
    config = DistillEnvConfig(
        data_path=data,
        val_data_path=data,
        tokenizer_name=str(tokenizer_folder),
        group_size=2,
        total_steps=1,
        teacher_enabled=True,
        teacher_top_k=2,
        data_path_to_save_groups=str(path),
    )
    env = DistillEnv(config, SERVER, teacher_server_configs=TEACHER)
    env.server, _ = managed(env, lambda _, index: f"\\boxed{{{41 + index}}}")

    async def get_logprobs(*, input_ids, top_k, split):
        assert (top_k, split) == (2, "train")
        positions = [[[token, 3], [-0.5, -1.5]] for token in input_ids]
        return {
            "prompt_tokens": input_ids,
            "prompt_topk_token_ids": [[], *(ids for ids, _ in positions[1:])],
            "prompt_topk_logprobs": [[], *(values for _, values in positions[1:])],
        }

    monkeypatch.setattr(env.teacher_server, "get_logprobs", get_logprobs)
    await process(env)
    group = json.loads(path.read_text())
    assert group["scores"] == [-1.0, 1.0]
    for tokens, ids, values in zip(group["tokens"], group["distill_token_ids"], group["distill_logprobs"], strict=True):
        assert [one[0] for one in ids[1:]] == tokens[1:]
        assert len(values) == len(tokens)


async def test_a_teacher_tells_the_sampled_token_also_where_it_is_none_of_its_most_likely(
    tokenizer_folder, tmp_path, monkeypatch
):
    config = DistillEnvConfig(tokenizer_name=str(tokenizer_folder), teacher_top_k=2, teacher_enabled=True)
    env = DistillEnv(config, SERVER, teacher_server_configs=TEACHER)

    async def get_logprobs(*, input_ids, top_k, split):
        return {
            "prompt_tokens": input_ids,
            "prompt_topk_token_ids": [[], [3, 4], [3, 4]],
            "prompt_topk_logprobs": [[], [-0.5, -1.5], [-0.5, -1.5]],
            "prompt_logprobs": [None, -9.0, -1.5],
        }

    monkeypatch.setattr(env.teacher_server, "get_logprobs", get_logprobs)
    sent = await env._with_teacher_logprobs({"tokens": [[7, 8, 4]]})
    assert sent["distill_token_ids"] == [[[], [3, 4, 8], [3, 4]]]
    assert sent["distill_logprobs"] == [[[], [-0.5, -1.5, -9.0], [-0.5, -1.5]]]


def test_the_teacher_is_named_on_the_command_line():
    command = read_command(DistillEnv, "serve", ["--teacher.base_url", "http://teacher/v1"])
    assert command.teachers[0].base_url == "http://teacher/v1"
    assert command.env.teacher_top_k == 8


def test_groups_with_equal_scores_reach_the_student_since_the_teacher_teaches_from_them_too():
    assert not DistillEnv.config_init()[0].ensure_scores_are_not_same
