"""Health signs: rules on each step's metrics that show that training is going wrong, with advice for each.

A sign becomes an event at the first step at which it appears: a line in `events.jsonl`, a warning in the log, and
with `--stop-on` the end of the run. Limits are those of published guides. Where the guides give only words ("drops
dramatically") the limit is ours, and `HealthLimits` marks it so; `--health-limits` sets others. What a sign keeps of
earlier steps is plain data, stored in checkpoints. Importing this module loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import partial
from statistics import fmean, median
from typing import Any

from atropos_api.common import metric_names as names

Memory = dict[str, Any]
"""The state that signs keep of earlier steps, in types that JSON can store."""

ANY_SIGN = "health"
"""The value of `--stop-on` that means every sign."""

COMPARED_STEPS = 100
"""Number of earlier steps whose token rates are kept for comparison with the current window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthLimits:
    """The limits beyond which a value is not healthy."""

    mean_ratio: tuple[float, float] = (0.8, 1.2)
    clipped_fraction: float = 0.3
    loss: float = -10.0
    alignment: float = 0.1
    logprob_gap: float = 2.0
    """Nats between the mean logprobs of sampler and trainer."""
    kl: float = 1.0
    repetition: float = 0.5
    """Our own limit: half of all 4-grams are repeats."""
    reward_drop: float = 0.5
    """Our own limit: a fall of the reward's mean over a window, in standard deviations of a batch's rewards."""
    rate_drop: float = 0.5
    """Our own limit: tokens per second as a share of the median of up to 100 earlier steps."""
    left_out: float = 0.5
    """Our own limit: share of a step's sequences that are too long or have no token to train."""
    no_signal: float = 0.8
    """Our own limit: share of a step's sequences whose groups have equal rewards, at each of `flat_steps` steps."""
    flat_steps: int = 5
    window_steps: int = 5


def parse_limits(given: Sequence[str]) -> HealthLimits:
    """Parse limits `name=value`, a range as `mean_ratio=0.7-1.3`; `inf` disables one. Raises `ValueError`."""
    known: dict[str, Any] = {field.name: field.default for field in fields(HealthLimits)}
    chosen: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if name not in known or not equals:
            raise ValueError(f"{text} is not a limit; write name=value with one of {', '.join(known)}")
        try:
            chosen[name] = _like(known[name], value)
        except ValueError as error:
            raise ValueError(f"{text}: {value} is not a value like {_text(known[name])}") from error
    return HealthLimits(**chosen)


def limit_table() -> list[tuple[str, str]]:
    """Return every limit and its default, in the form that `--health-limits` takes."""
    return [(field.name, _text(field.default)) for field in fields(HealthLimits)]


def _like(usual: Any, text: str) -> Any:
    if isinstance(usual, int):
        return int(text)
    if not isinstance(usual, tuple):
        return float(text)
    low, high = (float(bound) for bound in text.split("-"))
    return low, high


def _text(value: Any) -> str:
    return "-".join(f"{bound:g}" for bound in value) if isinstance(value, tuple) else f"{value:g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthEvent:
    """A health event: one sign at the step at which it appeared."""

    sign: str
    step: int
    value: float
    message: str
    """The finding, in commonly searched terms."""
    advice: str

    def fields(self) -> dict[str, Any]:
        """Return the event as the fields of a line of `events.jsonl`."""
        return {"event": "health", **{name: getattr(self, name) for name in self.__slots__}}


Check = Callable[[Mapping[str, float]], float | None]
"""A check of one step's metrics, called in the order of the steps; returns the offending value, or None if there is
none.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sign:
    name: str
    check: Check
    message: str
    """A template with `{value}`, and the step's metrics by name through `{metrics[...]}`."""
    advice: str


