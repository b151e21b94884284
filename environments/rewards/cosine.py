"""The cosine-scaled length reward: right answers earn more when short, wrong ones lose less when long."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from environments.rewards.accuracy import MathReward
from environments.rewards.answers import final_answer
from environments.rewards.errors import RewardUnusable
from environments.rewards.math_verifier import AnswerJudge
from environments.rewards.protocol import Sample, ScoreRange
from environments.rewards.samples import LengthUnit, completion_of, gold_of, length_of


class CosineScaledReward(MathReward):
    """Yeo et al., "Demystifying Long Chain-of-Thought Reasoning in LLMs" (arXiv:2502.03373), section on the reward.

    With length L and `max_length` M: at_max + (at_0 - at_max) * (1 + cos(pi * L / M)) / 2, where at_0 and at_max are
    `correct` = (1, 0.5) for right answers and `wrong` = (-1, -0.5) for others; a completion of M or more earns
    `exceeded`. The paper's values are (2, 1), (-10, 0) and -10; these stay within the ±5 that keeps training steady.
    A sample that says whether it is `correct` is not compared with its reference again.
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
        correct = await self._correctness(samples)
        return [
            self.scaled(length_of(sample, self.unit), correct=right)
            for sample, right in zip(samples, correct, strict=True)
        ]

    def scaled(self, length: int, *, correct: bool) -> float:
        """The formula."""
        if length >= self.max_length:
            return self.exceeded
        at_zero, at_max = self.correct if correct else self.wrong
        return at_max + (at_zero - at_max) * (1.0 + math.cos(math.pi * length / self.max_length)) / 2.0

    async def _correctness(self, samples: Sequence[Sample]) -> list[bool]:
        known = [None if isinstance(sample, str) else sample.get("correct") for sample in samples]
        unknown = [sample for sample, right in zip(samples, known, strict=True) if right is None]
        golds = [gold_of(sample) for sample in unknown]
        judged = iter(await self.judge_answers(golds, [final_answer(completion_of(sample)) for sample in unknown]))
        return [next(judged).correct if right is None else bool(right) for right in known]
