"""Rewards for the text of a completion: its form (tags or a pattern), its length, and a penalty for repetition."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from environments.rewards.protocol import (
    LengthUnit,
    RewardUnusable,
    Sample,
    SampleReward,
    ScoreRange,
    completion_of,
    length_of,
)


class FormatReward(SampleReward):
    """A reward of `value` if each tag is opened and closed once, in the given order with nothing between; else 0."""

    formula: ClassVar[str] = "value (1) if each of the tags is there once, in order and with nothing between, else 0"

    def __init__(self, tags: Sequence[str] = ("think", "answer"), value: float = 1.0) -> None:
        if isinstance(tags, str) or not tags:
            raise RewardUnusable(f"tags {tags!r} define no form; give a list such as ['think', 'answer']")
        self.tags = tuple(tags)
        self.value = value

    @property
    def range(self) -> ScoreRange:
        return ScoreRange(min(0.0, self.value), max(0.0, self.value))

    def score_sample(self, sample: Sample) -> float:
        return self.value if has_tags(completion_of(sample), self.tags) else 0.0


class PatternReward(SampleReward):
    """A reward of `value` if the whole completion matches the regular expression; `.` matches line breaks too."""

    formula: ClassVar[str] = "value (1) if the whole completion matches the pattern, else 0"

    def __init__(self, pattern: str, value: float = 1.0) -> None:
        try:
            self.pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise RewardUnusable(f"pattern {pattern!r} is not a regular expression: {error}") from error
        self.value = value

    @property
    def range(self) -> ScoreRange:
        return ScoreRange(min(0.0, self.value), max(0.0, self.value))

    def score_sample(self, sample: Sample) -> float:
        return self.value if self.pattern.fullmatch(completion_of(sample).strip()) else 0.0


def has_tags(text: str, tags: Sequence[str]) -> bool:
    """Return True if `text` is exactly `<a>…</a> <b>…</b>` for the tags given, white space aside."""
    rest = text.strip()
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1 or not rest.startswith(opening):
            return False
        _, found, rest = rest.partition(closing)
        if not found:
            return False
        rest = rest.lstrip()
    return not rest


class LinearLengthReward(SampleReward):
    """A reward of 1 for completions up to `free_length`, which falls linearly to 0 at `max_length` and beyond."""

    formula: ClassVar[str] = "min(1, max(0, (max_length - length) / (max_length - free_length)))"

    def __init__(self, max_length: int = 2048, free_length: int | None = None, *, unit: LengthUnit = "tokens") -> None:
        self.max_length = max_length
        self.free_length = max_length // 2 if free_length is None else free_length
        if not 0 <= self.free_length < max_length:
            raise RewardUnusable(f"free_length {self.free_length} must be at least 0 and below max_length {max_length}")
        self.unit = unit

    @property
    def range(self) -> ScoreRange:
        return ScoreRange(0.0, 1.0)

    def score_sample(self, sample: Sample) -> float:
        left = (self.max_length - length_of(sample, self.unit)) / (self.max_length - self.free_length)
        return min(1.0, max(0.0, left))


class TargetLengthReward(SampleReward):
    """A reward of 1 at `target`, which falls linearly on either side to 0 at a distance of `tolerance`."""

    formula: ClassVar[str] = "max(0, 1 - abs(length - target) / tolerance)"

    def __init__(self, target: int = 512, tolerance: int | None = None, *, unit: LengthUnit = "tokens") -> None:
        self.target = target
        self.tolerance = target if tolerance is None else tolerance
        if target < 0 or self.tolerance <= 0:
            raise RewardUnusable(f"target {target} must be 0 or more and tolerance {self.tolerance} more than 0")
        self.unit = unit

    @property
    def range(self) -> ScoreRange:
        return ScoreRange(0.0, 1.0)

    def score_sample(self, sample: Sample) -> float:
        return max(0.0, 1.0 - abs(length_of(sample, self.unit) - self.target) / self.tolerance)


class RepetitionPenalty(SampleReward):
    """A penalty: 0 for a text without repeated n-grams, down to `max_penalty` as the share of repeated n-grams grows.

    Yeo et al., "Demystifying Long Chain-of-Thought Reasoning in LLMs" (arXiv:2502.03373), need such a penalty in
    addition to the length reward, which models otherwise maximise by repeating themselves. Here it is one number for
    the whole text.
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