class HealthMonitor:
    """Checks every step for health signs and keeps what they need of earlier steps; call `check` once a step."""

    def __init__(self, limits: HealthLimits | None = None) -> None:
        self._signs = _make_signs(limits or HealthLimits())
        self._present: set[str] = set()

    def memory(self) -> Memory:
        """Return the state by which later steps are judged, for a checkpoint."""
        kept = {name: check.kept for name, check in self._remembering().items()}
        return deepcopy({"present": sorted(self._present), "signs": kept})

    def remember(self, memory: Memory) -> None:
        """Restore the state that `memory` returned; a sign that is missing in it starts without state."""
        self._present = set(memory["present"])
        for name, check in self._remembering().items():
            check.kept.update(deepcopy(memory["signs"].get(name, {})))

    def _remembering(self) -> dict[str, _Remembering]:
        checks: dict[str, Any] = {sign.name: sign.check for sign in self._signs}
        return {name: check for name, check in checks.items() if isinstance(check, _Remembering)}

    def check(self, step: int, metrics: Mapping[str, float]) -> list[HealthEvent]:
        """Return an event for each sign that appears at this step and was absent at the step before."""
        values = {sign.name: sign.check(metrics) for sign in self._signs}
        found = [
            HealthEvent(
                sign=sign.name,
                step=step,
                value=value,
                message=sign.message.format(value=value, metrics=metrics),
                advice=sign.advice,
            )
            for sign in self._signs
            if (value := values[sign.name]) is not None and sign.name not in self._present
        ]
        self._present = {name for name, value in values.items() if value is not None}
        return found


def sign_names() -> list[str]:
    """Return the names of all signs, as `--stop-on` and `events.jsonl` spell them."""
    return [sign.name for sign in _make_signs(HealthLimits())]


def sign_table() -> list[tuple[str, str, str]]:
    """Return name, message (as a template) and advice of each sign, for the reference page."""
    return [(sign.name, sign.message, sign.advice) for sign in _make_signs(HealthLimits())]


def _above(name: str, limit: float) -> Check:
    return lambda metrics: metrics[name] if metrics.get(name, limit) > limit else None


def _below(name: str, limit: float) -> Check:
    return lambda metrics: metrics[name] if metrics.get(name, limit) < limit else None


def _outside(name: str, low: float, high: float) -> Check:
    return lambda metrics: metrics[name] if not low <= metrics.get(name, low) <= high else None


def _kl(limit: float, metrics: Mapping[str, float]) -> float | None:
    """Return the larger KL, from the sampler or the reference model (if there is one), if it is above the limit."""
    largest = max(metrics.get(name, 0.0) for name in (names.TRAIN_KL, names.TRAIN_KL_REFERENCE))
    return largest if largest > limit else None


def _left_out(limit: float, metrics: Mapping[str, float]) -> float | None:
    """Return the share of sequences left out unintentionally: too long, or without any token to train."""
    causes = ("overlong", "no_trained_token")
    count = sum(metrics.get(names.LEFT_OUT.format(cause=cause), 0.0) for cause in causes)
    share = count / max(1.0, metrics.get(names.SEQUENCES, 0.0))
    return share if share > limit else None


def _logprob_gap(limit: float, metrics: Mapping[str, float]) -> float | None:
    if names.LOGPROBS_INFERENCE_MEAN not in metrics or names.LOGPROBS_TRAINING_MEAN not in metrics:
        return None
    gap = metrics[names.LOGPROBS_INFERENCE_MEAN] - metrics[names.LOGPROBS_TRAINING_MEAN]
    return gap if abs(gap) > limit else None


class _Remembering:
    """A check that depends on earlier steps."""

    def __init__(self, **kept: Any) -> None:
        self.kept: Memory = kept


class _FlatReward(_Remembering):
    """The number of steps in a row in which no group had rewards that differ."""

    def __init__(self, steps: int) -> None:
        super().__init__(in_a_row=0)
        self._steps = steps

    def __call__(self, metrics: Mapping[str, float]) -> float | None:
        skipped = metrics.get(names.TRAIN_SKIPPED, 0.0) == 1.0
        left_out = metrics.get(names.TRAINED_TOKENS, 0.0) > 0.0  # they have a signal, but each was clipped or masked
        flat = skipped and not left_out and metrics.get(names.NO_SIGNAL_FRACTION, 1.0) > 0.0
        in_a_row: int = self.kept["in_a_row"] + 1 if flat else 0
        self.kept["in_a_row"] = in_a_row
        return float(in_a_row) if in_a_row >= self._steps else None


