"""Rewards that compare mathematics: accuracy, R1-zero and the cosine-scaled length."""

import anyio
import numpy as np
import pytest

from environments.rewards import AccuracyReward, CosineScaledReward, R1ZeroReward, evaluation_metrics, score_samples
from environments.rewards.protocol import GoldUnparsable, SampleIncomplete

FORMED = "<think>hm</think> <answer>{}</answer>"


def scores_of(reward, samples):
    return anyio.run(score_samples, reward, samples)


def test_accuracy_compares_the_final_answer_with_whatever_key_the_reference_has(verifier):
    samples = np.array(
        [
            {"completion": r"so \boxed{0.5}", "answer": r"work \boxed{\frac12}"},
            {"completion": "so\n#### 4", "ground_truth": "4"},
            {"completion": FORMED.format("5"), "response": "6"},
            {"completion": "5", "answer": "5"},
            {"completion": "", "answer": "5"},
            {"completion": r"\boxed{9^{9^{9^9}}}", "answer": "5"},
        ],
        dtype=object,
    )
    assert scores_of(AccuracyReward(1.0, -1.0, verifier=verifier), samples) == [1.0, 1.0, -1.0, -1.0, -1.0, -1.0]


def test_an_item_without_a_readable_reference_is_an_error_not_a_zero(verifier):
    with pytest.raises(GoldUnparsable, match="correct or remove"):
        scores_of(AccuracyReward(verifier=verifier), [{"completion": r"\boxed{1}", "answer": "  "}])
    with pytest.raises(SampleIncomplete, match="none of answer"):
        scores_of(AccuracyReward(verifier=verifier), [{"completion": r"\boxed{1}"}])


def test_r1_zero_rewards_form_and_answer_apart(verifier):
    reward = R1ZeroReward(format_score=0.25, verifier=verifier)
    right, wrong, formless = (
        reward.score(text, "1/2") for text in (FORMED.format("0.5"), FORMED.format("2"), r"\boxed{0.5}")
    )
    assert (right.format_reward, right.answer_reward, right.score) == (1.0, 1.0, 1.0)
    assert (wrong.format_reward, wrong.answer_reward, wrong.score) == (1.0, 0.0, 0.25)
    assert (formless.format_reward, formless.answer_reward, formless.score) == (0.0, 0.0, 0.0)


def test_r1_zero_grades_batches_as_it_grades_one_and_sums_up_for_evaluations(verifier):
    reward = R1ZeroReward(verifier=verifier)
    texts = [FORMED.format("4"), FORMED.format("5"), "4", FORMED.format("4") + "</answer>"]
    samples = [{"completion": text, "answer": "4"} for text in texts]
    graded = anyio.run(reward.grade, samples)
    assert graded == [reward.score(text, "4") for text in texts]
    assert evaluation_metrics(graded) == {
        "eval/accuracy": 0.25,
        "eval/format_reward": 0.5,
        "eval/answer_reward": 0.25,
    }
    assert scores_of(reward, samples) == [1.0, 0.0, 0.0, 0.0]


def test_an_answer_tag_cut_off_by_the_sampler_is_closed_only_when_asked(verifier):
    cut = "hm</think> <answer>4"
    assert R1ZeroReward(verifier=verifier).score(cut, "4").score == 0.0
    assert R1ZeroReward(close_answer=True, verifier=verifier).score(cut, "4").score == 1.0


def test_the_cosine_goes_from_one_end_to_the_other():
    reward = CosineScaledReward(max_length=100, correct=(1.0, 0.5), wrong=(-1.0, -0.5), exceeded=-2.0)
    cases = [(True, 0), (True, 50), (True, 99), (False, 0), (False, 50), (False, 99), (True, 100)]
    expected = [1.0, 0.75, 0.5, -1.0, -0.75, -0.5, -2.0]
    scaled = [reward.scaled(length, correct=right) for right, length in cases]
    assert scaled == pytest.approx(expected, abs=1e-3)
    assert reward.range == (-2.0, 1.0)


def test_the_cosine_reward_compares_each_answer_whatever_other_columns_its_data_have(verifier):
    """A column `correct` of the data, such as the letter of a choice, made every completion of its row right."""
    reward = CosineScaledReward(max_length=100, unit="words", verifier=verifier)
    row = {"answer": "4", "correct": "B"}
    samples = [{"completion": r"\boxed{4}", **row}, {"completion": r"\boxed{5}", **row}]
    right, wrong = scores_of(reward, samples)
    assert right > 0.99
    assert wrong < -0.99
