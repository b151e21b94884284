r"""GSM8K's reward: the number after `####` or in `\boxed{}` against the reference, without symbolic algebra."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from environments.rewards.answers import after_hashes, after_thinking, last_boxed
from environments.rewards.errors import GoldUnparsable
from environments.rewards.numerals import first_number, last_number
from environments.rewards.protocol import Sample, SampleReward, ScoreRange
from environments.rewards.samples import completion_of, gold_of


@dataclass(frozen=True, slots=True)
class GSM8kScore:
    """A graded text: its score, whether the number is right, whether it was marked as the answer, and the number."""

    score: float
    correct: bool
    formatted: bool
    number: Fraction | None


class GSM8kReward(SampleReward):
    r"""`correct_score` for the right number, `format_score` for a wrong one that is marked as the answer, else 0.

    A number is marked by `####` or `\boxed{}`; the last mark counts, and the first number after it. With
    `require_format=False` the last number of an unmarked text is taken instead.

        GSM8kReward(format_score=0.1).score("2 + 2 = 4\n#### 4", "4").correct
    """

    formula: ClassVar[str] = (
        "correct_score (1) if the marked number is right, format_score (0) if marked and wrong, else 0"
    )

    def __init__(self, format_score: float = 0.0, correct_score: float = 1.0, *, require_format: bool = True) -> None:
        self.format_score = format_score
        self.correct_score = correct_score
        self.require_format = require_format

    @property
    def range(self) -> ScoreRange:
        scores = (0.0, self.format_score, self.correct_score)
        return ScoreRange(min(scores), max(scores))

    def score(self, text: str, truth: str | float) -> GSM8kScore:
        """Grade `text` against `truth`: a number, or a worked solution with its answer after `####`."""
        gold = _gold_number(str(truth))
        marked = marked_number(text)
        number = marked
        if marked is None and not self.require_format:
            number = last_number(after_thinking(text))
        formatted = marked is not None
        correct = number == gold
        earned = self.correct_score if correct else self.format_score if formatted else 0.0
        return GSM8kScore(earned, correct, formatted, number)

    def score_sample(self, sample: Sample) -> float:
        return self.score(completion_of(sample), gold_of(sample)).score


def marked_number(text: str) -> Fraction | None:
    r"""The number after the last `####`, or in the last `\boxed{}` where no hashes are; None when there is none."""
    text = after_thinking(text)
    marked = after_hashes(text)
    if marked is None or "\\boxed" in marked:
        marked = last_boxed(text if marked is None else marked)
    return None if marked is None else first_number(marked)


def _gold_number(truth: str) -> Fraction:
    gold = marked_number(truth)
    if gold is None:
        gold = last_number(truth)
    if gold is None:
        raise GoldUnparsable(f"the reference answer {truth!r:.80} holds no number; GSM8K's answers end in '#### 72'")
    return gold
