"""The page of an evaluation shows the worst samples first, whatever form they have, in the style of all pages."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from environments.sdk.evaluation_page import MOST_SAMPLES, render_evaluation
from environments.sdk.rehearsal import Rehearsal
from environments.sdk.reporting import EvaluationResult
from environments.sdk.tools import FunctionCall, ToolCall

from .test_surface import Env

SAMPLES = [
    {"question": "2+2?", "gold": 4, "text": "2+2=4\n#### 4", "score": 1.0},
    {"question": "3+3?", "gold": 6, "text": "I think " * 20, "score": 0.0},
    {"question": "no score"},
]


def titles(page: str) -> list[str]:
    return re.findall(r"<summary>(.*?)</summary>", page)


def test_the_worst_sample_comes_first_and_its_texts_are_whole():
    page = render_evaluation("arithmetic_eval", {"eval/accuracy": 0.5}, SAMPLES)
    worst, best, unknown = titles(page)
    assert worst.startswith("2 ")
    assert "3+3?" in worst
    assert best.startswith("1 ")
    assert unknown.startswith("3 ")
    assert "I think " * 20 in page
    assert '<pre class="turn">2+2=4\n#### 4</pre>' in page, "lines stay lines"
    assert "<td>eval/accuracy</td><td>0.5</td>" in page
    assert ".card {" in page


def test_a_sample_of_any_form_is_shown_and_none_is_markup():
    chat = [{"role": "user", "content": "<b>hi</b>"}, {"role": "assistant", "content": "yes\u202e"}]
    sample = {"messages": chat, "reward": -1, "metrics": {"<i>": None}, "example_id": 7}
    page = render_evaluation("<title>", {}, [sample])
    assert "<b>hi" not in page
    assert "<i>" not in page
    assert "yes⟨U+202E⟩" in page
    assert '<span class="score negative">-1</span>' in titles(page)[0]


def test_few_enough_are_shown_and_the_rest_is_counted():
    page = render_evaluation("t", {}, [{"score": float(n)} for n in range(MOST_SAMPLES + 5)])
    assert len(titles(page)) == MOST_SAMPLES
    assert "5 better ones are in samples.jsonl" in page


def test_an_evaluation_writes_its_page_beside_its_samples(tmp_path):
    result = EvaluationResult(
        metrics={"eval/accuracy": 0.5}, task_name="mine", model_name="m", seconds=1.0, generation_parameters={},
        samples=SAMPLES, step=40,
    )  # fmt: skip
    result.write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.json", "samples.jsonl", "samples.html"}
    assert "<h1>mine at step 40</h1>" in (tmp_path / "samples.html").read_text()


def test_numbers_of_numpy_and_other_objects_are_written_like_plain_ones(tmp_path):
    sample = {"score": np.float32(0.5), "ids": np.arange(2), "when": Path("x"), "text": "half a pair \ud83d"}
    result = EvaluationResult(
        metrics={"eval/accuracy": np.float64(0.5), "eval/count": np.int64(3)},
        task_name="t",
        model_name="m",
        seconds=1.0,
        generation_parameters={},
        samples=[sample],
    )
    result.write(tmp_path)
    assert json.loads((tmp_path / "samples.jsonl").read_text()) == {**sample, "score": 0.5, "ids": [0, 1], "when": "x"}
    metrics = json.loads((tmp_path / "metrics.json").read_text())["results"]["all"]
    assert metrics == {"eval/accuracy": 0.5, "eval/count": 3}
    page = (tmp_path / "samples.html").read_text(encoding="utf-8")
    assert "half a pair ⟨U+D83D⟩" in page
    assert ">0.5</span>" in titles(page)[0]


CALL = ToolCall(FunctionCall("add", "{}"), id="c1")


@pytest.mark.parametrize(
    ("sample", "written"),
    [
        ("a text", "a text"),
        ([1, 2], [1, 2]),
        (None, None),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]},
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL.model_dump()]}]},
        ),
    ],
    ids=["text", "list", "null", "calls of a session"],
)
def test_no_form_of_a_sample_costs_an_evaluation_its_metrics(tmp_path, sample, written):
    """The page could not show it, and the metrics are written after the page."""
    result = EvaluationResult(
        metrics={"eval/accuracy": 0.5}, task_name="mine", model_name="m", seconds=1.0, generation_parameters={},
        samples=[sample],
    )  # fmt: skip
    result.write(tmp_path)
    assert json.loads((tmp_path / "metrics.json").read_text())["results"]["all"] == {"eval/accuracy": 0.5}
    assert json.loads((tmp_path / "samples.jsonl").read_text()) == written
    assert len(titles((tmp_path / "samples.html").read_text())) == 1


@pytest.mark.anyio
async def test_samples_of_an_evaluation_that_are_made_one_by_one_are_all_written(tmp_path):
    """A generator was used up by the first of the two files, and the page of none of them failed."""

    class OneByOne(Env):
        async def evaluate(self, *_, **__):
            await self.evaluate_log({"eval/x": 1.0}, samples=({"text": text} for text in "ab"))

    async with Rehearsal(OneByOne, ["x"], tmp_path) as rehearsal:
        folder = await rehearsal.evaluate()
    assert len((folder / "samples.jsonl").read_text().splitlines()) == 2
    assert (folder / "samples.html").read_text().count("<summary>") == 2
    assert (folder / "metrics.json").exists()