class _NoSignal(_Remembering):
    """The mean share of sequences in groups of equal rewards, if it is above the limit at each of the last steps."""

    def __init__(self, limits: HealthLimits) -> None:
        super().__init__(shares=[])
        self._limits = limits

    def __call__(self, metrics: Mapping[str, float]) -> float | None:
        steps = self._limits.flat_steps
        shares: list[float] = [*self.kept["shares"], metrics.get(names.NO_SIGNAL_FRACTION, 0.0)][-steps:]
        self.kept["shares"] = shares
        if len(shares) < steps or min(shares) <= self._limits.no_signal:
            return None
        # Where no group at all had a signal, the sign is `flat_reward`.
        return fmean(shares) if min(shares) < 1.0 else None


class _RewardDrop(_Remembering):
    """The mean reward over a window, compared with the best such window of the run."""

    def __init__(self, limits: HealthLimits) -> None:
        super().__init__(recent=[], best=None)  # mean and deviation of the rewards, of each step and of the best window
        self._limits = limits

    def __call__(self, metrics: Mapping[str, float]) -> float | None:
        if names.REWARD_MEAN not in metrics:
            return None
        window = self._limits.window_steps
        recent = [*self.kept["recent"], [metrics[names.REWARD_MEAN], metrics.get(names.REWARD_STD, 0.0)]][-window:]
        self.kept["recent"] = recent
        if len(recent) < window:
            return None
        mean, spread = (fmean(column) for column in zip(*recent, strict=True))
        if self.kept["best"] is None or mean > self.kept["best"][0]:
            self.kept["best"] = [mean, spread]
        best_mean, best_spread = self.kept["best"]
        fall: float = best_mean - mean
        # The current spread counts too: if every answer was right before, the best window has none, and any error
        # would count.
        return fall if fall > self._limits.reward_drop * max(best_spread, spread) and fall > 0 else None


class _RateDrop(_Remembering):
    """The token rate of the last steps, compared with the median of those before."""

    def __init__(self, limits: HealthLimits) -> None:
        super().__init__(rates=[])
        self._limits = limits

    def __call__(self, metrics: Mapping[str, float]) -> float | None:
        if names.TOKENS_PER_SECOND not in metrics:
            return None
        window = self._limits.window_steps
        rates: list[float] = [*self.kept["rates"], metrics[names.TOKENS_PER_SECOND]][-window - COMPARED_STEPS :]
        self.kept["rates"] = rates
        if len(rates) < 2 * window:
            return None
        now = median(rates[-window:])
        return now if now < self._limits.rate_drop * median(rates[:-window]) else None


def _make_signs(limits: HealthLimits) -> tuple[_Sign, ...]:
    return (*_policy_signs(limits), *_logprob_signs(limits), *_outcome_signs(limits))


def _policy_signs(limits: HealthLimits) -> tuple[_Sign, ...]:
    low, high = limits.mean_ratio
    return (
        _Sign(
            name="mean_ratio",
            check=_outside(names.MEAN_RATIO, low, high),
            message=f"mean_ratio {{value:.3f}} is outside {low:g}-{high:g}: the policy is far from the sampler's",
            advice="keep --clip-eps 0.2, lower --lr, add --warmup-steps 20, bound the age with --max-staleness",
        ),
        _Sign(
            name="clipped_fraction",
            check=_above(names.CLIPPED_FRACTION, limits.clipped_fraction),
            message=f"clipped_fraction {{value:.2f}} is above {limits.clipped_fraction:g}: much is clipped away",
            advice="lower --lr or --epochs-per-batch, or use --importance-sampling truncated with old rollouts",
        ),
        _Sign(
            name="loss",
            check=_below(names.TRAIN_LOSS, limits.loss),
            message=f"loss {{value:.2f}} is below {limits.loss:g}: ratios or advantages are out of bounds",
            advice="keep the clip on, look at the scale of the rewards and at grpo/max_ratio",
        ),
        _Sign(
            name="kl",
            check=partial(_kl, limits.kl),
            message=f"KL {{value:.2f}} is above {limits.kl:g}: diverging KL",
            advice="raise --beta, lower --lr, narrow --clip-eps, look at the scale of the rewards",
        ),
    )


