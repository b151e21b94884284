"""The GSM8K and math environments on small data of their own: prompts, scores, masks and evaluations."""

from __future__ import annotations

import json
import math

import anyio
import pytest

from environments.gsm8k_server import GSM8kEnv
from environments.math_server_zero import EVAL_SETS, STOPS, MathZeroEnv, MathZeroEnvConfig
from environments.sdk.config import APIServerConfig
from environments.sdk.errors import ItemDropped
from environments.sdk.runtime.commands import evaluate_alone, prepare, process, validate
from environments.sdk.server_manager import ServerManager
from environments.sdk.session.tokens_and_masks import record_samples
from environments.sdk.testing import FakeInference, InProcess
from environments.tasks.question_env import PromptTemplateUnusable

pytestmark = pytest.mark.anyio

QUESTIONS = [
    {"question": "Ann has 35 pens and gets 7. How many now?", "answer": "35+7=42\n#### 42"},
    {"question": "Bob has 50 cups and loses 8. How many now?", "answer": "50-8=42\n#### 42"},
]
RIGHT, WRONG, UNMARKED = "<think>so</think> \\boxed{42}", "<think>\\boxed{42}</think> \\boxed{41}", "it is 42"
ZERO_RIGHT = " so</think> <answer>\\boxed{42.0}</answer>"


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    return path


@pytest.fixture
def make(tokenizer_folder, data, math_verifier, monkeypatch):
    """Return an environment whose model gives these texts in turn, and its inference server."""

    def build(cls, config_cls, texts, *, unended=(), **settings):
        defaults = {
            "data_path": data,
            "val_data_path": data,
            "tokenizer_name": str(tokenizer_folder),
            "group_size": len(texts),
            "max_token_length": 3000,
            "use_wandb": False,
        }
        server = APIServerConfig(server_type="vllm", base_url="http://fake/v1")
        env = cls(config_cls(**{**defaults, **settings}), server)

        def respond(prompt, index):
            text = texts[index % len(texts)]
            return env.tokenizer.encode(text) + ([] if text in unended else [1])

        fake = FakeInference(respond, end=1)
        env.server = ServerManager([server], load_tokenizer=lambda: env.tokenizer, transport=InProcess(fake))
        return env, fake

    async def set_up(cls, *args, **kwargs):
        # Starting math-verify takes a second; all environments here share one.
        monkeypatch.setattr("environments.rewards.math.MathVerifier", lambda: math_verifier)
        env, fake = build(cls, cls.env_config_cls, *args, **kwargs)
        await env.setup()
        return env, fake

    return set_up


async def collect(env):
    group, backlog = await env.collect_trajectories(await env.get_next_item())
    assert backlog == []
    return group


async def test_a_right_boxed_number_earns_one_and_all_else_minus_one(make):
    env, fake = await make(GSM8kEnv, [RIGHT, WRONG, UNMARKED, "\\boxed{42 \\text{ pens}}"])
    group = await collect(env)
    assert group["scores"] == [1.0, -1.0, -1.0, 1.0]
    prompt = env.tokenizer.decode(fake.requests[0]["prompt"]["prompt_token_ids"])
    assert "3000 tokens" in prompt
    assert "How many now?" in prompt
    assert fake.requests[0]["max_tokens"] == 3000


@pytest.mark.parametrize("template", [None, "r1_zero"])
async def test_a_percentage_is_the_number_that_gsm8k_has_for_it(make, template):
    env, _ = await make(GSM8kEnv, [RIGHT], prompt_template=template)
    written = [r"50\%", "50%", "50 percent", r"50\text{ percent}", r"500\%", r"5000\%"]
    graded = await env.grade([env.write_answer(answer) for answer in written], "#### 50")
    assert [one.correct for one in graded] == [True] * 4 + [False] * 2
    (of_a_share,) = await env.grade([env.write_answer(r"50\%")], "#### 0.5")
    assert of_a_share.correct


async def test_an_evaluation_without_a_question_has_no_result(make, tmp_path, caplog):
    """It was reported as an accuracy of 0, of no answers."""
    folder = tmp_path / "evals"
    env, _ = await make(MathZeroEnv, [RIGHT], val_data_path=None, eval_sets=[], data_dir_to_save_evals=str(folder))
    assert env.held_out == []
    await env.evaluate()
    assert env.last_evaluation is None
    assert not folder.exists()
    assert "none of the evaluation's 0 questions could be judged: no result" in caplog.text


