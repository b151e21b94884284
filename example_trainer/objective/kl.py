"""Divergence from a reference policy: estimates on sampled tokens, and the coefficient that holds it at a target.

Estimators after J. Schulman, "Approximating KL Divergence" (2020); the controller after Ziegler et al. (2019, section
2.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

KlEstimator = Literal["k1", "k3"]

MAX_RELATIVE_ERROR = 0.2
LARGEST_FACTOR = 100.0


def kl_estimates(logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator, clamp: float) -> Tensor:
    """`[N]` estimates of KL(policy, reference) at sampled tokens.

    k3: `exp(d) - d - 1` with d = log pi_ref - log pi, never negative. k1: `-d`, unbiased and noisy. The gradient of
    k1 itself averages to nothing over the policy's own samples, so k1 carries that of `d * d / 2`, whose average is
    the gradient of the divergence.
    """
    difference = (reference_logprobs.float() - logprobs.float()).clamp(-clamp, clamp)
    if estimator == "k3":
        return (difference.exp() - difference - 1.0).clamp(min=0.0)
    half_square = difference.square() / 2
    return half_square - half_square.detach() - difference.detach()


@dataclass(slots=True)
class KlController:
    """The coefficient of the divergence; with a `target` it follows the measured divergence proportionally.

    Each batch multiplies it by `1 + rate * e`, where e is the relative error bounded to a fifth. It stays within a
    factor of a hundred of where it began, so that neither a collapse nor a spike runs away with it.
    """

    coefficient: float
    target: float | None = None
    rate: float = 0.1
    initial: float = 0.0

    def __post_init__(self) -> None:
        self.initial = self.initial or self.coefficient

    def observe(self, divergence: float) -> None:
        """Take the mean divergence of a batch into account for the next."""
        if self.target is None or not math.isfinite(divergence):
            return
        error = max(-MAX_RELATIVE_ERROR, min(MAX_RELATIVE_ERROR, divergence / self.target - 1.0))
        moved = self.coefficient * (1.0 + self.rate * error)
        self.coefficient = min(max(moved, self.initial / LARGEST_FACTOR), self.initial * LARGEST_FACTOR)