def _logprob_signs(limits: HealthLimits) -> tuple[_Sign, ...]:
    return (
        _Sign(
            name="reference_logprobs",
            check=_above(names.LOGPROBS_INFERENCE_MEAN, 0.0),
            message="ref_logprobs avg {value:.3f} (should be negative!): this suggests inference_logprobs alignment is "
            "wrong",
            advice="the environment has to pass on the server's logprobs, a token each, 1.0 where nothing was sampled",
        ),
        _Sign(
            name="logprob_gap",
            check=partial(_logprob_gap, limits.logprob_gap),
            message=f"Logprob gap: ref={{metrics[{names.LOGPROBS_INFERENCE_MEAN}]:.3f}}, "
            f"train={{metrics[{names.LOGPROBS_TRAINING_MEAN}]:.3f}}",
            advice="the rollouts come from other weights or another temperature, or their logprobs are shifted",
        ),
        _Sign(
            name="alignment",
            check=_above(names.ALIGNMENT_DIFF_ABS_MEAN, limits.alignment),
            message=f"{names.ALIGNMENT_DIFF_ABS_MEAN} {{value:.3f}} is above {limits.alignment:g}: trainer and "
            "server do not hold the same weights, or count positions differently",
            advice="check that the server serves this trainer's run (/bridge/info) and returns processed logprobs",
        ),
    )


def _outcome_signs(limits: HealthLimits) -> tuple[_Sign, ...]:
    return (
        _Sign(
            name="reward_drop",
            check=_RewardDrop(limits),
            message="the mean reward of the last steps is {value:.3f} below its best: accuracy drops",
            advice="go back to an earlier checkpoint with --resume PATH and a lower --lr; look at grpo/mean_ratio",
        ),
        _Sign(
            name="repetition",
            check=_above(names.RESPONSE_REPETITION, limits.repetition),
            message="{value:.0%} of 4-grams are repeats: the output is repetitive (degenerate)",
            advice="go back to an earlier checkpoint and lower --lr; let the reward punish repetition",
        ),
        _Sign(
            name="flat_reward",
            check=_FlatReward(limits.flat_steps),
            message="{value:.0f} batches in a row gave no learning signal: each group has equal rewards (flat reward)",
            advice="look at the task's difficulty and its reward function; a larger --env.group_size finds differences",
        ),
        _Sign(
            name="no_signal",
            check=_NoSignal(limits),
            message=f"{{value:.0%}} of the sequences of the last {limits.flat_steps} batches gave no learning signal: "
            "nearly every group has equal rewards",
            advice="take easier or harder prompts, a larger --env.group_size, a reward with more levels, or a higher "
            "temperature",
        ),
        _Sign(
            name="left_out",
            check=partial(_left_out, limits.left_out),
            message="{value:.0%} of the sequences are not trained, or not whole: longer than --seq-len "
            "(data/overlong) or without a trained token (data/no_trained_token)",
            advice="raise --seq-len, or lower --env.max_token_length; where no token is trained, look at the masks",
        ),
        _Sign(
            name="rate_drop",
            check=_RateDrop(limits),
            message=f"tokens/s fell to {{value:.0f}}, below {limits.rate_drop:.0%} of the median before",
            advice="look at time/fetch (environments are slow), time/sync_wait (publishing is) and response lengths",
        ),
    )
