"""A data set of any usual form trains with rewards that are named on the command line."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest
from pydantic import ValidationError

from environments.dataset_server import DatasetEnv, DatasetEnvConfig, SystemPromptUnusable, _given, read_system_prompt
from environments.rewards import combine, make_reward
from environments.rewards.failures import RewardFailed
from environments.rewards.protocol import RewardUnknown, RewardUnusable, gold_of, score_samples
from environments.sdk.config import APIServerConfig
from environments.sdk.errors import GoldMissing
from environments.sdk.runtime.cli import read_command
from environments.sdk.runtime.commands import validate
from environments.sdk.server_manager import ServerManager
from environments.sdk.session.tokens_and_masks import record_samples
from environments.sdk.testing import FakeInference, InProcess
from environments.tasks.chat_dataset import load_rows, make_row
from environments.tasks.data import shown_row
from environments.tasks.records import DataUnusable
from tests.unit.project.seed_commands import GUIDES_REWARD

pytestmark = pytest.mark.anyio

ANSWERS = ["short", "an answer.", "a longer answer"]
SERVER = APIServerConfig(server_type="vllm", base_url="http://fake/v1")

REWARDS = '''
import numpy as np

def ends_properly(samples):
    """The signature of this project, and of the guide for TRL."""
    return np.array([float(s["completion"].strip().endswith(".")) for s in samples], dtype=np.float32)

def mentions_topic(prompts, completions, topic, **kwargs):
    return [float(word in text) for text, word in zip(completions, topic)]

async def counts(completions, **kwargs):
    return [None if "short" in str(c) else float(len(c)) for c in completions]

def shows(prompts, completions, completion_ids, topic):
    return [len(ids) + 10 * len(completions) for ids in completion_ids]

def far_too_large(samples):
    return [50.0 + len(s["completion"]) for s in samples]
'''


@pytest.fixture
def rewards(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return path


def write(path: Path, *rows):
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


@pytest.fixture
def make(tokenizer_folder, tmp_path):
    """Return a function that sets an environment up from flags, as the command line gives them."""

    async def build(row, *flags):
        data = write(tmp_path / "data.jsonl", row)
        given = ["--env.data_path", str(data), "--env.val_data_path", str(data), "--env.group_size", "3"]
        command = read_command(DatasetEnv, "serve", [*given, "--env.tokenizer_name", str(tokenizer_folder), *flags])
        env = DatasetEnv(command.env, command.servers)
        asked = []

        def answer(prompt, index):
            asked.append(env.tokenizer.decode(prompt))
            return [*env.tokenizer.encode(ANSWERS[index]), 1]

        transport = InProcess(FakeInference(answer, end=1))
        env.server = ServerManager([SERVER], load_tokenizer=lambda: env.tokenizer, transport=transport)
        await env.setup()
        return env, asked

    return build


async def scores_of(env):
    group, _ = await env.collect_trajectories(await env.get_next_item())
    return group["scores"]


@pytest.mark.parametrize(
    ("record", "question", "answer", "roles"),
    [
        ({"prompt": "p"}, "p", "", []),
        ({"prompt": "p", "completion": "c"}, "p", "c", []),
        ({"question": "q", "answer": 7, "level": 3}, "q", "7", []),
        ({"prompt": [{"role": "user", "content": "u"}], "ground_truth": "g"}, "u", "g", ["user"]),
        (
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
            "u",
            "",
            ["system", "user"],
        ),
        (
            {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]},
            "u",
            "a",
            ["user"],
        ),
    ],
)
async def test_every_usual_form_of_a_row_is_read(record, question, answer, roles):
    row = make_row(record, "here")
    assert (row.question, row.answer, [message["role"] for message in row.messages]) == (question, answer, roles)
    assert {*row.columns} == {*record} - {"prompt", "messages", "question"}


@pytest.mark.parametrize(
    ("record", "column", "said"),
    [
        ({"text": "x"}, None, "its columns are text. Name the prompt's with --env.prompt_column"),
        ({"prompt": "x"}, "text", "no prompt under text"),
        ({"prompt": 5}, None, "text or a list of messages with role and content, not 5"),
        ({"messages": [{"from": "human"}]}, None, "text or a list of messages"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, None, "nothing to answer"),
        (["x"], None, "an object with columns"),
    ],
)
async def test_a_row_without_a_prompt_is_named_with_its_place(tmp_path, record, column, said):
    path = write(tmp_path / "data.jsonl", {"prompt": "fine", "text": "fine"}, record)
    with pytest.raises(DataUnusable, match=r"data\.jsonl:2") as raised:
        load_rows(path, "train", prompt_column=column)
    assert said in str(raised.value)


async def test_a_reward_of_a_file_in_the_projects_own_signature_scores(make, rewards):
    env, _ = await make({"prompt": "p"}, "--env.reward", f"{rewards}:ends_properly")
    assert await scores_of(env) == [0.0, 1.0, 0.0]


async def test_the_guides_reward_scores_the_guides_columns_unchanged(make, tmp_path, monkeypatch):
    nltk = SimpleNamespace(word_tokenize=lambda text: ["word"] * 514 if "longer" in text else text.split())
    monkeypatch.setitem(sys.modules, "nltk", SimpleNamespace(tokenize=nltk))
    monkeypatch.setitem(sys.modules, "nltk.tokenize", nltk)
    (tmp_path / "guide.py").write_text(GUIDES_REWARD)
    for row in ({"prompt": "p", "completion": "c"}, {"prompt": "p", "response": "r", "score": 3}):
        env, _ = await make(row, "--env.reward", f"{tmp_path / 'guide.py'}:simple_reward")
        assert await scores_of(env) == pytest.approx([0.0, 1.0, -0.002], abs=1e-6)


async def test_the_pages_reward_scores_each_form_of_the_pages_rows(make, tmp_path):
    page = (Path(__file__).parents[3] / "docs/howto/your-own-data.md").read_text(encoding="utf-8")
    (tmp_path / "rewards.py").write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0])
    rows = re.findall(r"```json\n(.*?)```", page, re.DOTALL)[0].splitlines()
    for row in rows:
        env, _ = await make(json.loads(row) | {"topic": "longer"}, "--env.reward", f"{tmp_path / 'rewards.py'}:polite")
        assert await scores_of(env) == [0.0, 0.0, 1.0]


async def test_a_reward_with_trls_signature_gets_the_columns(make, rewards):
    row = {"prompt": "p", "topic": "longer"}
    env, asked = await make(row, "--env.reward", f"{rewards}:mentions_topic", "--env.prompt_form", "text")
    assert await scores_of(env) == [0.0, 0.0, 1.0]
    assert {*asked} == {"p"}, "a prompt that is text is continued"


async def test_a_chats_completions_are_messages_and_a_reward_may_be_async_and_not_apply(make, rewards):
    chat = {"messages": [{"role": "user", "content": "u"}]}
    env, _ = await make(chat, "--env.reward", f"{rewards}:counts")
    assert await scores_of(env) == [0.0, 1.0, 1.0], "one message each; the first is None"


async def test_a_function_without_keywords_gets_only_what_it_names(rewards):
    reward = make_reward(f"{rewards}:shows")
    sample = {"prompt": "p", "completion": "c", "completion_ids": [1, 2], "topic": "t", "other": 5}
    assert await score_samples(reward, [sample, sample]) == [22.0, 22.0]


async def test_a_module_in_the_working_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text("def one(samples):\n    return [1.0] * len(samples)\n")
    monkeypatch.chdir(tmp_path)
    assert await score_samples(make_reward("own_rewards:one"), ["x"]) == [1.0]


async def test_a_system_prompt_is_in_the_tokens_unless_the_data_has_its_own(make, tmp_path):
    (tmp_path / "system.txt").write_text("Be brief and kind.\n")
    flags = ["--env.reward", "format", "--env.system_prompt"]
    env, asked = await make({"prompt": "p"}, *flags, str(tmp_path / "system.txt"))
    await scores_of(env)
    assert "Be brief and kind." in asked[0]
    env, asked = await make({"prompt": "p"}, *flags, "Be brief. " * 100)
    await scores_of(env)
    assert asked[0].count("Be brief.") == 100, "a text that is too long for a name of a file"
    own = {"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "p"}]}
    env, asked = await make(own, *flags, "Another.")
    await scores_of(env)
    assert "own" in asked[0]
    assert "Another." not in asked[0]


async def test_rewards_are_weighed_logged_by_part_and_advised_on_once(make, rewards, caplog):
    large = json.dumps({"name": f"{rewards}:far_too_large", "label": "large"})
    target = '{"name": "length_target", "weight": 0.5, "params": {"target": 8, "tolerance": 8, "unit": "characters"}}'
    env, _ = await make({"prompt": "p"}, "--env.reward", large, target)
    logged = []
    env.log_metrics = lambda metrics, step: logged.append(metrics)
    scores = await scores_of(env)
    assert scores[0] == pytest.approx(55.0 + 0.5 * (1 - 3 / 8))
    with caplog.at_level(logging.WARNING):
        await env.wandb_log()
        await scores_of(env)
        await env.wandb_log()
    assert logged[0][env._prefixed("reward/large")] == pytest.approx(50 + sum(map(len, ANSWERS)) / 3)
    assert env._prefixed("reward/length_target") in logged[1]
    assert sum("±5" in record.message for record in caplog.records) == 1


async def test_an_evaluation_has_the_mean_of_the_reward_and_of_its_parts(make, rewards):
    env, _ = await make({"prompt": "p", "answer": "7"}, "--env.reward", f"{rewards}:ends_properly", "format")
    with record_samples("eval"):
        sample = await env.attempt(env.held_out[0])
    assert (sample["gold"], sample["text"], sample["reward"]) == ("7", "short", 0.0)
    metrics = env.evaluation_metrics([sample, {**sample, "reward": 1.0}])
    assert metrics["eval/reward"] == 0.5
    parts = {name for name in metrics if name.startswith("eval/reward/")}
    assert parts == {"eval/reward/ends_properly", "eval/reward/format"}


async def test_a_group_carries_the_reference_and_the_other_columns_of_its_row_for_the_page(make, rewards):
    row = {"prompt": "p", "answer": "7", "level": 3, "temperature": 0.5, "long": "x" * 5000, "tags": ["a"], "no": None}
    env, _ = await make(row, "--env.reward", f"{rewards}:ends_properly")
    group, _ = await env.collect_trajectories(await env.get_next_item())
    shown = group["group_overrides"]["row"]
    assert shown == {"answer": "7", "level": 3, "temperature": 0.5, "long": "x" * 1000 + "…"}
    assert {*group["group_overrides"]} == {"row"}, "a trainer would read a column as a setting"


async def test_a_row_in_a_group_is_bounded_and_can_be_written_as_json():
    cells = {f"column {number}": number for number in range(100)}
    assert len(shown_row(cells)) == 20
    odd = {"nan": math.nan, "large": 2**70, "yes": True, "empty": "", "bytes": b"x"}
    assert shown_row(odd) == {"large": str(2**70), "yes": True}


@pytest.mark.parametrize(("flags", "limit"), [(["--env.max_new_tokens", "34"], 34), ([], 64)])
async def test_an_evaluation_records_the_longest_answer_that_it_allowed(make, rewards, tmp_path, flags, limit):
    env, _ = await make(
        {"prompt": "p"}, "--env.reward", f"{rewards}:ends_properly", "--env.max_token_length", "64", *flags
    )
    with record_samples("eval"):
        await env.evaluate()
    assert env.last_evaluation.generation_parameters["max_new_tokens"] == limit


async def test_a_misspelt_reward_ends_the_start_with_those_that_there_are(make, rewards, tmp_path):
    with pytest.raises(RewardUnknown, match="did you mean format"):
        await make({"no prompt": 1}, "--env.reward", "formt")
    with pytest.raises(RewardUnknown, match="nowhere"):
        await make({"prompt": "p"}, "--env.reward", f"{tmp_path}/nowhere.py:f")
    (tmp_path / "broken.py").write_text("undefined_name\n")
    with pytest.raises(RewardUnknown, match="NameError: name 'undefined_name'"):
        await make({"prompt": "p"}, "--env.reward", f"{tmp_path}/broken.py:f")
    with pytest.raises(RewardUnknown, match="no_such"):
        await make({"prompt": "p"}, "--env.reward", f"{rewards}:no_such")


async def test_validate_says_that_only_the_user_knows_right_answers(make, rewards):
    env, _ = await make({"prompt": "p"}, "--env.reward", f"{rewards}:ends_properly")
    with pytest.raises(GoldMissing):
        list(env.gold_items())


async def test_validate_is_told_by_the_environment_that_only_the_user_knows_right_answers(make, rewards):
    env, _ = await make(
        {"prompt": "p", "topic": "word"}, "--env.reward", f"{rewards}:mentions_topic", "--env.prompt_form", "text"
    )
    with pytest.raises(GoldMissing, match=r"the data says nothing about which answers .* no mistake was found"):
        await validate(env)
    item = await env.get_next_item()
    assert [await env.score_answer(item, text) for text in ("a word", "none")] == [1.0, 0.0]


@pytest.mark.parametrize("reward", ["class_of_trl", "instance_of_trl", "async_instance"])
async def test_rewards_that_are_objects_with_trls_signature_score(make, tmp_path, reward):
    (tmp_path / "objects.py").write_text(OBJECTS)
    row = {"prompt": "p", "topic": "longer"}
    spec = f"{tmp_path / 'objects.py'}:{reward}"
    given = json.dumps({"name": spec, "params": {"bonus": 2.0}}) if reward == "class_of_trl" else spec
    env, _ = await make(row, "--env.reward", given)
    assert await scores_of(env) == [0.0, 0.0, 2.0]


OBJECTS = """
class class_of_trl:
    def __init__(self, bonus=2.0):
        self.bonus = bonus

    def __call__(self, completions, topic, **kwargs):
        return [self.bonus * (word in str(text)) for text, word in zip(completions, topic)]

