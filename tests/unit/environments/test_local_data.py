"""Every server with questions takes them from a local file, as lines or as Parquet and in both usual forms."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from environments.arithmetic_server import ArithmeticEnv
from environments.distill_server import DistillEnv
from environments.gsm8k_server import GSM8kEnv
from environments.judge_server import JudgeEnv
from environments.math_server_zero import MathZeroEnv
from environments.sdk.runtime.cli import read_command
from environments.tool_server import ToolEnv

pytestmark = pytest.mark.anyio

QUESTIONS = [("What is 3 + 4?", "7"), ("What is 2 + 3?", "5")]
SERVERS = (ArithmeticEnv, GSM8kEnv, MathZeroEnv, ToolEnv, JudgeEnv, DistillEnv)


@pytest.fixture(params=[("question", "answer"), ("prompt", "response")], ids="/".join)
def columns(request):
    return request.param


@pytest.fixture(params=["jsonl", "parquet"])
def file(request, columns, tmp_path):
    path = tmp_path / f"questions.{request.param}"
    rows = [dict(zip(columns, pair, strict=True)) for pair in QUESTIONS]
    if request.param == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("cls", SERVERS, ids=lambda cls: cls.name)
async def test_questions_come_from_a_local_file(cls, file, tokenizer_folder):
    flags = [f"--env.{name}={file}" for name in ("data_path", "val_data_path")]
    command = read_command(cls, "serve", [*flags, "--env.tokenizer_name", str(tokenizer_folder)])
    env = cls(command.env, command.servers)
    try:
        await env.setup()
        drawn = [await env.get_next_item() for _ in QUESTIONS]
        assert sorted((item.question, str(item.answer)) for item in drawn) == sorted(QUESTIONS)
        assert sorted((item.question, str(item.answer)) for item in env.held_out) == sorted(QUESTIONS)
    finally:
        await env.aclose()


@pytest.mark.parametrize("cls", [ArithmeticEnv, GSM8kEnv], ids=lambda cls: cls.name)
async def test_no_question_of_a_file_is_both_trained_and_evaluated_on(cls, tmp_path, tokenizer_folder):
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"What is {n} + 1?", "answer": str(n + 1)}) for n in range(40)))
    command = read_command(cls, "serve", ["--env.data_path", str(path), "--env.tokenizer_name", str(tokenizer_folder)])
    env = cls(command.env, command.servers)
    try:
        await env.setup()
        drawn = {(await env.get_next_item()).question for _ in range(38)}
        assert len(drawn) == 38
        assert {item.question for item in env.held_out}.isdisjoint(drawn)
        assert all(item.question.endswith("+ 1?") for item in env.held_out)
    finally:
        await env.aclose()


@pytest.mark.parametrize("cls", [ArithmeticEnv, GSM8kEnv, MathZeroEnv], ids=lambda cls: cls.name)
async def test_a_run_that_is_not_evaluated_trains_on_the_whole_file(cls, tmp_path, tokenizer_folder):
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"question": "What is 1 + 1?", "answer": "2"}))
    flags = ["--env.steps_per_eval=0", "--env.eval_at_start=false", "--env.eval_at_end=false"]
    flags += [f"--env.data_path={path}", f"--env.tokenizer_name={tokenizer_folder}"]
    command = read_command(cls, "serve", flags)
    env = cls(command.env, command.servers)
    try:
        await env.setup()
        assert (await env.get_next_item()).question == "What is 1 + 1?"
        assert not env.held_out
    finally:
        await env.aclose()


async def test_math_holds_out_no_question_since_its_evaluation_sets_are_others(tmp_path, tokenizer_folder):
    train, test = tmp_path / "train.jsonl", tmp_path / "other.jsonl"
    train.write_text("\n".join(json.dumps({"question": f"{n} + 1?", "answer": str(n + 1)}) for n in range(40)))
    test.write_text(json.dumps({"question": "What is 1 + 1?", "answer": "2"}))
    flags = [f"--env.data_path={train}", f"--env.tokenizer_name={tokenizer_folder}"]
    flags += ["--env.eval_sets=amc23", f"--env.amc23={test}"]
    command = read_command(MathZeroEnv, "serve", flags)
    env = MathZeroEnv(command.env, command.servers)
    try:
        await env.setup()
        assert len({(await env.get_next_item()).question for _ in range(40)}) == 40
        assert [item.question for item in env.held_out] == ["What is 1 + 1?"]
    finally:
        await env.aclose()
