"""GRPO's building blocks on padded `[batch, length]` tensors, as Stanford's CS336 course (assignment 5) calls them.

The trainer itself works on flat lists of trained tokens; these are the same formulas in the shape that the course, and
most tutorials, write them in. Signatures and results are those of the course's adapters, so its public tests run
against `from example_trainer.objective.cs336 import *` in `tests/adapters.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from example_trainer.objective.losses import LossSettings, clipped_losses
from example_trainer.objective.surrogates import naive_losses

CourseLoss = Literal["no_baseline", "reinforce_with_baseline", "grpo_clip"]

T = TypeVar("T")

RewardFunction = Callable[[str, str], Mapping[str, float]]


def tokenize_prompt_and_output(
    prompt_strs: Sequence[str], output_strs: Sequence[str], tokenizer: Any
) -> dict[str, Tensor]:
    """Tokenise prompts and outputs into rows of tokens, with a mask of the output tokens.

    Prompt and output are tokenised separately and then joined, so that no token spans both; rows are padded on the
    right. Returns `input_ids` (without the last token), `labels` (without the first one) and `response_mask` (True
    where the label is a token of the output), all `[batch, longest - 1]`.
    """
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in prompt_strs]
    outputs = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in output_strs]
    pairs = list(zip(prompts, outputs, strict=True))
    longest = max(len(prompt) + len(output) for prompt, output in pairs)
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    rows = torch.full((len(pairs), longest), padding if padding is not None else 0, dtype=torch.long)
    answered = torch.zeros((len(pairs), longest), dtype=torch.bool)
    for row, (prompt, output) in enumerate(pairs):
        rows[row, : len(prompt) + len(output)] = torch.tensor([*prompt, *output], dtype=torch.long)
        answered[row, len(prompt) : len(prompt) + len(output)] = True
    return {"input_ids": rows[:, :-1], "labels": rows[:, 1:], "response_mask": answered[:, 1:]}


def compute_group_normalized_rewards(
    reward_fn: RewardFunction,
    rollout_responses: Sequence[str],
    repeated_ground_truths: Sequence[str],
    group_size: int,
    advantage_eps: float,
    normalize_by_std: bool,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Return rewards minus their group's mean, divided if asked for by its std (n - 1 form) plus `advantage_eps`.

    Each `group_size` consecutive responses are one group; the number of responses must be a multiple of it. Returns
    advantages and raw rewards `[n]`, and the mean, std, min and max of the raw rewards.
    """
    if len(rollout_responses) % group_size:
        raise ValueError(f"{len(rollout_responses)} responses do not split into groups of {group_size}")
    scored = [reward_fn(*pair)["reward"] for pair in zip(rollout_responses, repeated_ground_truths, strict=True)]
    rewards = torch.tensor(scored, dtype=torch.float32)
    groups = rewards.view(-1, group_size)
    advantages = groups - groups.mean(1, keepdim=True)
    if normalize_by_std:
        spread = groups.std(1, keepdim=True) if group_size > 1 else torch.zeros_like(advantages)
        advantages = advantages / (spread + advantage_eps)
    metadata = {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std(correction=0)),
        "reward_min": float(rewards.min()),
        "reward_max": float(rewards.max()),
    }
    return advantages.reshape(-1), rewards, metadata


def compute_entropy(logits: Tensor) -> Tensor:
    """Return the entropy in nats over the last dimension of `logits`."""
    logs = logits.log_softmax(-1)
    probabilities = logs.exp()
    # A probability of 0 adds nothing; its own logarithm has no gradient, and that of a logit of -inf no value.
    return -(probabilities * logs.masked_fill(probabilities == 0, 0.0)).sum(-1)


def get_response_log_probs(
    model: torch.nn.Module, input_ids: Tensor, labels: Tensor, return_token_entropy: bool
) -> dict[str, Tensor]:
    """Return `log_probs` `[batch, length]` of each label given the inputs up to it, and `token_entropy` if asked for.

    Nothing is masked: the caller must leave out padded and prompt positions.
    """
    logits = model(input_ids).logits
    found = {"log_probs": logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)}
    if return_token_entropy:
        found["token_entropy"] = compute_entropy(logits)
    return found


