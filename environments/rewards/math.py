r"""The rewards in this module score mathematical answers.

`AccuracyReward` compares the final answer with the reference by math-verify. `GSM8kReward` compares the number after
`####` or in `\boxed{}`, without symbolic algebra. `R1ZeroReward` grades the form (reasoning, then `</think>
<answer>…</answer>`, then nothing) and the answer, as DeepSeek-R1 (arXiv:2501.12948) trains with two rule-based
rewards: tags in place, and a right answer between them. A right answer outside the tags earns nothing, so the form is
learnt first. `CosineScaledReward` is scaled by length: right answers earn more when short, wrong ones lose less when
long.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from atropos_api.common import metric_names as names
from environments.rewards.answers import (
    HASHES,
    after_hashes,
    after_thinking,
    final_answer,
    first_number,
    last_boxed,
    last_number,
)
from environments.rewards.math_verifier import AnswerJudge, Judgement, MathVerifier, Outcome
from environments.rewards.protocol import (
    GoldUnparsable,
    LengthUnit,
    RewardUnusable,
    Sample,
    SampleReward,
    ScoreRange,
    completion_of,
    gold_of,
    length_of,
)

_CALCULATION = re.compile(
    r"\d\s*(?:[-+*/×·÷x]|\\(?:times|cdot|div)(?![a-zA-Z]))\s*\\?\$?\d"
    r"|\d!\s*(?:[-+*/×·÷$)!]|\\|$)|\d\^[{(]{0,2}-?\d|\d\(-?\d[\d\s.,%+*/×·÷^-]*\)|\\(?:[dt]?frac|sqrt)"
)
"""A calculation before the last `=`, after which is its result; of `2 h = 120 min` the first number is the answer."""


class MathReward(ABC):
    """A reward that compares answers. Several may share one `verifier`; without one each makes its own."""

    formula: ClassVar[str]
    needs_reference: ClassVar[bool] = True

    def __init__(self, verifier: AnswerJudge | None = None) -> None:
        self._verifier = verifier

    @property
    def verifier(self) -> AnswerJudge:
        if self._verifier is None:
            self._verifier = MathVerifier()
        return self._verifier

    @property
    @abstractmethod
    def range(self) -> ScoreRange:
        """The scores this reward can give."""

    async def judge_answers(self, golds: Sequence[str], answers: Sequence[str | None]) -> list[Judgement]:
        """Return one judgement per pair; missing answers are not compared. A bad reference raises `GoldUnparsable`."""
        given = [(gold, answer) for gold, answer in zip(golds, answers, strict=True) if answer is not None]
        judged = iter(await self.verifier.judge_all([(reference(gold), answer) for gold, answer in given]))
        results = [Judgement(Outcome.NO_ANSWER) if answer is None else next(judged) for answer in answers]
        for gold, result in zip(golds, results, strict=True):
            require_readable(gold, result)
        return results


class AccuracyReward(MathReward):
    """`correct` if the final answer equals the reference, else `wrong`; the function `final_answer` finds the final
    answer.

    An answer that cannot be judged within the time limit (`9^{9^{9^9}}`) is wrong, so a model gains nothing by it.
    """

    formula: ClassVar[str] = "correct (1) if the final answer equals the reference, else wrong (0)"

    def __init__(self, correct: float = 1.0, wrong: float = 0.0, *, verifier: AnswerJudge | None = None) -> None:
        super().__init__(verifier)
        self.correct = correct
        self.wrong = wrong

    @property
    def range(self) -> ScoreRange:
        return ScoreRange(min(self.correct, self.wrong), max(self.correct, self.wrong))

    async def __call__(self, samples: Sequence[Sample]) -> list[float]:
        golds = [gold_of(sample) for sample in samples]
        judged = await self.judge_answers(golds, [final_answer(completion_of(sample)) for sample in samples])
        return [self.correct if judgement.correct else self.wrong for judgement in judged]


def reference(gold: str) -> str:
    """Return the final answer of a reference, which may be a worked solution."""
    found = final_answer(gold)
    return gold.strip() if found is None else found


def require_readable(gold: str, judgement: Judgement) -> None:
    if judgement.outcome is Outcome.GOLD_UNPARSABLE:
        raise GoldUnparsable(
            f"the reference answer {gold!r:.120} cannot be read as mathematics; correct or remove the item"
        )


@dataclass(frozen=True, slots=True)
class GSM8kScore:
    """A graded text: its score, True if the number is right, True if it was marked as the answer, and the number."""

    score: float
    correct: bool
    formatted: bool
    number: Fraction | None


class GSM8kReward(SampleReward):
    r"""`correct_score` for the right number, `format_score` for a wrong one that is marked as the answer, else 0.

    A number is marked by `####` or `\boxed{}`; the last mark counts, and the first number after it or, as in
    `#### 5 + 3 = 8`, after the last `=`. With `require_format=False` the last number of an unmarked text is taken
    instead.

        GSM8kReward(format_score=0.1).score("2 + 2 = 4\n#### 4", "4").correct
    """

    needs_reference: ClassVar[bool] = True
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
    r"""Return the number in the last `\boxed{}` after the last `####`, else the one after `####`; None for none."""
    text = after_thinking(text)
    boxed = last_boxed(text.rpartition(HASHES)[2])
    # Prose after the answer, as in `#### 72`, "which I put in \boxed{}", may name a box that marks no number.
    marked = after_hashes(text) if boxed is None or first_number(boxed) is None else boxed
    if marked is None:
        return None
    calculation, _, result = marked.rpartition("=")
    found = first_number(result) if _CALCULATION.search(calculation) else None
    return first_number(marked) if found is None else found


def _gold_number(truth: str) -> Fraction:
    gold = marked_number(truth)
    if gold is None:
        gold = last_number(truth)
    if gold is None:
        raise GoldUnparsable(f"the reference answer {truth!r:.80} has no number; GSM8K's answers end in '#### 72'")
    return gold


_END = re.compile(r"</think>\s*<answer>")
_CLOSE = "</answer>"


@dataclass(frozen=True, slots=True)
class R1ZeroScore:
    """The two rewards of a text, each 0 or 1, and its total score."""

    format_reward: float
    answer_reward: float
    score: float

    @property
    def correct(self) -> bool:
        return self.answer_reward == 1.0


class R1ZeroReward(MathReward):
    """`correct_score` for form and answer, `format_score` for the form alone, else 0.

    The form: at most one `<think>`, and that at the very start (a prompt may already have opened it); one `</think>`;
    then `<answer>`; one `</answer>` at the very end. A text with a second closing tag is not in it. `close_answer` adds
    a missing `</answer>`, for samplers that stop at it and cut it off.
    """

    formula: ClassVar[str] = (
        "correct_score (1) if format_reward and answer_reward are 1, format_score (0) if format_reward alone is, else 0"
    )

    def __init__(
        self,
        format_score: float = 0.0,
        correct_score: float = 1.0,
        *,
        close_answer: bool = False,
        verifier: AnswerJudge | None = None,
    ) -> None:
        super().__init__(verifier)
        self.format_score = format_score
        self.correct_score = correct_score
        self.close_answer = close_answer

    @property
    def range(self) -> ScoreRange:
        scores = (0.0, self.format_score, self.correct_score)
        return ScoreRange(min(scores), max(scores))

    def score(self, text: str, truth: str) -> R1ZeroScore:
        """Grade one text; blocks. From async code use `grade`."""
        answer = self._answer_in(text)
        if answer is None:
            return self._scored(formatted=False, correct=False)
        judgement = self.verifier.judge(reference(truth), answer)
        require_readable(truth, judgement)
        return self._scored(formatted=True, correct=judgement.correct)

    async def grade(self, samples: Sequence[Sample]) -> list[R1ZeroScore]:
        """Return both rewards of each sample."""
        answers = [self._answer_in(completion_of(sample)) for sample in samples]
        judged = await self.judge_answers([gold_of(sample) for sample in samples], answers)
        return [
            self._scored(formatted=answer is not None, correct=judgement.correct)
            for answer, judgement in zip(answers, judged, strict=True)
        ]

    async def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [graded.score for graded in await self.grade(samples)]

    def _answer_in(self, text: str) -> str | None:
        if self.close_answer and _CLOSE not in text:
            text += _CLOSE
        return r1_answer(text)

    def _scored(self, *, formatted: bool, correct: bool) -> R1ZeroScore:
        earned = self.correct_score if correct else self.format_score if formatted else 0.0
        return R1ZeroScore(float(formatted), float(correct), earned)


def r1_answer(text: str) -> str | None:
    r"""Return the answer of a text in R1-zero form, out of its `\boxed{}` if it has one; None for any other text."""
    text = text.strip()
    opened = text.count("<think>")
    if opened > 1 or (opened == 1 and not text.startswith("<think>")):
        return None
    if any(text.count(tag) != 1 for tag in ("</think>", "<answer>", _CLOSE)) or not text.endswith(_CLOSE):
        return None
    match = _END.search(text)
    if match is None:
        return None
    answer = text[match.end() : -len(_CLOSE)].strip()
    boxed = last_boxed(answer)
    return answer if boxed is None else boxed


def evaluation_metrics(graded: Sequence[R1ZeroScore]) -> Mapping[str, float]:
    """Return the shares of right answers, of texts in form, and of both, under the metric names of evaluations."""
    count = max(len(graded), 1)
    return {
        names.EVAL_ACCURACY: sum(score.correct for score in graded) / count,
        names.EVAL_FORMAT_REWARD: sum(score.format_reward for score in graded) / count,
        names.EVAL_ANSWER_REWARD: sum(score.answer_reward for score in graded) / count,
    }


class CosineScaledReward(MathReward):
    """The cosine-scaled length reward of Yeo et al., "Demystifying Long Chain-of-Thought Reasoning in LLMs".

    From the section on the reward (arXiv:2502.03373). With length L and `max_length` M: at_max + (at_0 - at_max) * (1
    + cos(pi * L / M)) / 2, where at_0 and at_max are `correct` = (1, 0.5) for right answers and `wrong` = (-1, -0.5)
    for others; a completion of length M or more earns `exceeded`. The paper's values are (2, 1), (-10, 0) and -10;
    the defaults stay within the ±5 that keeps training stable.
    """

    formula: ClassVar[str] = (
        "at_max + (at_0 - at_max) * (1 + cos(pi * length / max_length)) / 2 with (at_0, at_max) = correct (1, 0.5) "
        "or wrong (-1, -0.5); exceeded (-1) from max_length on"
    )

    def __init__(
        self,
        max_length: int = 2048,
        correct: tuple[float, float] = (1.0, 0.5),
        wrong: tuple[float, float] = (-1.0, -0.5),
        exceeded: float = -1.0,
        *,
        unit: LengthUnit = "tokens",
        verifier: AnswerJudge | None = None,
    ) -> None:
        super().__init__(verifier)
        if max_length < 1:
            raise RewardUnusable(f"max_length {max_length} must be at least 1")
        self.max_length = max_length
        self.correct = correct
        self.wrong = wrong
        self.exceeded = exceeded
        self.unit = unit

    @property
    def range(self) -> ScoreRange:
        scores = (*self.correct, *self.wrong, self.exceeded)
        return ScoreRange(min(scores), max(scores))

    async def __call__(self, samples: Sequence[Sample]) -> list[float]:
        golds = [gold_of(sample) for sample in samples]
        judged = await self.judge_answers(golds, [final_answer(completion_of(sample)) for sample in samples])
        return [
            self.scaled(length_of(sample, self.unit), correct=judgement.correct)
            for sample, judgement in zip(samples, judged, strict=True)
        ]

    def scaled(self, length: int, *, correct: bool) -> float:
        if length >= self.max_length:
            return self.exceeded
        at_zero, at_max = self.correct if correct else self.wrong
        return at_max + (at_zero - at_max) * (1.0 + math.cos(math.pi * length / self.max_length)) / 2.0
