"""The course's ten building blocks have its signatures and the formulas of its handout."""

from __future__ import annotations

import inspect
import math
from pathlib import Path

import pytest
import torch

from example_trainer.objective import cs336

# The adapters of the course's public repository, by name, with the names of their parameters.
ADAPTERS = {
    "run_tokenize_prompt_and_output": ["prompt_strs", "output_strs", "tokenizer"],
    "run_compute_group_normalized_rewards": [
        "reward_fn",
        "rollout_responses",
        "repeated_ground_truths",
        "group_size",
        "advantage_eps",
        "normalize_by_std",
    ],
    "run_compute_entropy": ["logits"],
    "run_get_response_log_probs": ["model", "input_ids", "labels", "return_token_entropy"],
    "run_compute_naive_policy_gradient_loss": ["raw_rewards_or_advantages", "policy_log_probs"],
    "run_compute_grpo_clip_loss": ["advantages", "policy_log_probs", "old_log_probs", "cliprange"],
    "run_compute_policy_gradient_loss": [
        "policy_log_probs",
        "loss_type",
        "raw_rewards",
        "advantages",
        "old_log_probs",
        "cliprange",
    ],
    "run_masked_mean": ["tensor", "mask", "dim"],
    "run_masked_normalize": ["tensor", "mask", "dim", "normalize_constant"],
    "run_grpo_microbatch_train_step": [
        "policy_log_probs",
        "response_mask",
        "gradient_accumulation_steps",
        "loss_type",
        "raw_rewards",
        "advantages",
        "old_log_probs",
        "cliprange",
    ],
}


class Letters:
    """A tokenizer of single letters; a request for its special tokens is an error."""

    eos_token_id, pad_token_id = 0, 99

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [-1] * add_special_tokens + [ord(letter) for letter in text]}


@pytest.mark.parametrize(("name", "parameters"), ADAPTERS.items())
def test_each_adapter_of_the_course_has_its_signature(name: str, parameters: list[str]) -> None:
    assert list(inspect.signature(getattr(cs336, name)).parameters) == parameters


def test_the_response_mask_covers_the_labels_of_the_output_and_nothing_else() -> None:
    found = cs336.tokenize_prompt_and_output(["ab", "c"], ["de", "f"], Letters())
    a, b, c, d, e, f = map(ord, "abcdef")
    assert found["input_ids"].tolist() == [[a, b, d], [c, f, 99]]
    assert found["labels"].tolist() == [[b, d, e], [f, 99, 99]]
    assert found["response_mask"].tolist() == [[False, True, True], [True, False, False]]


def test_group_rewards_are_centred_and_scaled_within_consecutive_groups() -> None:
    scores = {"a": 0.0, "b": 1.0, "c": 5.0, "d": 7.0}
    arguments = (lambda response, _: {"reward": scores[response]}, list("abcd"), [""] * 4, 2, 1e-6)
    centred, raw, facts = cs336.compute_group_normalized_rewards(*arguments, normalize_by_std=False)
    scaled, _, _ = cs336.compute_group_normalized_rewards(*arguments, normalize_by_std=True)
    assert raw.tolist() == [0.0, 1.0, 5.0, 7.0]
    assert centred.tolist() == [-0.5, 0.5, -1.0, 1.0]
    assert scaled.tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)] * 2, rel=1e-4)
    assert (facts["reward_mean"], facts["reward_max"]) == (3.25, 7.0)


def test_responses_that_do_not_fill_their_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="3 responses do not split into groups of 2"):
        cs336.compute_group_normalized_rewards(lambda *_: {"reward": 0.0}, ["a"] * 3, ["b"] * 3, 2, 1e-6, True)


def test_entropy_is_that_of_the_softmax_also_where_a_token_is_impossible() -> None:
    logits = torch.tensor([[0.0, 0.0, float("-inf")], [1.0, 2.0, 3.0]])
    expected = torch.distributions.Categorical(logits=logits[1]).entropy()
    assert cs336.compute_entropy(logits).tolist() == pytest.approx([math.log(2), expected.item()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_entropys_gradient_is_finite_where_a_probability_rounds_to_zero(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, -200.0, 3.0]], dtype=dtype, requires_grad=True)
    (found,) = torch.autograd.grad(cs336.compute_entropy(logits).sum(), logits)
    assert found.flatten().tolist() == pytest.approx([0.1355, 0.0, -0.1355], abs=1e-3)