def compute_naive_policy_gradient_loss(raw_rewards_or_advantages: Tensor, policy_log_probs: Tensor) -> Tensor:
    """Return the REINFORCE loss per token: -A * log pi, `[batch, length]` from `[batch, 1]` and `[batch, length]`."""
    return naive_losses(policy_log_probs, raw_rewards_or_advantages)


def compute_grpo_clip_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return PPO's clipped loss per token, `[batch, length]`, without dual clip; and a mask of the clipped tokens."""
    ratios = (policy_log_probs - old_log_probs).exp()
    settings = LossSettings(clip_eps_low=cliprange, clip_eps_high=cliprange, dual_clip=None)
    losses = clipped_losses(ratios, advantages, settings)
    return losses, {"clipped": losses.detach() > -(ratios * advantages).detach()}


def compute_policy_gradient_loss(
    policy_log_probs: Tensor,
    loss_type: CourseLoss,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss `loss_type`, `[batch, length]`, and its metadata; arguments that it does not need may be None."""
    if loss_type == "no_baseline":
        return compute_naive_policy_gradient_loss(
            _required(raw_rewards, "raw_rewards", loss_type), policy_log_probs
        ), {}
    checked = _required(advantages, "advantages", loss_type)
    if loss_type == "reinforce_with_baseline":
        return compute_naive_policy_gradient_loss(checked, policy_log_probs), {}
    if loss_type == "grpo_clip":
        old = _required(old_log_probs, "old_log_probs", loss_type)
        return compute_grpo_clip_loss(checked, policy_log_probs, old, _required(cliprange, "cliprange", loss_type))
    raise ValueError(f"loss_type {loss_type!r} is not one of no_baseline, reinforce_with_baseline, grpo_clip")


def masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the mean over `dim` (None: all) of the elements where `mask` is true; NaN if there are none."""
    kept, counted = _kept(tensor, mask), mask.to(tensor.dtype)
    return kept.sum() / counted.sum() if dim is None else kept.sum(dim) / counted.sum(dim)


def masked_normalize(tensor: Tensor, mask: Tensor, dim: int | None = None, normalize_constant: float = 1.0) -> Tensor:
    """Return the sum over `dim` (None: all) of the elements where `mask` is true, divided by a constant (Dr. GRPO)."""
    kept = _kept(tensor, mask)
    return (kept.sum() if dim is None else kept.sum(dim)) / normalize_constant


def grpo_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    loss_type: CourseLoss,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run the backward of a micro-batch's loss: means over responses, averaged over sequences and micro-batches.

    Returns the loss that was back-propagated, as a detached scalar, and the metadata of its loss type.
    """
    losses, metadata = compute_policy_gradient_loss(
        policy_log_probs, loss_type, raw_rewards, advantages, old_log_probs, cliprange
    )
    loss = masked_mean(losses, response_mask, dim=1).mean() / gradient_accumulation_steps
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), metadata


def _kept(tensor: Tensor, mask: Tensor) -> Tensor:
    """Return `tensor` with 0 where the mask is false; as a factor 0 would make NaN of what is infinite there."""
    return torch.where(mask.bool(), tensor, torch.zeros_like(tensor))


def _required(value: T | None, name: str, loss_type: str) -> T:
    if value is None:
        raise ValueError(f"loss_type {loss_type!r} needs {name}")
    return value


run_tokenize_prompt_and_output = tokenize_prompt_and_output

run_compute_group_normalized_rewards = compute_group_normalized_rewards

run_compute_entropy = compute_entropy

run_get_response_log_probs = get_response_log_probs

run_compute_naive_policy_gradient_loss = compute_naive_policy_gradient_loss

run_compute_grpo_clip_loss = compute_grpo_clip_loss

run_compute_policy_gradient_loss = compute_policy_gradient_loss

run_masked_mean = masked_mean

run_masked_normalize = masked_normalize

run_grpo_microbatch_train_step = grpo_microbatch_train_step
