"""Packing: every layout computes what a forward of each row alone computes, gradients included."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from example_trainer.modeling import attention
from example_trainer.modeling.logprobs import head_of, token_logprobs
from example_trainer.modeling.micro_batches import LayoutKind, Row, forward_hidden, pack_rows, plan_micro_batches
from example_trainer.modeling.policy import Policy

from .conftest import labels_of, make_rows

CPU = torch.device("cpu")
LAYOUTS: list[LayoutKind] = ["shared", "packed", "rows"]


def alone(module: torch.nn.Module, rows: list[Row]) -> Tensor:
    """Return logprobs from an ordinary forward for each row."""
    found = []
    for row in rows:
        logits = module(torch.from_numpy(row.tokens)[None]).logits[0].log_softmax(-1)
        targets = torch.from_numpy(row.targets)
        found.append(logits[targets - 1].gather(1, torch.from_numpy(row.tokens[row.targets])[:, None]).squeeze(1))
    return torch.cat(found)


def packed(module: torch.nn.Module, rows: list[Row], layout: LayoutKind, budget: int) -> Tensor:
    labels, found = labels_of(rows), torch.empty(sum(len(row.targets) for row in rows))
    weight, bias = head_of(module)
    for micro in pack_rows(rows, budget, device=CPU, layout=layout):
        at = micro.target_index
        hidden = forward_hidden(module, micro)
        logprobs, _ = token_logprobs(hidden, weight, micro.hidden_index, labels[at], torch.ones(len(at)), bias=bias)
        found = found.index_put((at,), logprobs)
    return found


def gradients(module: torch.nn.Module, logprobs: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_every_layout_and_budget_equals_the_forward_of_each_row_alone(
    policy: Policy, rows: list[Row], layout: LayoutKind, budget: int
) -> None:
    expected = alone(policy.module, rows)
    wanted = gradients(policy.module, expected)
    assert attention.install(policy.module)
    found = packed(policy.module, rows, layout, budget)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for name, gradient in gradients(policy.module, found).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-5)


def test_long_rows_take_the_fused_kernel_and_agree_as_well(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows(seed=1, groups=3)
    attention.install(policy.module)
    explicit = packed(policy.module, rows, "shared", 10_000)
    monkeypatch.setattr(attention, "EXPLICIT_SCORES_AREA", 0)
    torch.testing.assert_close(packed(policy.module, rows, "shared", 10_000), explicit, rtol=0, atol=1e-5)


def test_narrow_buckets_change_nothing(policy: Policy, rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    attention.install(policy.module)
    wide = packed(policy.module, rows, "shared", 10_000)
    monkeypatch.setattr(attention, "SMALL_AREA", 0)
    monkeypatch.setattr(attention, "MAX_PADDED_AREA_RATIO", 1.0)
    torch.testing.assert_close(packed(policy.module, rows, "shared", 10_000), wide, rtol=0, atol=1e-5)


def test_a_sliding_window_reaches_into_the_shared_prompt(tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=0,
    )
    module = Qwen2ForCausalLM(config)
    rows = make_rows(seed=2)
    expected = alone(module, rows)
    attention.install(module)
    for layout in LAYOUTS:
        torch.testing.assert_close(packed(module, rows, layout, 10_000), expected, rtol=0, atol=1e-5)


def test_an_installed_model_still_takes_ordinary_padded_batches(policy: Policy) -> None:
    ids = torch.randint(32, (3, 9))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    before = policy.module(ids, attention_mask=mask).logits
    attention.install(policy.module)
    torch.testing.assert_close(policy.module(ids, attention_mask=mask).logits[:, 4:], before[:, 4:])


def test_a_prompt_is_computed_once_for_its_group() -> None:
    prompt = np.arange(10)
    rows = [
        Row(
            tokens=np.concatenate([prompt, np.full(5, 20 + at)]),
            targets=np.arange(10, 15),
            first_target=5 * at,
            group=0,
        )
        for at in range(4)
    ]
    (micro,) = pack_rows(rows, 1000, device=CPU)
    assert micro.computed_tokens == micro.useful_tokens == 10 + 4 * 4  # the last token of a row predicts nothing
    (apart,) = pack_rows(rows, 1000, device=CPU, layout="packed")
    assert apart.computed_tokens == 4 * 14


def test_no_padded_token_is_computed_in_the_packed_layouts(rows: list[Row]) -> None:
    for layout in ("shared", "packed"):
        for micro in pack_rows(rows, 64, device=CPU, layout=layout):  # type: ignore[arg-type]
            assert micro.computed_tokens == micro.useful_tokens


def test_micro_batches_keep_to_the_budget_and_hold_each_target_once(rows: list[Row]) -> None:
    longest = max(row.forward_length for row in rows)
    micros = pack_rows(rows, longest + 5, device=CPU)
    assert len(micros) > 1
    assert all(micro.computed_tokens <= longest + 5 for micro in micros)
    held = torch.cat([micro.target_index for micro in micros]).sort().values
    assert torch.equal(held, torch.arange(sum(len(row.targets) for row in rows)))


def test_a_row_longer_than_the_budget_gets_a_micro_batch_of_its_own(rows: list[Row]) -> None:
    assert sum(len(plan) for plan in plan_micro_batches(rows, 1)) == len(rows)


def test_packing_is_a_pure_function_of_rows_and_budget(rows: list[Row]) -> None:
    first, again = (pack_rows(rows, 50, device=CPU) for _ in range(2))
    for left, right in zip(first, again, strict=True):
        assert torch.equal(left.tokens, right.tokens)
        assert torch.equal(left.target_index, right.target_index)


def test_trained_tokens_are_never_shared() -> None:
    same = np.arange(12)
    rows = [Row(tokens=same, targets=np.arange(6, 12), first_target=6 * at, group=0) for at in range(2)]
    (micro,) = pack_rows(rows, 1000, device=CPU)
    assert micro.computed_tokens == 6 + 2 * 5
    assert len(micro.hidden_index) == 12


def test_padded_rows_are_filled_up_to_the_multiple_asked_for(rows: list[Row]) -> None:
    for micro in pack_rows(rows, 1 << 20, device=CPU, layout="rows", pad_to=64):
        assert micro.tokens.shape[1] % 64 == 0


def test_micro_batches_share_the_work_of_attention_as_well_as_tokens() -> None:
    """By tokens alone, both long sequences would lie in one micro-batch and all short ones in the other."""
    lengths = [401, 401] + [41] * 20
    rows = [
        Row(tokens=np.zeros(length, dtype=np.int64), targets=np.array([length - 1]), first_target=at, group=at)
        for at, length in enumerate(lengths)
    ]
    planned = plan_micro_batches(rows, 900, pairs_per_token=64)
    assert len(planned) == 2
    work = [sum(unit.cost + unit.attended_pairs / 64 for unit in units) for units in planned]
    assert max(work) < 1.05 * min(work)
    assert all(sum(unit.cost for unit in units) <= 900 for units in planned)
