"""Rewards on text alone (GSM8K numbers, forms, lengths, repetition), and finding answers in hostile texts."""

from fractions import Fraction

import numpy as np
import pytest

from environments.rewards import (
    FormatReward,
    GSM8kReward,
    LinearLengthReward,
    PatternReward,
    RepetitionPenalty,
    TargetLengthReward,
)
from environments.rewards.answers import final_answer, first_number, inside_tag, last_boxed, last_number
from environments.rewards.math import marked_number, r1_answer
from environments.rewards.protocol import GoldUnparsable, RewardUnusable, SampleIncomplete


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("72", 72),
        ("1,234,567 apples", 1234567),
        ("$1,234.50", Fraction("1234.5")),
        (r"\$18", 18),
        ("-3", -3),
        ("−3.25", Fraction("-3.25")),
        ("-$5", -5),
        ("$-5", -5),
        (".5", Fraction(1, 2)),
        ("Rs.15", 15),
        ("50%", 50),
        ("3/4", Fraction(3, 4)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\dfrac{1}{2}", Fraction(-1, 2)),
        (r"\frac12", Fraction(1, 2)),
        (r"\frac1{20}", Fraction(1, 20)),
        (r"-2\frac{1}{2}", Fraction(-5, 2)),
        ("2 1/2", Fraction(5, 2)),
        (r"\frac10", None),
        ("1.5e3", 1500),
        ("5.", 5),
        ("12,34", 12),
        (r"1\,000\,000", 1000000),
        ("7 kg or 8 kg", 7),
        ("minus 5", -5),
        ("Negative $3.50", Fraction("-3.5")),
        ("minus -5", 5),
        ("non-negative 5", 5),
        ("5 million", 5_000_000),
        ("$2.5$ Million dollars", 2_500_000),
        (r"3 \text{ thousand}", 3000),
        ("1/2 million", 500_000),
        ("-1.2 billion", -1_200_000_000),
        ("5 millionths", 5),
        ("5 hundred thousand", 500_000),
        (r"1.5 \text{ hundred thousand}", 150_000),
        ("5 thousand million", 5_000_000_000),
        (r"10,\!000", 10_000),
        ("20 000", 20_000),
        ("1\u202f234\u00a0567.5", Fraction("1234567.5")),
        ("5 1000", 5),
        ("2020 300", 2020),
        ("3 125/200", Fraction(29, 8)),
        ("3½", Fraction(7, 2)),
        ("-¼", Fraction(-1, 4)),
        ("minus 1/0 million", None),
        ("1e999999999", None),
        ("1/0", None),
        ("9" * 5000, None),
        ("none", None),
        ("", None),
    ],
)
def test_numbers_are_read_as_people_write_them(text, value):
    assert first_number(text) == value


def test_the_last_number_is_the_one_that_ends_last():
    assert last_number("3 and 4, then 5.") == 5
    assert last_number("#### 5\n\nMillions of people agree.") == 5


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a \boxed{b}}", r"a \boxed{b}"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed 5", "5"),
        (r"\boxed7", "7"),
        (r"so the answer is $\fbox{9}$", "9"),
        (r"\boxed{5}, not \fbox{9}", "5"),
        (r"\fboxed{9}", "9"),
        ("}}}}", None),
        ("", None),
    ],
)
def test_the_last_box_is_found_with_its_braces_balanced(text, content):
    assert last_boxed(text) == content


def test_the_final_answer_is_looked_for_after_the_thinking():
    assert final_answer(r"<think>\boxed{1}</think> so \boxed{2}") == "2"
    assert final_answer("<think>#### 1</think> none") is None
    assert final_answer("<answer>3</answer></answer> <answer>4") == "4"
    assert final_answer("work\n#### 12 eggs\nbye") == "12 eggs"
    assert inside_tag("no tag", "answer") is None


@pytest.mark.parametrize(
    "rest",
    [r"I put it in \boxed{}.", r"It is in \boxed form.", r"\boxed{\text{Natalia}}", r"$\boxed{x}$", r"\fbox{Done}"],
)
def test_a_box_without_a_number_does_not_replace_the_number_after_the_hashes(rest):
    assert GSM8kReward().score(f"#### 72\n\n{rest}", "72").correct
    assert marked_number(rest) is None


def test_gsm8k_scores_right_marked_and_unmarked_answers():
    reward = GSM8kReward(format_score=0.1, correct_score=1.0)
    right = reward.score("2 + 2 = 4\n#### 4", "4")
    assert (right.score, right.correct) == (1.0, True)
    assert reward.score("2 + 2 = 4\n#### 5", "4").score == 0.1
    assert reward.score("2 + 2 = 4", "4").score == 0.0
    assert reward.score(r"so \boxed{1{,}000}", "1000").correct
    assert reward.score("#### $1,000.00 in total", "it is 1000\n#### 1,000").correct
    assert reward.score(r"#### \boxed{7}", 7).correct
    assert reward.score("#### 4\n#### 5", "4").correct is False
    assert reward.score("#### Final answer\n\\boxed{7}", "7").correct
    assert reward.score("#### 4\n\\boxed{7}", "4").correct is False
    assert reward.score("\\boxed{4}\n#### 7", "7").correct
    for calculation in ("5 + 3", "2^3", "2^{3}", "2(4)", "2(1 + 3)", "(4!)/3", "8 $= 4!$ / 3", r"\sqrt{64}"):
        assert reward.score(f"#### {calculation} = 8", "8").correct
    assert reward.score(r"\boxed{2 \times 9 = 18}", "2").correct is False
    assert reward.score("#### 8 =", "8").correct
    for marked in (
        "120 minutes = 2 hours",
        r"120^\circ = 2\pi/3",
        r"120^{ \circ} = 2\pi/3",
        r"120^o = 2\pi/3",
        "120^{th} place = 5",
        "120(40 per side, perimeter = 480)",
        "120(10 dozen = 5)",
        "120! n = 5",
        "$120 = 200 - 80",
        "120 (x = 3)",
        r"\boxed{120 \text{ when } n = 5}",
    ):
        assert reward.score(f"#### {marked}", "120").correct, marked
    assert reward.score("", "4").score == 0.0
    assert reward.range == (0.0, 1.0)