def test_response_logprobs_are_the_models_own(tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokens = torch.randint(32, (2, 7), generator=torch.Generator().manual_seed(0))
    found = cs336.get_response_log_probs(model, tokens[:, :-1], tokens[:, 1:], return_token_entropy=True)
    distribution = torch.distributions.Categorical(logits=model(tokens[:, :-1]).logits)
    torch.testing.assert_close(found["log_probs"], distribution.log_prob(tokens[:, 1:]))
    torch.testing.assert_close(found["token_entropy"], distribution.entropy())
    without = cs336.get_response_log_probs(model, tokens[:, :-1], tokens[:, 1:], return_token_entropy=False)
    assert set(without) == {"log_probs"}


def test_the_dispatcher_takes_the_loss_by_name_and_says_what_it_lacks() -> None:
    logs, rewards, advantages = torch.tensor([[-1.0, -2.0]]), torch.tensor([[3.0]]), torch.tensor([[-1.0]])
    plain, _ = cs336.compute_policy_gradient_loss(logs, "no_baseline", rewards, advantages, None, None)
    based, _ = cs336.compute_policy_gradient_loss(logs, "reinforce_with_baseline", rewards, advantages, None, None)
    clipped, facts = cs336.compute_policy_gradient_loss(logs, "grpo_clip", rewards, advantages, logs + 1.0, 0.2)
    assert plain.tolist() == [[3.0, 6.0]]
    assert based.tolist() == [[-1.0, -2.0]]
    assert clipped.tolist() == [[pytest.approx(0.8)] * 2]
    assert facts["clipped"].all()
    with pytest.raises(ValueError, match="'grpo_clip' needs old_log_probs"):
        cs336.compute_policy_gradient_loss(logs, "grpo_clip", rewards, advantages, None, 0.2)
    with pytest.raises(ValueError, match="'ppo' is not one of"):
        cs336.compute_policy_gradient_loss(logs, "ppo", rewards, advantages)  # type: ignore[arg-type]


def test_masked_means_and_sums_leave_out_what_is_masked() -> None:
    values, mask = torch.tensor([[1.0, 2.0], [3.0, 50.0]]), torch.tensor([[True, True], [True, False]])
    assert cs336.masked_mean(values, mask).item() == 2.0
    assert cs336.masked_mean(values, mask, dim=1).tolist() == [1.5, 3.0]
    assert cs336.masked_normalize(values, mask, dim=0, normalize_constant=2.0).tolist() == [2.0, 1.0]
    assert cs336.masked_normalize(values, mask).item() == 6.0


def test_what_is_masked_may_be_infinite() -> None:
    """A ratio at padding may overflow, and 0 times infinity is NaN."""
    values, mask = torch.tensor([[2.0, float("inf")], [float("-inf"), 4.0]]), torch.tensor([[1, 0], [0, 1]])
    assert cs336.masked_mean(values, mask).item() == 3.0
    assert cs336.masked_mean(values, mask, dim=1).tolist() == [2.0, 4.0]
    assert cs336.masked_normalize(values, mask, dim=1, normalize_constant=2.0).tolist() == [1.0, 2.0]


def test_a_microbatch_step_propagates_means_over_responses_divided_by_the_accumulation() -> None:
    logs = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], requires_grad=True)
    mask = torch.tensor([[True, True], [True, False]])
    loss, _ = cs336.grpo_microbatch_train_step(
        logs, mask, 2, "reinforce_with_baseline", advantages=torch.tensor([[1.0], [-2.0]])
    )
    assert logs.grad is not None
    assert loss.item() == pytest.approx((1.5 - 6.0) / 2 / 2)
    assert logs.grad.tolist() == [[-0.125, -0.125], [0.5, 0.0]]