async def test_where_all_are_right_the_longer_answers_earn_less(make):
    """The reward is 1 up to half of the longest sequence, and falls linearly to 0 at its full length."""
    env, _ = await make(GSM8kEnv, [RIGHT, "x" * 60 + RIGHT], max_token_length=2000)
    assert (await collect(env))["scores"] == [1.0, 1.0]
    lengths = [len(tokens) for tokens in (await collect(env))["tokens"]]
    env.config.max_token_length = lengths[0] * 2
    group = await collect(env)
    limit = env.config.max_token_length
    assert group["scores"] == [1.0, pytest.approx(max(0.0, (limit - len(group["tokens"][1])) / (limit / 2)))]


async def test_no_answer_is_longer_than_the_trainer_takes(make):
    env, fake = await make(GSM8kEnv, [RIGHT, WRONG])
    await collect(env)
    env.max_token_len = len(fake.requests[0]["prompt"]["prompt_token_ids"]) + 51
    await collect(env)
    assert [request["max_tokens"] for request in fake.requests] == [3000, 50]


async def test_a_question_that_leaves_no_room_for_an_answer_is_dropped_with_the_reason(make):
    for cls in (GSM8kEnv, MathZeroEnv):
        env, fake = await make(cls, [RIGHT, WRONG])
        env.max_token_len = 40
        with pytest.raises(ItemDropped, match="leaves no room"):
            await collect(env)
        assert fake.requests == []


async def test_a_question_whose_answer_is_not_mathematics_is_dropped_with_the_reason(make, data):
    data.write_text(json.dumps({"question": "?", "answer": "\\boxed{}"}) + "\n")
    env, _ = await make(GSM8kEnv, [RIGHT, WRONG])
    with pytest.raises(ItemDropped, match="cannot be read as mathematics"):
        await collect(env)


async def test_a_template_makes_it_an_r1_zero_environment(make, tmp_path):
    template = tmp_path / "own.prompt"
    template.write_text("\ufeffQ {question} A <think>", encoding="utf-8")  # as editors on Windows begin a file
    texts = [ZERO_RIGHT, " so</think> <answer>41</answer>", " so</think> 42", "</answer>"]
    env, fake = await make(GSM8kEnv, texts, prompt_template=str(template), format_score=0.25)
    group = await collect(env)
    assert group["scores"] == [1.0, 0.25, 0.0, 0.0]
    prompt = env.tokenizer.decode(fake.requests[0]["prompt"]["prompt_token_ids"])
    assert prompt in {f"Q {question['question']} A <think>" for question in QUESTIONS}
    assert fake.requests[0]["stop"] == ["</answer>"]
    assert group["group_overrides"]["row"]["answer"] in {question["answer"] for question in QUESTIONS}


async def test_a_stop_string_that_the_server_cut_off_is_put_back(make):
    cut = ZERO_RIGHT.removesuffix("</answer>")
    env, fake = await make(GSM8kEnv, [cut], unended=[cut], prompt_template="r1_zero")
    fake.end = env.tokenizer.encode(cut)[-1]  # it ends with the reason "stop", as with a stop string
    assert (await collect(env))["scores"] == [1.0]


@pytest.mark.parametrize(("ending", "score"), [("", 1.0), ("</answer>", 1.0), (" User:", -1.0)])
async def test_an_answer_that_another_stop_string_ended_is_not_closed_for_the_model(make, ending, score):
    cut = ZERO_RIGHT.removesuffix("</answer>") + ending
    env, fake = await make(MathZeroEnv, [cut], unended=[cut])
    fake.end = env.tokenizer.encode(cut)[-1]  # it ends with the reason "stop", as with a stop string
    assert (await collect(env))["scores"] == [score]


@pytest.mark.parametrize(("name", "words"), [("missing.prompt", "math_zero, r1_zero"), ("no place", "no {question}")])
async def test_a_template_that_cannot_be_used_is_reported(make, tmp_path, name, words):
    (tmp_path / "no place").write_text("Question:")
    with pytest.raises(PromptTemplateUnusable, match=words):
        await make(GSM8kEnv, [RIGHT], prompt_template=str(tmp_path / name))


async def test_an_evaluation_reports_accuracy_form_and_answer(make, tmp_path):
    env, fake = await make(GSM8kEnv, [UNMARKED], data_dir_to_save_evals=str(tmp_path / "evals"), eval_temperature=0.6)
    await evaluate_alone(env)
    document = json.loads((tmp_path / "evals/metrics.json").read_text())
    assert document["config_general"]["generation_parameters"]["temperature"] == 0.6
    metrics = document["results"]["all"]
    assert {name: metrics[f"eval/{name}"] for name in ("accuracy", "percent_correct", "answer_reward")} == {
        "accuracy": 0.0,
        "percent_correct": 0.0,
        "answer_reward": 0.0,
    }
    assert metrics["eval/format_reward"] == 0.0
    assert len((tmp_path / "evals/samples.jsonl").read_text().splitlines()) == 2
    assert {request["temperature"] for request in fake.requests} == {0.6}


