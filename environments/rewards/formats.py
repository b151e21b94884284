"""Whether a completion has the form that was asked for: tags in their order, or a pattern."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from environments.rewards.errors import RewardUnusable
from environments.rewards.protocol import Sample, SampleReward, ScoreRange
from environments.rewards.samples import completion_of


class FormatReward(SampleReward):
    """`value` if every tag is opened and closed exactly once, in the order given and with nothing between, else 0."""

    formula: ClassVar[str] = "value (1) if each of the tags is there once, in order and with nothing between, else 0"

    def __init__(self, tags: Sequence[str] = ("think", "answer"), value: float = 1.0) -> None:
        if isinstance(tags, str) or not tags:
            raise RewardUnusable(f"tags {tags!r} name no form; give a list such as ['think', 'answer']")
        self.tags = tuple(tags)
        self.value = value

    @property
    def range(self) -> ScoreRange:
        return ScoreRange(min(0.0, self.value), max(0.0, self.value))

    def score_sample(self, sample: Sample) -> float:
        return self.value if has_tags(completion_of(sample), self.tags) else 0.0


class PatternReward(SampleReward):
    """`value` if the whole completion matches the regular expression, `.` matching line breaks too, else 0."""

    formula: ClassVar[str] = "value (1) if the whole completion matches the pattern, else 0"

    def __init__(self, pattern: str, value: float = 1.0) -> None:
        try:
            self.pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise RewardUnusable(f"pattern {pattern!r} is no regular expression: {error}") from error
        self.value = value

    @property
    def range(self) -> ScoreRange:
        return ScoreRange(min(0.0, self.value), max(0.0, self.value))

    def score_sample(self, sample: Sample) -> float:
        return self.value if self.pattern.fullmatch(completion_of(sample).strip()) else 0.0


def has_tags(text: str, tags: Sequence[str]) -> bool:
    """Whether `text` is exactly `<a>…</a> <b>…</b>` for the tags given, white space aside."""
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
