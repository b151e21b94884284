"""The choice of `--in-flight auto` between draining and recomputing the requests that run when a publish begins.

`fence` asks for it, and waits; the most that it waits, `--drain-seconds`, has its default in `options.publish`.

New requests are held back during a publish, so a publish that waits for running ones wastes the places of those that
have ended meanwhile, and a publish that pauses at once makes the engine compute the KV entries of all of them again.
`plan_drain` compares both for each time that a publish could wait, from what the engine core knows (`Running`): the
requests' lengths so far and limits, the lengths of the last outputs, and the times of its steps. Both costs are seconds
in which the engine generates nothing that it would have generated otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

_LONGEST_PLAN_STEPS = 4096
_EACH = 32
_POINTS = 65
"""The compared waits are those of up to 32 steps, and 65 evenly spaced ones up to the longest allowed."""
_ENOUGH_OUTPUTS = 256
"""Ended outputs whose lengths are enough to plan by, however many requests run."""


class Running(TypedDict):
    """The requests that an engine core computes from its next step on, and what its steps cost.

    They are the R that run and those of the waiting ones for which there are places.
    """

    computed_tokens: list[int]
    """`[R]` tokens of each request whose KV entries are computed."""
    tokens: list[int]
    """`[R]` tokens of each request, of its prompt and of its output so far."""
    generated_tokens: list[int]
    """`[R]` tokens of its output so far."""
    token_limits: list[int]
    """`[R]` the most tokens that its output may have."""
    waiting: int
    """Requests that wait until one of those ends."""
    distinct_tokens: int
    """Sum of `computed_tokens` with those of a shared prefix counted once."""
    last_lengths: list[int]
    """Output lengths of the requests that have ended last."""
    step_seconds: float
    """The part of a step's time that does not depend on what it computes."""
    request_seconds: float
    """Additional time of a step for each request in it."""
    prefill_seconds: float
    """Additional time of a step for each token beyond the first of a request."""


@dataclass(frozen=True, slots=True)
class DrainPlan:
    """The wait with the least expected loss."""

    places: int
    """The number of requests that the engine would compute without the wait."""
    seconds: float
    expected_loss_seconds: float
    step_share: float
    """The share of a full step's time that is lost if none of its requests is left."""
    prefill_seconds: float

    def loss_seconds(self, idle_seconds: float, discarded_tokens: int) -> float:
        """Return the loss of a publish that happened.

        `idle_seconds` is the time of its wait, weighted by the share of the requests that had ended.
        """
        return idle_seconds * self.step_share + discarded_tokens * self.prefill_seconds


NOTHING_RUNS = DrainPlan(0, 0.0, 0.0, 0.0, 0.0)


def plan_drain(running: Running, limit_seconds: float, *, places: int = 0) -> DrainPlan:
    """Return the wait of at most `limit_seconds` with the least expected loss.

    With A(j) of P requests still running after j steps, and a step that takes a + b A seconds, step j generates A(j)
    tokens in a time in which a full engine generates A(j) + P a (1 - A(j)/P) / (a + b P): it loses a (1 - A(j)/P)
    seconds. What runs after k steps is computed again at `prefill_seconds` a token. P is the number of requests now,
    or `places` if that is higher, as it is after a part of the wait. Before as many outputs have ended as requests
    run, the wait is the longest one allowed.
    """
    requests = len(running["computed_tokens"])
    places = max(places, requests)
    fixed, each, prefill = (running[name] for name in ("step_seconds", "request_seconds", "prefill_seconds"))
    full_step = fixed + each * places
    if requests == 0 or full_step <= 0.0:
        return DrainPlan(places, 0.0, 0.0, 0.0, prefill)
    most_steps = min(_LONGEST_PLAN_STEPS, max(0, int(limit_seconds / full_step)))
    spaced = np.linspace(0, most_steps, _POINTS).astype(np.int64)
    steps = np.union1d(spaced, np.arange(min(_EACH, most_steps) + 1))
    survival = _survival(running, steps)
    alive = survival.sum(axis=0)
    lost = fixed * _integral(1.0 - np.minimum(1.0, (alive + running["waiting"]) / places), steps)
    computed, tokens = (np.asarray(running[name], np.float64) for name in ("computed_tokens", "tokens"))
    # Without a wait, only what has been computed so far is lost; a request that has not begun loses nothing.
    at_pause = np.where(steps == 0, computed[:, None], tokens[:, None] + steps)
    shared = running["distinct_tokens"] / max(1.0, float(computed.sum()))
    losses = lost + prefill * shared * (survival * at_pause).sum(axis=0)
    # The first outputs to end are the shortest: until as many have ended as are running, their lengths say too little
    # about the running ones.
    is_known = len(running["last_lengths"]) >= min(requests, _ENOUGH_OUTPUTS)
    best = int(losses.argmin()) if is_known else len(steps) - 1
    seconds = 0.0
    if best > 0:
        beginning = prefill * float((tokens - computed).sum())
        seconds = beginning + float(_integral(fixed + each * alive, steps)[best])
        seconds = limit_seconds if best == len(steps) - 1 else min(limit_seconds, seconds)
    return DrainPlan(places, seconds, float(losses[best]), fixed / full_step, prefill)


def _survival(running: Running, steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return `[R, K]` the probability that a request still runs after a number of steps, given its length so far.

    It is the share, among the last outputs longer than this one is now, of those that are longer still; a request that
    is longer than all of them is expected to reach its limit.
    """
    lengths = np.sort(np.asarray(running["last_lengths"], np.int64))
    generated = np.asarray(running["generated_tokens"], np.int64)[:, None]
    reached = generated + steps
    longer = len(lengths) - np.searchsorted(lengths, generated, side="right")
    longer_still = len(lengths) - np.searchsorted(lengths, reached, side="right")
    survival = np.where(longer > 0, longer_still / np.maximum(longer, 1), 1.0)
    return np.where(reached >= np.asarray(running["token_limits"])[:, None], 0.0, survival)


def _integral(values: NDArray[np.float64], steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return `[K]` the integrals of `[K]` values from the first step to each one, by the trapezoidal rule."""
    parts = np.diff(steps) * (values[1:] + values[:-1]) / 2
    return np.concatenate([[0.0], np.cumsum(parts)])
