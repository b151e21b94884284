"""The R1-zero grader: reasoning, then `</think> <answer>…</answer>`, then nothing; graded for form and for the answer.

DeepSeek-R1 (arXiv:2501.12948) trains with two rule-based rewards: whether the tags are in place, and whether the answer
between them is right. A right answer outside the tags earns nothing, so the form is learnt first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from environments.rewards.accuracy import MathReward, reference, require_readable
from environments.rewards.answers import last_boxed
from environments.rewards.math_verifier import AnswerJudge
from environments.rewards.protocol import Sample, ScoreRange
from environments.rewards.samples import completion_of, gold_of

_END = re.compile(r"</think>\s*<answer>")
_CLOSE = "</answer>"


@dataclass(frozen=True, slots=True)
class R1ZeroScore:
    """The two rewards of a text, each 0 or 1, and what it earns for them together."""

    format_reward: float
    answer_reward: float
    score: float

    @property
    def correct(self) -> bool:
        return self.answer_reward == 1.0


class R1ZeroReward(MathReward):
    """`correct_score` for form and answer, `format_score` for the form alone, else 0.

    The form: at most one `<think>`, and that at the very start (a prompt may already have opened it); one `</think>`;
    then `<answer>`; one `</answer>` at the very end. A text with a second closing tag has no form. `close_answer` adds
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
        """Grade one text, waiting for the comparison. From async code use `grade`."""
        answer = self._answer_in(text)
        if answer is None:
            return self._scored(formatted=False, correct=False)
        judgement = self.verifier.judge(reference(truth), answer)
        require_readable(truth, judgement)
        return self._scored(formatted=True, correct=judgement.correct)

    async def grade(self, samples: Sequence[Sample]) -> list[R1ZeroScore]:
        """Both rewards of each sample."""
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
    r"""The answer of a text in the R1-zero form, out of its `\boxed{}` if it has one; None when the form is broken."""
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
    """The share of right answers, of texts in form and of both, by the names evaluations report."""
    count = max(len(graded), 1)
    return {
        "eval/accuracy": sum(score.correct for score in graded) / count,
        "eval/format_reward": sum(score.format_reward for score in graded) / count,
        "eval/answer_reward": sum(score.answer_reward for score in graded) / count,
    }