def test_gsm8k_takes_the_last_number_when_no_mark_is_required():
    graded = GSM8kReward(format_score=0.1, require_format=False).score("first 3, so it is 4.", "4")
    assert (graded.correct, graded.formatted) == (True, False)


def test_gsm8k_tells_an_unreadable_reference_from_a_wrong_answer():
    with pytest.raises(GoldUnparsable, match="has no number"):
        GSM8kReward().score("#### 4", "many")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>a</think> <answer>5</answer>", "5"),
        ("a</think>\n<answer> 5 </answer>\n", "5"),
        (r"a</think><answer>\boxed{\frac{1}{2}}</answer>", r"\frac{1}{2}"),
        ("a</think> <answer></answer>", ""),
        ("<answer>5</answer>", None),
        ("a</think> so <answer>5</answer>", None),
        ("a</think> <answer>5</answer> bye", None),
        ("a</think> <answer>5</answer> <answer>6</answer>", None),
        ("a</think> <answer>5</answer></answer>", None),
        ("<answer>5</answer> a</think> <answer>6</answer>", None),
        ("a</think></think> <answer>5</answer>", None),
        ("b <think>a</think> <answer>5</answer>", None),
        ("<think><think>a</think> <answer>5</answer>", None),
        ("a</think> <answer>5", None),
        ("", None),
    ],
)
def test_the_r1_form_is_kept_exactly_or_not_at_all(text, answer):
    assert r1_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>a</think> <answer>b</answer>", 1.0),
        ("<think>a</think>\n\n<answer>b</answer>\n", 1.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think> x <answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer></answer>", 0.0),
        ("<think>a<answer>b</think></answer>", 0.0),
        ("", 0.0),
    ],
)
def test_tags_are_in_order_once_and_with_nothing_between(text, score):
    assert FormatReward()([{"completion": text}]) == [score]


def test_a_pattern_must_match_the_whole_completion():
    assert PatternReward(r"a.*b", value=2.0)(["a\nb", "xab", "ab "]) == [2.0, 0.0, 2.0]


def test_length_is_free_and_then_falls_in_a_line():
    reward = LinearLengthReward(max_length=10, free_length=5)
    samples = [{"completion": "", "token_count": count} for count in (0, 5, 6, 10, 99, [1] * 7)]
    assert reward(samples) == pytest.approx([1.0, 1.0, 0.8, 0.0, 0.0, 0.6])


def test_length_is_best_at_its_target():
    assert TargetLengthReward(4, 2, unit="words")(["a b c d", "a b c", "a"]) == [1.0, 0.5, 0.0]
    assert TargetLengthReward(4, 2, unit="characters")(["abcd", "abcdef"]) == [1.0, 0.0]


def test_tokens_are_never_guessed_from_text():
    with pytest.raises(SampleIncomplete, match="token_count"):
        LinearLengthReward()(["some text"])


def test_repetition_costs_the_share_of_repeated_ngrams():
    reward = RepetitionPenalty(ngram_size=2)
    assert reward(["a b c d", "a a a a a", "A b a B", "a", ""]) == pytest.approx([0.0, -0.75, -1 / 3, 0.0, 0.0])


def test_numpy_arrays_of_samples_and_chats_are_samples_too():
    chat = {
        "completion": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "<think>a</think><answer>b</answer>"},
        ]
    }
    assert FormatReward()(np.array([chat, {"completion": "no"}], dtype=object)) == [1.0, 0.0]
    parts = {"completion": [{"role": "assistant", "content": [{"type": "text", "text": "a b"}]}]}
    assert TargetLengthReward(2, 2, unit="words")([parts]) == [1.0]
    assert RepetitionPenalty()(np.array(["a b c a b c", "a"])) == [-0.25, 0.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: FormatReward("think"),
        lambda: PatternReward("("),
        lambda: LinearLengthReward(10, 10),
        lambda: TargetLengthReward(5, 0),
        lambda: RepetitionPenalty(0),
    ],
)
def test_settings_that_make_no_sense_are_refused(make):
    with pytest.raises(RewardUnusable):
        make()


def test_a_sample_without_text_is_an_error_that_names_its_keys():
    with pytest.raises(SampleIncomplete, match="its keys are prompt, completion"):
        FormatReward()([{"prompt": "a", "completion": None}])
