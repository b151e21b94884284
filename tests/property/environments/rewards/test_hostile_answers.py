"""For any text of a model, no reward raises, leaves its range or takes long, and its form cannot be faked."""

import time
from fractions import Fraction

import anyio
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from environments.rewards import (
    CombinedReward,
    FormatReward,
    GSM8kReward,
    LinearLengthReward,
    PatternReward,
    RepetitionPenalty,
    TargetLengthReward,
    WeightedReward,
    bradley_terry,
    win_rates,
)
from environments.rewards.answers import final_answer, first_number, last_boxed, last_number
from environments.rewards.math import marked_number, r1_answer

PIECES = (
    r"\boxed{", "}", "{", r"\{", "\\", "####", " ", "\n", "<think>", "</think>", "<answer>", "</answer>", "5", "-", "−",
    ",", "1,111", ".", "/", "%", "$", r"\frac{1}{2}", r"\dfrac{3}{0}", "e999999999", "1e9", "²", "٣", "½", "apples",
    "\x00",
)  # fmt: skip
hostile = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=30).map("".join)
plain_rewards = [
    FormatReward(),
    GSM8kReward(format_score=0.1),
    GSM8kReward(require_format=False),
    LinearLengthReward(20, unit="characters"),
    PatternReward(".*5"),
    RepetitionPenalty(),
    TargetLengthReward(20, unit="words"),
]


@settings(max_examples=80)
@given(texts=st.lists(hostile, min_size=1, max_size=4))
def test_every_reward_gives_each_text_a_score_in_its_range_lists_and_arrays_alike(texts):
    samples = [{"completion": text, "answer": "5"} for text in texts]
    for reward in plain_rewards:
        scores = reward(samples)
        assert len(scores) == len(samples)
        assert all(reward.range.low <= score <= reward.range.high for score in scores)
        assert reward(np.array(samples, dtype=object)) == scores


@settings(max_examples=80)
@given(text=hostile, closing=st.sampled_from(["</answer>", "</think>", "<answer>"]))
def test_a_second_closing_tag_never_keeps_the_form(text, closing):
    formed = f"<think>{text}</think> <answer>5</answer>"
    assume(r1_answer(formed) is not None)
    assert r1_answer(formed + closing) is None
    assert r1_answer(closing + formed) is None
    assert r1_answer(formed[: -len("</answer>")] + closing + "</answer>") is None


@given(text=hostile)
def test_a_text_in_the_r1_form_has_the_tags_of_the_format_reward(text):
    if r1_answer(text) is not None and "<think>" in text:
        assert FormatReward()([text]) == [1.0]


@given(value=st.fractions(-(10**12), 10**12).map(lambda f: Fraction(round(f * 1000), 1000)))
def test_a_number_is_read_back_however_it_is_written(value):
    exact = f"{float(value):.3f}" if abs(value) < 10**9 else str(round(value))
    value = Fraction(exact)
    forms = [
        exact,
        exact.replace("-", "−"),
        f"{float(value):,.3f}",
        f"${exact}",
        f"{exact}%",
        f"{exact} apples",
        f" {exact}.",
    ]
    assert {first_number(form) for form in forms} == {value}
    assert last_number(f"3 then {exact}") == value


balanced = st.recursive(
    st.text("ab1", max_size=4),
    lambda inner: st.lists(inner | inner.map("{{{}}}".format), max_size=4).map("".join),
    max_leaves=8,
)


@given(content=balanced, before=hostile)
@example(content="{a}{{1}b}", before=r"\boxed{2} {")
def test_a_box_gives_back_what_was_put_in_it(content, before):
    assert last_boxed(rf"\boxed{{{content}}}") == content
    assert last_boxed(rf"{before} \boxed{{{content}}}") == content


@pytest.mark.parametrize(
    "pattern",
    [
        r"\boxed{",
        "{",
        "}",
        "####\n",
        "<answer>",
        "</answer>",
        "</think>",
        "1,111",
        "-",
        "- ",
        "\\",
        r"\boxed ",
        "1e",
        ",",
        "1/",
        "$",
        ".",
        r"\frac{1",
    ],
)
def test_reading_is_linear_in_the_text(pattern):
    def seconds(size):
        text = (pattern * size)[: size * 4]
        best = float("inf")
        for _ in range(2):
            started = time.process_time()
            for read in (final_answer, first_number, last_number, r1_answer, marked_number):
                read(text)
            best = min(best, time.process_time() - started)
        return best

    assert seconds(12_000) < 40 * seconds(1_200) + 0.02


shares = st.lists(st.lists(st.floats(0, 20), min_size=4, max_size=4), min_size=4, max_size=4)


@given(wins=shares)
def test_preferences_become_finite_scores_that_a_further_win_only_raises(wins):
    more = [list(row) for row in wins]
    more[0][1] += 1.0
    for scores_of in (win_rates, bradley_terry):
        before, after = scores_of(wins), scores_of(more)
        assert np.isfinite(before).all()
        assert after[0] >= before[0] - 1e-6
    assert sum(bradley_terry(wins)) == pytest.approx(0, abs=1e-6)


@given(
    scores=st.lists(st.floats(-5, 5), min_size=3, max_size=3),
    weights=st.lists(st.floats(-3, 3, allow_subnormal=False), min_size=3, max_size=3).filter(any),
)
def test_a_combination_is_the_weighted_sum_of_its_components(scores, weights):
    parts = [
        WeightedReward(str(index), lambda samples, score=score: np.full(len(samples), score), weight)
        for index, (score, weight) in enumerate(zip(scores, weights, strict=True))
    ]
    expected = float(np.dot(scores, weights))
    plain, divided = (anyio.run(CombinedReward(parts, kind).score, [{}] * 2) for kind in ("none", "weights"))
    assert plain.totals == pytest.approx([expected] * 2, abs=1e-9)
    assert divided.totals == pytest.approx([expected / np.abs(weights).sum()] * 2, abs=1e-6, rel=1e-6)
    assert [values[0] for values in plain.components.values()] == scores
