"""A penalty for saying the same again: the share of word n-grams that occurred before."""

from __future__ import annotations

from typing import ClassVar

from environments.rewards.errors import RewardUnusable
from environments.rewards.protocol import Sample, SampleReward, ScoreRange
from environments.rewards.samples import completion_of


class RepetitionPenalty(SampleReward):
    """0 for a text without a repeated n-gram, towards `max_penalty` the more of its n-grams are repeats.

    Yeo et al., "Demystifying Long Chain-of-Thought Reasoning in LLMs" (arXiv:2502.03373) need such a penalty beside the
    length reward, which models otherwise meet by repeating themselves. Here it is one number for the whole text.
    """

    formula: ClassVar[str] = "max_penalty (-1) * (1 - distinct n-grams / n-grams), n = 3 words"

    def __init__(self, ngram_size: int = 3, max_penalty: float = -1.0) -> None:
        if ngram_size < 1 or max_penalty > 0:
            raise RewardUnusable(f"ngram_size {ngram_size} must be at least 1 and max_penalty {max_penalty} at most 0")
        self.ngram_size = ngram_size
        self.max_penalty = max_penalty

    @property
    def range(self) -> ScoreRange:
        return ScoreRange(self.max_penalty, 0.0)

    def score_sample(self, sample: Sample) -> float:
        words = completion_of(sample).lower().split()
        total = len(words) - self.ngram_size + 1
        if total < 1:
            return 0.0
        distinct = {tuple(words[start : start + self.ngram_size]) for start in range(total)}
        return self.max_penalty * (1.0 - len(distinct) / total)
