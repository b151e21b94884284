"""The page of an evaluation shows the worst samples first, whatever form they have, in the style of all pages."""

import re

from environments.sdk.evaluation_page import MOST_SAMPLES, render_evaluation
from environments.sdk.reporting import EvaluationResult

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