class Async(class_of_trl):
    async def __call__(self, prompts, completions, **kwargs):
        return super().__call__(completions, **kwargs)

instance_of_trl = class_of_trl()
async_instance = Async()
not_callable = 5

def names(completions, **kwargs):
    return {str(index): 1.0 for index, _ in enumerate(completions)}
"""


async def test_an_entry_that_is_not_a_reward_is_named(tmp_path):
    (tmp_path / "objects.py").write_text(OBJECTS)
    with pytest.raises(RewardUnusable, match="is a int, which cannot be called"):
        make_reward(f"{tmp_path / 'objects.py'}:not_callable")
    with pytest.raises(RewardUnusable, match="returned a dict"):
        await score_samples(make_reward(f"{tmp_path / 'objects.py'}:names"), [{"completion": "c"}])


BLOCKS = """
import threading

def waits(samples):
    assert released.wait(20), "the loop did not go on"
    return [1.0] * len(samples)

class Waits:
    def __call__(self, completions, **kwargs):
        return waits(completions)

released = threading.Event()
"""


@pytest.mark.parametrize("name", ["waits", "Waits"])
async def test_a_reward_that_blocks_does_not_stop_the_event_loop(tmp_path, name):
    (tmp_path / "blocks.py").write_text(BLOCKS)
    combined = combine([f"{tmp_path / 'blocks.py'}:{name}"])
    released = sys.modules["atropos_reward_blocks"].released
    scored = []

    async def score():
        scored.append(await combined([{"completion": "c"}]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(score)
        await anyio.sleep(0.01)
        released.set()
    assert scored == [[1.0]]


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"weight": 2}, "name"),
        ({"name": "format", "weigth": 2}, "weigth"),
        ({"name": "format", "weight": "heavy"}, "weight"),
        ({"name": "format", "weight": math.nan}, "finite"),
        ('{"name": "format"', "this is no JSON"),
    ],
)
async def test_an_entry_of_a_run_file_that_is_not_a_reward_is_refused_where_it_stands(entry, told):
    with pytest.raises(ValidationError, match=rf"reward\.1[\s\S]*{told}"):
        DatasetEnvConfig(reward=["accuracy", entry])


async def test_rewards_of_a_run_file_are_names_objects_or_one_of_them():
    assert [spec.name for spec in DatasetEnvConfig(reward="format").reward] == ["format"]
    (spec,) = DatasetEnvConfig(reward={"name": "gsm8k", "weight": 0.5}).reward
    assert (spec.name, spec.weight) == ("gsm8k", 0.5)
    assert [spec.name for spec in DatasetEnvConfig().reward] == ["accuracy"]
    again = DatasetEnvConfig(**DatasetEnvConfig(reward=["format", spec]).model_dump())
    assert [one.weight for one in again.reward] == [1.0, 0.5]


@pytest.mark.parametrize("value", ["prompts/sytem.txt", "./system", "system.md", "~/none/system"])
async def test_a_system_prompt_that_names_no_file_is_refused_and_not_sent_as_text(make, value):
    with pytest.raises(SystemPromptUnusable, match="there is no such file"):
        await make({"prompt": "p"}, "--env.reward", "format", "--env.system_prompt", value)


async def test_a_file_of_a_system_prompt_has_to_hold_text(tmp_path):
    path = tmp_path / "system.txt"
    path.write_bytes(b"\xef\xbb\xbfBe brief.\n")
    assert read_system_prompt(str(path)) == "Be brief."
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SystemPromptUnusable, match="give a UTF-8 file"):
        read_system_prompt(str(path))
    path.write_text(" \n")
    with pytest.raises(SystemPromptUnusable, match="the file is empty"):
        read_system_prompt(str(path))
    assert read_system_prompt("Answer in one word.") == "Answer in one word."
    assert read_system_prompt("Answer as in README.md") == "Answer as in README.md"


async def test_a_reward_that_compares_needs_references_and_leaves_rows_without_them_out(make, tmp_path, caplog):
    with pytest.raises(DataUnusable, match=r"no row has a reference, with which the reward accuracy .*--env\.reward"):
        await make({"prompt": "p"})
    await make({"prompt": "p"}, "--env.reward", "format")
    path = write(tmp_path / "mixed.jsonl", {"prompt": "p"}, {"prompt": "q", "answer": "7"})
    config = DatasetEnvConfig(reward=["format", "gsm8k"])
    assert [row.question for row in config.load(path, "train")] == ["q"]
    assert "1 rows without a reference for gsm8k are left out" in caplog.text


@pytest.mark.parametrize("answer", [None, math.nan, ["7"], [{"role": "assistant", "content": "7"}]])
async def test_the_reference_that_is_found_in_a_row_is_the_one_that_its_rewards_compare_with(answer):
    row = make_row({"prompt": "p", "answer": answer, "solution": "7"}, "row 1")
    assert (row.answer, gold_of(_given(row))) == ("7", "7")


LABEL = """
def right(samples):
    return [float(s["label"] == s["completion"]) for s in samples]
"""


async def test_a_reward_that_reads_a_missing_column_ends_the_start_before_any_rollout(make, tmp_path):
    (tmp_path / "bad.py").write_text(LABEL)
    with pytest.raises(RewardFailed, match=r"bad\.py:3, in right: KeyError: 'label'; a sample has topic, prompt, "):
        await make({"prompt": "p", "topic": "t"}, "--env.reward", f"{tmp_path / 'bad.py'}:right")


@pytest.mark.parametrize("verb", ["validate", "evaluate"])
async def test_other_verbs_call_each_reward_before_they_begin_without_a_tokenizer(tmp_path, verb):
    (tmp_path / "bad.py").write_text(LABEL)
    data = write(tmp_path / "data.jsonl", {"prompt": "p"}, {"prompt": "q"})
    command = read_command(
        DatasetEnv, verb, ["--env.data_path", str(data), "--env.reward", f"{tmp_path / 'bad.py'}:right"]
    )
    env = DatasetEnv(command.env, command.servers)
    env.evaluation_only = verb == "evaluate"
    with pytest.raises(RewardFailed, match=r"bad\.py:3, in right"):
        await (validate(env) if verb == "validate" else env.setup())
