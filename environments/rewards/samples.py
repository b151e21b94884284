"""Reading samples: the text that is scored, the reference answer, the length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from environments.rewards.errors import SampleIncomplete
from environments.rewards.protocol import Sample

GOLD_KEYS = ("answer", "ground_truth", "truth", "response")
"""Where data sets keep the reference answer, in the order they are looked at."""

LengthUnit = Literal["tokens", "words", "characters"]


def completion_of(sample: Sample) -> str:
    """The text to score: `completion`, or the content of its last message where that is a chat."""
    if isinstance(sample, str):
        return str(sample)
    completion = sample.get("completion")
    if isinstance(completion, str):
        return completion
    if isinstance(completion, Sequence) and completion and isinstance(completion[-1], Mapping):
        return _text_of(completion[-1].get("content"))
    raise SampleIncomplete(f"a sample has no text at 'completion' but {completion!r:.80}; its keys are {_keys(sample)}")


def gold_of(sample: Sample) -> str:
    """The reference answer, under whichever of the usual keys it is."""
    if not isinstance(sample, str):
        for key in GOLD_KEYS:
            if sample.get(key) is not None:
                return str(sample[key])
    raise SampleIncomplete(f"a sample has none of {', '.join(GOLD_KEYS)} as reference; its keys are {_keys(sample)}")


def length_of(sample: Sample, unit: LengthUnit) -> int:
    """The completion's length. Tokens are read from `token_count` (a number or the tokens), never guessed from text."""
    if unit == "characters":
        return len(completion_of(sample))
    if unit == "words":
        return len(completion_of(sample).split())
    count = None if isinstance(sample, str) else sample.get("token_count")
    if count is None:
        raise SampleIncomplete(
            "a sample has no 'token_count', which lengths in tokens need; add it, or choose unit words or characters"
        )
    return int(count) if isinstance(count, int | float) else len(count)


def _text_of(content: Any) -> str:
    """Message content as text; of OpenAI content parts the text ones count."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(part.get("text", "") for part in content if isinstance(part, Mapping))
    return ""


def _keys(sample: Sample) -> str:
    return "none (it is plain text)" if isinstance(sample, str) else ", ".join(map(str, sample)) or "none"