async def test_a_reference_that_is_not_mathematics_costs_an_evaluation_nothing_else(make, tmp_path, data, caplog):
    data.write_text(data.read_text() + json.dumps({"question": "?", "answer": "\\boxed{}"}) + "\n")
    env, _ = await make(GSM8kEnv, [RIGHT], data_dir_to_save_evals=str(tmp_path / "evals"))
    await evaluate_alone(env)
    assert json.loads((tmp_path / "evals/metrics.json").read_text())["results"]["all"]["eval/accuracy"] == 1.0
    assert len((tmp_path / "evals/samples.jsonl").read_text().splitlines()) == 2
    assert caplog.text.count("left out of the evaluation") == 1


async def test_an_evaluation_alone_needs_no_training_questions(make, tmp_path):
    env, _ = await make(GSM8kEnv, [RIGHT], data_dir_to_save_evals=str(tmp_path / "evals"))
    env.config.data_path = tmp_path / "missing.jsonl"
    await evaluate_alone(env)
    assert json.loads((tmp_path / "evals/metrics.json").read_text())["results"]["all"]["eval/accuracy"] == 1.0


async def test_questions_go_on_where_a_checkpoint_was_saved(make, tmp_path):
    first, _ = await make(GSM8kEnv, [RIGHT])
    drawn = [await first.get_next_item() for _ in range(3)]
    first.checkpoint_dir = str(tmp_path)
    first.save_checkpoint(step=1)
    resumed, _ = await make(GSM8kEnv, [RIGHT])
    resumed.checkpoint_dir, resumed.curr_step = str(tmp_path), 1
    resumed.load_checkpoint()
    assert [await resumed.get_next_item() for _ in range(3)] == [await first.get_next_item() for _ in range(3)]
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize("settings", [{}, {"prompt_template": "r1_zero"}])
async def test_gsm8k_validates_its_rewards(make, settings, capsys):
    env, _ = await make(GSM8kEnv, [RIGHT], **settings)
    assert await validate(env) == 0
    assert "2 of 2 items passed" in capsys.readouterr().out


async def test_groups_are_complete_in_a_file(make, tmp_path):
    path = tmp_path / "groups.jsonl"
    env, _ = await make(GSM8kEnv, [RIGHT, WRONG], total_steps=3, data_path_to_save_groups=str(path))
    await process(env)
    groups = [json.loads(line) for line in path.read_text().splitlines()]
    assert [group["scores"] for group in groups] == [[1.0, -1.0]] * 3
    for group in groups:
        for mask, logprobs in zip(group["masks"], group["inference_logprobs"], strict=True):
            assert [value == 1.0 for value in logprobs] == [value == -100 for value in mask]


async def test_math_reads_the_box_in_the_last_answer(make):
    texts = [ZERO_RIGHT, "\\boxed{42}", "<answer>\\boxed{42}</answer><answer>\\boxed{5}</answer>"]
    env, fake = await make(MathZeroEnv, texts)
    group = await collect(env)
    assert group["scores"] == [1.0, -1.0, -1.0]
    assert fake.requests[0]["stop"] == list(STOPS)
    assert env.tokenizer.decode(fake.requests[0]["prompt"]["prompt_token_ids"]).endswith("Assistant: <think>")


@pytest.mark.parametrize("masked", [True, False])
async def test_a_cut_off_answer_is_wrong_and_only_trained_on_where_wanted(make, masked):
    """R38: `overrides` has one entry for each rollout of the group."""
    env, _ = await make(MathZeroEnv, [ZERO_RIGHT, "\n" + ZERO_RIGHT], unended=["\n" + ZERO_RIGHT])
    env.config.mask_too_long_completions = masked
    group = await collect(env)
    assert group["scores"] == [1.0, -1.0]
    assert group.get("overrides") == ([{}, {"set_advantage_to_zero": True}] if masked else None)


async def test_a_right_answer_may_lose_by_its_length(make):
    env, _ = await make(MathZeroEnv, [ZERO_RIGHT, "because" + ZERO_RIGHT], percent_length_penalty=0.5)
    group = await collect(env)
    lengths = [sum(value != -100 for value in mask) for mask in group["masks"]]
    assert group["scores"] == [pytest.approx(1 - 0.5 * length / 3000) for length in lengths]


