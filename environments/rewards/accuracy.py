"""Whether the final answer means the same as the reference, by math-verify; the base of rewards that need to know."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from environments.rewards.answers import final_answer
from environments.rewards.errors import GoldUnparsable
from environments.rewards.math_verifier import AnswerJudge, Judgement, MathVerifier, Outcome
from environments.rewards.protocol import Sample, ScoreRange
from environments.rewards.samples import completion_of, gold_of


class MathReward(ABC):
    """A reward that compares answers. Several of them may share one `verifier`; without one each makes its own."""

    formula: ClassVar[str]

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
        """One judgement a pair; a missing answer is not compared. Raises `GoldUnparsable` for a useless reference."""
        given = [(gold, answer) for gold, answer in zip(golds, answers, strict=True) if answer is not None]
        judged = iter(await self.verifier.judge_all([(reference(gold), answer) for gold, answer in given]))
        results = [Judgement(Outcome.NO_ANSWER) if answer is None else next(judged) for answer in answers]
        for gold, result in zip(golds, results, strict=True):
            require_readable(gold, result)
        return results


class AccuracyReward(MathReward):
    """`correct` if the final answer equals the reference, else `wrong`; `final_answer` says what counts as final.

    An answer that cannot be judged within the time limit (`9^{9^{9^9}}`) is wrong: whoever writes it gains nothing.
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
    """The answer inside a reference that may be a worked solution."""
    found = final_answer(gold)
    return gold.strip() if found is None else found


def require_readable(gold: str, judgement: Judgement) -> None:
    if judgement.outcome is Outcome.GOLD_UNPARSABLE:
        raise GoldUnparsable(f"the reference answer {gold!r:.120} cannot be read as mathematics; mend or drop the item")
