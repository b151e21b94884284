"""Surrogate losses other than the two-sided clip of the ratio: pure functions over `[N]` trained tokens, a loss each.

`losses` chooses among these and the clipped one by `--loss-type`. Each docstring names the paper and the loss's name in
other trainers. A ratio divides a token's probability under the policy in training by that under the older policy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from example_trainer.objective.ratios import sequence_means, sequence_sums


def weighted_losses(logprobs: Tensor, weights: Tensor, advantages: Tensor) -> Tensor:
    """Return the importance-weighted policy-gradient loss; its gradient is -w * A * grad log pi.

    Its value is -w * A; at ratio 1 that is the clipped loss.
    """
    return -(weights * advantages) * (logprobs - logprobs.detach() + 1.0)


def naive_losses(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Return the REINFORCE loss: -A * log pi, without correction for staleness.

    It is also the loss of GPG (Chu et al. 2025, arXiv 2504.02546; `gpg` in verl), whose advantages have no std and
    whose factor for groups of equal rewards is the mean over the tokens of the other groups.
    """
    return -advantages * logprobs


def cispo_losses(logprobs: Tensor, ratios: Tensor, advantages: Tensor, cap: float) -> Tensor:
    """Return the CISPO loss (MiniMax-M1, 2025): -min(r, cap) * A * log pi; no gradient flows through the weight."""
    return -ratios.detach().clamp(max=cap) * advantages * logprobs


def dppo_keeps(logprobs: Tensor, ratios: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return a Boolean `[N]`, False where a token's probability has moved too far in the direction of its advantage."""
    probabilities = logprobs.detach().exp()
    moved = probabilities - probabilities / ratios.detach()
    return torch.where(advantages > 0, moved <= high, moved >= -low)


def dppo_losses(logprobs: Tensor, ratios: Tensor, advantages: Tensor, *, low: float, high: float, cap: float) -> Tensor:
    """Return the DPPO loss with the binary total variation (Qi et al. 2026, arXiv 2602.04879; `dppo_tv` in verl).

    It is -min(r, cap) * A * log pi where `dppo_keeps` is True and 0 elsewhere, without gradient through the weight. A
    ratio says little about rare tokens: from 1e-5 to 1e-3 it is 100, but the distribution has hardly changed. The
    defaults are verl's: its script for DPPO has thresholds of 0.15, and its loss a cap of 20. prime-rl's default loss
    has the same mask with 0.2, and no cap.
    """
    keeps = dppo_keeps(logprobs, ratios, advantages, low, high)
    return weighted_losses(logprobs, ratios.detach().clamp(max=cap) * keeps, advantages)


def outward_squares(logs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Return `[N]` squared log-ratios, and a mask of the tokens that their advantage pushes away from the sampler.

    Those are the tokens that a clip can reach: r > 1 where A > 0, and r < 1 where A < 0.
    """
    logs = logs.detach()
    return logs.square(), (advantages * logs) > 0


def second_moment_cut(squares: Tensor, threshold: float) -> float:
    """Return the value from which squares are left out so that the mean of the others is at most `threshold`.

    The largest are left out first; squares equal to the first that is left out are left out as well. Infinite if all
    may stay.
    """
    ascending = squares.double().sort().values
    means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1, device=ascending.device)
    kept = int((means <= threshold).sum())
    return float(ascending[kept]) if kept < len(ascending) else float("inf")


def m2po_losses(ratios: Tensor, advantages: Tensor, trusted: Tensor | None) -> Tensor:
    """Return the M2PO loss (Zheng et al. 2025, arXiv 2510.01161): -r * A where a token is `trusted`, else 0.

    Tokens that their advantage pushes away from the sampler are trusted up to `second_moment_cut`, all others always,
    as in the paper and its authors' code (Infini-AI-Lab/M2PO, `kpo_clip_harmful_tokens`); AReaL's `m2_threshold` counts
    all tokens. Ratios are not clipped, so that few tokens are lost however old the rollouts are.
    """
    losses = -ratios * advantages
    return losses if trusted is None else losses * trusted


def sapo_losses(ratios: Tensor, advantages: Tensor, positive: float, negative: float) -> Tensor:
    """Return the SAPO loss (Gao et al. 2025, arXiv 2511.20347; `sapo` in TRL and verl): a smooth gate for the clip.

    -4 / tau * sigmoid(tau * (r - 1)) * A, with the temperature tau `positive` where A > 0 and `negative` elsewhere. At
    r = 1 the gradient is that of the clipped loss; it falls towards 0 on both sides, faster with a higher tau.
    """
    temperatures = torch.where(advantages > 0, positive, negative)
    return -torch.sigmoid(temperatures * (ratios - 1.0)) * (4.0 / temperatures) * advantages


def gmpo_losses(logs: Tensor, advantages: Tensor, sequences: Tensor, low: float, high: float) -> Tensor:
    """Return the GMPO loss (Zhao et al. 2025, arXiv 2507.20673; `geo_mean` in verl, `GMPOTrainer` in TRL).

    Each log-ratio is bounded on the side where its advantage pushes it, by `high` for A > 0 and by -`low` for A < 0;
    a sequence's ratio is exp of their mean, and each of its tokens has the loss -ratio * A.
    """
    bounded = torch.where(advantages > 0, logs.clamp(max=high), logs.clamp(min=-low))
    return -sequence_means(bounded, sequences).exp() * advantages


def vespo_losses(
    logprobs: Tensor,
    logs: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    positive: tuple[float, float],
    negative: tuple[float, float],
    clamp: float,
) -> Tensor:
    """Return the VESPO loss (2026, arXiv 2602.10693; `vespo` in TRL): -phi(W) * A * log pi, no gradient through phi.

    W is the product of the ratios of a sequence's trained tokens, its log bounded to +-`clamp`;
    phi(W) = W^k * exp(lambda * (1 - W)), which is 1 at W = 1 and falls to 0 far from it. `positive` and `negative` are
    (k, lambda) where A >= 0 and where A < 0.
    """
    products = sequence_sums(logs.detach(), sequences).clamp(-clamp, clamp)
    power = torch.where(advantages >= 0, positive[0], negative[0])
    decay = torch.where(advantages >= 0, positive[1], negative[1])
    weights = (power * products + decay * (1.0 - products.exp())).exp()
    return -weights * advantages * logprobs
