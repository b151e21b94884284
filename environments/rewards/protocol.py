"""The module defines the interface of rewards, the errors of scoring, and functions that read samples.

A reward is a callable from samples to scores, one score a sample, plain or async:

    def ends_properly(samples):
        return [float(sample["completion"].rstrip().endswith(".")) for sample in samples]

Samples are mappings with at least `completion`; scores may be a list, a tuple or a numpy array. Rewards of this
package also have a `range`, by which others normalise them and recognise the best score. An error is never turned
into a score: the rollout is reported, not trained on.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from atropos_api.common.concurrency import Worker
from atropos_api.common.errors import AtroposError
from environments.rewards.failures import reward_failed


class RewardUnknown(AtroposError):
    """No reward has this name, or it cannot be loaded."""


class RewardUnusable(AtroposError):
    """A reward, its settings or what it returned cannot be used."""


class ScoreNotFinite(RewardUnusable):
    """A reward returned NaN or an infinite number."""


class SampleIncomplete(AtroposError):
    """A sample lacks what the reward reads from it."""


class GoldUnparsable(AtroposError):
    """The reference answer cannot be read as mathematics; the item is at fault, not the model."""


class MathVerifyUnavailable(AtroposError):
    """The child process that compares answers cannot be started."""


Sample = Mapping[str, Any] | str
"""`prompt`, `completion` and the data's other columns (`answer`, `token_count`, …); a plain text is a completion."""


class Reward(Protocol):
    """A callable that scores a batch of samples; a plain function is one."""

    def __call__(self, samples: Sequence[Any], /) -> Iterable[float] | Awaitable[Iterable[float]]: ...


class ScoreRange(NamedTuple):
    """The lowest and the highest score that a reward can give, both included; infinite bounds are never reached."""

    low: float
    high: float

    def __str__(self) -> str:
        left = "[" if math.isfinite(self.low) else "("
        right = "]" if math.isfinite(self.high) else ")"
        return f"{left}{self.low:g}, {self.high:g}{right}"


class SampleReward(ABC):
    """A synchronous reward that scores one sample at a time."""

    formula: ClassVar[str]

    @property
    @abstractmethod
    def range(self) -> ScoreRange:
        """The scores this reward can give."""

    @abstractmethod
    def score_sample(self, sample: Sample) -> float:
        """Return the score of one sample."""

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [self.score_sample(sample) for sample in samples]


NO_SCORES = (Mapping, str, bytes, set, frozenset)
"""Types that can be iterated but are not a list of scores: a mapping would be scored by its keys."""


async def score_samples(reward: Reward, samples: Sequence[Any], *, worker: Worker | None = None) -> list[float]:
    """Call a plain or async reward and check its result: one finite number for each sample.

    A plain function that is not of this package may take long, so with a `worker` that thread runs it. An error that is
    none of this project's becomes `RewardFailed`, which names its line.
    """
    try:
        values = await _call(reward, samples, worker)
    except AtroposError:
        raise
    except Exception as error:
        if isinstance(error, ExceptionGroup) and error.subgroup(AtroposError) is not None:
            raise
        raise reward_failed(reward_name(reward), reward, samples, error) from error
    if isinstance(values, NO_SCORES):
        raise RewardUnusable(
            f"{reward_name(reward)} returned a {type(values).__name__}, {values!r:.120}; return a list with one number "
            "a sample"
        )
    try:
        scores = [float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise RewardUnusable(f"{reward_name(reward)} returned {values!r:.120}; return one number a sample") from error
    if len(scores) != len(samples):
        raise RewardUnusable(f"{reward_name(reward)} returned {len(scores)} scores for {len(samples)} samples")
    bad = next((index for index, score in enumerate(scores) if not math.isfinite(score)), None)
    if bad is not None:
        raise ScoreNotFinite(f"{reward_name(reward)} scored sample {bad} with {scores[bad]}; scores must be finite")
    return scores


async def _call(reward: Reward, samples: Sequence[Any], worker: Worker | None) -> Any:
    if worker is None or is_async(reward) or _is_shipped(reward):
        returned = reward(samples)
    else:
        returned = await worker.run(partial(reward, samples), about=f"the reward {reward_name(reward)}")
    return await returned if inspect.isawaitable(returned) else returned


def is_async(reward: Any) -> bool:
    """Return True if calling the reward returns at once, with something to await."""
    stated = getattr(reward, "is_async", None)
    if isinstance(stated, bool):
        return stated
    return any(inspect.iscoroutinefunction(each) for each in (reward, getattr(reward, "__call__", None)))  # noqa: B004


def _is_shipped(reward: Reward) -> bool:
    """Return True for the rewards of this package, which are cheap or compare answers in processes of their own."""
    return type(reward).__module__.startswith(f"{__package__}.") and not hasattr(reward, "is_async")


def range_of(reward: Reward) -> ScoreRange | None:
    """Return the range that a reward states; None if it states none."""
    stated = getattr(reward, "range", None)
    return ScoreRange(*stated) if stated is not None else None


def reward_name(reward: Reward) -> str:
    return getattr(reward, "__name__", None) or type(reward).__name__


GOLD_KEYS = ("answer", "ground_truth", "truth", "response")
"""The keys under which data sets store the reference answer, in the order of lookup."""

LengthUnit = Literal["tokens", "words", "characters"]


def completion_of(sample: Sample) -> str:
    """Return the text to score: `completion`, or the content of its last message if it is a chat."""
    if isinstance(sample, str):
        return str(sample)
    completion = sample.get("completion")
    if isinstance(completion, str):
        return completion
    if isinstance(completion, Sequence) and completion and isinstance(completion[-1], Mapping):
        return _text_of(completion[-1].get("content"))
    raise SampleIncomplete(f"a sample has no text at 'completion' but {completion!r:.80}; its keys are {_keys(sample)}")


def gold_of(sample: Sample) -> str:
    """Return the reference answer, stored under one of `GOLD_KEYS`."""
    if not isinstance(sample, str):
        for key in GOLD_KEYS:
            if sample.get(key) is not None:
                return reference_text(sample[key])
    raise SampleIncomplete(f"a sample has none of {', '.join(GOLD_KEYS)} as reference; its keys are {_keys(sample)}")


def length_of(sample: Sample, unit: LengthUnit) -> int:
    """Return the completion's length; the number of tokens comes from `token_count` (a number or the tokens) only."""
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
    """Return message content as text; of OpenAI content parts only the text parts are used."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(part.get("text", "") for part in content if isinstance(part, Mapping))
    return ""


def reference_text(value: Any) -> str:
    """Return a reference as text: the last message of a chat, the items of a list joined by commas."""
    if not isinstance(value, list | tuple):
        return str(value)
    if value and isinstance(value[-1], Mapping):
        return _text_of(value[-1].get("content"))
    return ", ".join(map(str, value))


def _keys(sample: Sample) -> str:
    return "none (it is plain text)" if isinstance(sample, str) else ", ".join(map(str, sample)) or "none"