async def test_answers_may_become_longer_over_the_run(make):
    env, _ = await make(MathZeroEnv, [ZERO_RIGHT], start_tok_length=100, max_token_length=500, total_steps=10)
    limits, recorded = [], []
    for env.curr_step in (0, 5, 10, 99):
        limits.append(env.answer_limit(60))
        recorded.append(env.longest_evaluated)
    assert limits == [100, 300, 440, 440]
    assert recorded == [100, 300, 500, 500], "an evaluation's results record another limit than the one used"
    env.max_token_len = 300
    assert env.answer_limit(60) == 239
    with record_samples("eval"):
        assert env.answer_limit(60) == 440
    env.curr_step, env.evaluation_only = 0, True
    assert env.longest_evaluated == 500, "`evaluate` measured with the limit of the first step"


async def test_messages_of_math_part_at_the_reasoning(make):
    env, _ = await make(MathZeroEnv, [ZERO_RIGHT], include_messages=True)
    user, assistant = (await collect(env))["messages"][0]
    assert user["content"].endswith("Assistant: ")
    assert assistant["content"] == "<think>" + ZERO_RIGHT


async def test_math_is_evaluated_on_each_set_and_all_together(make, tmp_path, data):
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text(json.dumps({"problem": "1+1", "answer": "$2$"}) + "\n")
    sets = {**dict.fromkeys(EVAL_SETS, str(data)), "amc23": str(wrong)}
    assert list(EVAL_SETS) == ["aime_2024", "math_500", "amc23", "minervamath", "olympiadbench"]
    folder = tmp_path / "evals"
    env, _ = await make(MathZeroEnv, [ZERO_RIGHT], val_data_path=None, data_dir_to_save_evals=str(folder), **sets)
    await evaluate_alone(env)
    metrics = json.loads((folder / "metrics.json").read_text())["results"]["all"]
    assert metrics["eval/accuracy_amc23"] == 0.0
    assert [metrics[f"eval/accuracy_{name}"] for name in sets if name != "amc23"] == [1.0] * 4
    assert math.isclose(metrics["eval/accuracy"], 8 / 9)
    assert metrics["eval/format_reward"] == 1.0


async def test_math_can_do_without_evaluation(make):
    env, fake = await make(MathZeroEnv, [ZERO_RIGHT], val_data_path=None, run_evaluation=False)
    with anyio.fail_after(5):
        await evaluate_alone(env)
    assert fake.requests == []


async def test_math_validates_its_rewards(make, capsys):
    env, _ = await make(MathZeroEnv, [ZERO_RIGHT])
    assert await validate(env) == 0


def test_an_unknown_evaluation_set_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="unknown evaluation sets: aime; known are aime_2024"):
        MathZeroEnvConfig(eval_sets=["aime"])


def test_a_share_to_hold_out_is_refused_where_nothing_is_held_out():
    """It was accepted and had no effect."""
    with pytest.raises(ValueError, match=r"held_out_share[\s\S]*nothing is held out"):
        MathZeroEnvConfig(held_out_share=0.2)
    assert MathZeroEnvConfig(**MathZeroEnvConfig().model_dump()) == MathZeroEnvConfig()


async def test_redraw_is_said_to_be_of_no_effect_where_a_group_is_collected_as_one(make, caplog):
    """Nothing is redrawn there; under `close` such an environment may return fewer rollouts, so that has an effect."""
    for chosen in ("wait", "close", "redraw"):
        env, _ = await make(GSM8kEnv, [RIGHT], late_members=chosen)
        await prepare(env, needs_tokenizer=False)
    said = [record.getMessage() for record in caplog.records if "late_members" in record.msg]
    assert [text.partition(" of a group")[0] for text in said] == [
        "--env.late_members redraw has no effect on the rollouts of GSM8kEnv, which collects the members"
    ]


async def test_with_data_to_train_on_alone_some_of_it_is_held_out(make):
    env, _ = await make(GSM8kEnv, [RIGHT], val_data_path=None, steps_per_eval=50)
    (held_out,) = env.held_out
    assert {env.training[number].question for number in range(4)} == {
        entry["question"] for entry in QUESTIONS if entry["question"] != held_out.question
    }
    env, _ = await make(GSM8kEnv, [RIGHT], val_data_path=None, steps_per_eval=0)
    assert len({env.training[number].question for number in range(4)}) == len(QUESTIONS)
