"""A mistake in a reward is told with its line, at the start if an empty completion shows it."""

from __future__ import annotations

import logging

import anyio
import pytest

from environments.rewards.combine import combine
from environments.rewards.failures import RewardFailed
from environments.rewards.math import GSM8kReward
from environments.rewards.protocol import RewardUnusable, SampleIncomplete, score_samples
from environments.rewards.trial import try_reward

pytestmark = pytest.mark.anyio

ROW = {"prompt": "p", "completion": "", "answer": "7", "topic": "t"}

MISTAKES = """
import json, re

def right(samples):
    return [float(s["label"] == s["completion"]) for s in samples]

def of_columns(completions, label):
    return [1.0 for _ in completions]

def of_kwargs(completions, **columns):
    return [float(x == y) for x, y in zip(completions, columns["label"])]

async def waits(samples):
    return [helper(s) for s in samples]

def helper(sample):
    return sample["label"]

def misspelt(samples):
    return [lenght(s["completion"]) for s in samples]

def attribute(samples):
    return [float(s.completion == "x") for s in samples]

class Judge:
    def __call__(self, samples):
        return [s["label"] for s in samples]

judge = Judge()

def too_few(samples):
    return []

def parses(samples):
    return [float(json.loads(s["completion"])) for s in samples]

def parses_number(completions, **columns):
    return [float(c) for c in completions]

def finds(samples):
    return [float(re.search(r"[0-9]", s["completion"]).group()) for s in samples]

def finds_item(samples):
    return [float(re.search(r"[0-9]", s["completion"])[0]) for s in samples]

def looks_up(samples):
    return [{"yes": 1.0, "no": 0.0}[s["completion"]] for s in samples]

def reads_its_own_keys(samples):
    return [dict(re.findall(r"([a-z]+)=([0-9])", s["completion"]))["score"] for s in samples]

def not_a_number(samples):
    return [float("nan") for s in samples]

def needs_a_judge(samples):
    raise ConnectionError("nobody listens")

def chat(completions, **columns):
    return [len(c[0]["content"]) for c in completions]
"""


@pytest.fixture
def make(tmp_path):
    (tmp_path / "bad.py").write_text(MISTAKES)
    return lambda name: combine([f"{tmp_path / 'bad.py'}:{name}"])


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(MISTAKES.splitlines(), 1) if text in line)


@pytest.mark.parametrize(
    ("name", "at", "function", "told"),
    [
        ("right", 's["label"] == s', "right", "KeyError: 'label'"),
        ("of_columns", "def of_columns", "of_columns", "missing 1 required positional argument: 'label'"),
        ("of_kwargs", 'columns["label"]', "of_kwargs", "KeyError: 'label'"),
        ("waits", 'return sample["label"]', "helper", "KeyError: 'label'"),
        ("misspelt", "lenght", "misspelt", "NameError: name 'lenght' is not defined"),
        ("attribute", "s.completion", "attribute", "AttributeError: 'dict' object has no attribute 'completion'"),
        ("judge", 'return [s["label"] for', "__call__", "KeyError: 'label'"),
    ],
)
async def test_a_mistake_is_told_at_the_start_with_its_line_and_the_columns_that_there_are(
    make, caplog, name, at, function, told
):
    with pytest.raises(RewardFailed) as raised:
        await make(name).try_on(ROW)
    message = str(raised.value)
    shown = "Judge" if name == "judge" else name
    assert message.startswith(f"reward {shown} failed at bad.py:{line_of(at)}, in {function}: ")
    assert told in message
    assert "a sample has prompt, completion, answer, topic. Correct the reward" in message
    assert message.endswith("f(prompts, completions, **columns)") == (name == "of_columns"), "it was never entered"
    (record,) = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert "Traceback" in logging.Formatter().format(record)


async def test_a_result_that_is_no_list_of_scores_ends_the_start(make):
    with pytest.raises(RewardUnusable, match="returned 0 scores for 1 samples"):
        await make("too_few").try_on(ROW)


async def test_a_shipped_reward_that_lacks_its_column_ends_the_start():
    with pytest.raises(SampleIncomplete, match="its keys are prompt, completion"):
        await try_reward(GSM8kReward(), {"prompt": "p", "completion": ""})


@pytest.mark.parametrize(
    "name",
    [
        "parses",
        "parses_number",
        "finds",
        "finds_item",
        "looks_up",
        "reads_its_own_keys",
        "not_a_number",
        "needs_a_judge",
        "chat",
    ],
)
async def test_a_reward_that_cannot_score_an_empty_text_is_accepted_with_a_remark(make, caplog, name):
    await make(name).try_on(ROW)
    (record,) = caplog.records
    assert record.getMessage().startswith("an empty completion gets no score, which may be meant so: ")


async def test_a_reward_that_waits_long_is_not_waited_for(monkeypatch, caplog):
    monkeypatch.setattr("environments.rewards.trial.TRIAL_SECONDS", 0.01)
    caplog.set_level(logging.INFO)

    async def waits(samples):
        await anyio.sleep_forever()

    await try_reward(waits, ROW)
    assert "the reward waits was not tried" in caplog.text


async def test_an_error_of_this_project_stays_what_it_is_inside_a_group_too():
    async def raises(samples):
        raise ExceptionGroup("tasks", [SampleIncomplete("kept")])

    with pytest.raises(ExceptionGroup):
        await score_samples(raises, [ROW])
