"""Properties of the objective over random inputs: packing, chunks, advantages, weights."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from example_trainer.modeling.attention import Segment, build_layout
from example_trainer.modeling.logprobs import token_logprobs
from example_trainer.modeling.micro_batches import Row, pack_rows
from example_trainer.objective.advantages import AdvantageSettings, compute_advantages
from example_trainer.objective.kl_divergence import forward_kl, kl_estimates
from example_trainer.objective.losses import LossSettings, clipped_losses, is_clipped, token_weights
from example_trainer.objective.ratios import mismatch_weights

CPU = torch.device("cpu")


@st.composite
def batches(draw: st.DrawFn) -> list[Row]:
    """Draw groups of answers to prompts, with masks that leave at least one trained token in each."""
    rows: list[Row] = []
    first = 0
    for group in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(st.integers(0, 5), min_size=1, max_size=9))
        for _ in range(draw(st.integers(1, 4))):
            answer = draw(st.lists(st.integers(0, 5), min_size=1, max_size=9))
            trained = draw(st.sets(st.integers(0, len(answer) - 1), min_size=1))
            targets = np.array(sorted(len(prompt) + at for at in trained))
            tokens = np.array(prompt + answer)
            rows.append(Row(tokens=tokens, targets=targets, first_target=first, group=group))
            first += len(targets)
    return rows


@given(rows=batches(), budget=st.integers(1, 60), layout=st.sampled_from(["shared", "packed", "rows"]))
def test_every_target_is_predicted_by_the_state_of_exactly_its_own_past(
    rows: list[Row], budget: int, layout: str
) -> None:
    seen: list[int] = []
    by_target = {row.first_target + at: (row, int(t)) for row in rows for at, t in enumerate(row.targets)}
    for micro in pack_rows(rows, budget, device=CPU, layout=layout):  # type: ignore[arg-type]
        tokens, positions = micro.tokens.reshape(-1), micro.positions.reshape(-1)
        past = visible_tokens(micro, tokens)
        for target, state in zip(micro.target_index.tolist(), micro.hidden_index.tolist(), strict=True):
            row, position = by_target[target]
            seen.append(target)
            assert positions[state].item() == position - 1
            assert past[state] == row.tokens[:position].tolist()
    assert sorted(seen) == sorted(by_target)


def visible_tokens(micro, tokens) -> dict[int, list[int]]:
    """Return, for each state, the tokens that it attends to in the order of the key columns, itself last."""
    if micro.layout is None:
        width = micro.tokens.shape[1]
        return {at: tokens[at - at % width : at + 1].tolist() for at in range(tokens.numel())}
    found: dict[int, list[int]] = {}
    for bucket in micro.layout.buckets:
        allowed = bucket.allowed(None).expand(len(bucket.queries), -1, -1)
        for row in range(len(bucket.queries)):
            for column, state in enumerate(bucket.queries[row].tolist()):
                keys = bucket.keys[row][allowed[row, column]]
                found.setdefault(state, tokens[keys].tolist())
    return found


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_a_layout_restores_every_token_to_its_place(lengths: list[int]) -> None:
    starts = np.cumsum([0, *lengths])
    total = int(starts[-1])
    layout = build_layout([Segment(int(a), n) for a, n in zip(starts, lengths, strict=False)], total, CPU)
    outputs = torch.cat([bucket.queries.reshape(-1) for bucket in layout.buckets])
    assert torch.equal(outputs[layout.restore], torch.arange(total))


@given(count=st.integers(1, 30), chunk=st.integers(1, 40), seed=st.integers(0, 100))
def test_the_chunk_size_changes_no_logprob(count: int, chunk: int, seed: int) -> None:
    torch.manual_seed(seed)
    hidden, weight = torch.randn(10, 4), torch.randn(7, 4)
    index, labels, temperatures = torch.randint(10, (count,)), torch.randint(7, (count,)), torch.rand(count) + 0.5
    whole, _ = token_logprobs(hidden, weight, index, labels, temperatures, chunk_tokens=1000)
    parts, _ = token_logprobs(hidden, weight, index, labels, temperatures, chunk_tokens=chunk)
    torch.testing.assert_close(parts, whole)
    assert bool((whole <= 0).all())


rewards = st.lists(st.floats(-5, 5, allow_nan=False, width=32), min_size=1, max_size=8)


@given(groups=st.lists(rewards, min_size=1, max_size=6), norm=st.sampled_from(["none", "group", "batch"]))
def test_advantages_are_finite_centred_and_ordered_as_the_rewards(groups: list[list[float]], norm: str) -> None:
    for values, given_rewards in zip(
        compute_advantages(groups, AdvantageSettings(norm=norm)),  # type: ignore[arg-type]
        groups,
        strict=True,
    ):
        assert bool(values.isfinite().all())
        assert abs(float(values.double().mean())) < 1e-4
        order = np.argsort(given_rewards, kind="stable")
        assert bool((values[order.copy()].diff() >= -1e-5).all())


ratios = st.floats(0.05, 20.0)


@given(ratio=ratios, advantage=st.floats(-3, 3), low=st.floats(0.05, 0.5), high=st.floats(0.05, 0.5))
def test_the_clipped_objective_never_promises_more_than_the_unclipped_one(
    ratio: float, advantage: float, low: float, high: float
) -> None:
    settings_ = LossSettings(clip_eps_low=low, clip_eps_high=high, dual_clip=None)
    value = torch.tensor([ratio]), torch.tensor([advantage])
    assert float(-clipped_losses(*value, settings_)) <= ratio * advantage + 1e-4
    inside = 1 - low < ratio < 1 + high
    assert not (inside and bool(is_clipped(*value, settings_)))


@given(counts=st.lists(st.integers(1, 20), min_size=1, max_size=10), parts=st.integers(1, 4))
def test_weights_of_a_step_do_not_depend_on_how_it_is_cut(counts: list[int], parts: int) -> None:
    weights = token_weights(torch.tensor(counts), "token", 1)
    losses = torch.arange(len(weights), dtype=torch.float32)
    cut = sum(
        float((part * weight).sum()) for part, weight in zip(losses.chunk(parts), weights.chunk(parts), strict=True)
    )
    assert abs(cut - float(losses.mean())) < 1e-3


logprob_lists = st.lists(st.floats(-8, 0), min_size=1, max_size=12)


@given(
    ours=logprob_lists,
    spread=st.floats(-3, 3),
    sequence_length=st.integers(1, 5),
    correction=st.sampled_from(["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]),
)
def test_mismatch_weights_are_bounded_and_whole_sequences_agree(
    ours: list[float], spread: float, sequence_length: int, correction: str
) -> None:
    proximal = torch.tensor(ours)
    rollout = proximal + spread * torch.linspace(-1, 1, len(ours))
    sequences = torch.arange(len(ours)) // sequence_length
    weights = mismatch_weights(
        proximal,
        rollout,
        sequences,
        correction,  # type: ignore[arg-type]
        floor=0.5,
        cap=2.0,
        clamp=20.0,
    )
    silenced = weights == 0
    assert bool((((weights >= 0.5) & (weights <= 2.0)) | silenced).all())
    assert correction.endswith("mask") or not bool(silenced.any())
    if correction.startswith("sequence"):
        for sequence in sequences.unique():
            assert weights[sequences == sequence].unique().numel() == 1


@given(seed=st.integers(0, 1000), columns=st.integers(1, 5), temperature=st.floats(0.3, 3.0))
def test_the_divergence_from_a_teacher_is_never_negative(seed: int, columns: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    student = torch.randn(4, 9, generator=generator).log_softmax(-1)[:, :columns]
    teacher = torch.randn(4, 9, generator=generator).log_softmax(-1)[:, :columns]
    assert bool((forward_kl(student, teacher, torch.full((4,), temperature)) >= -1e-5).all())


@given(ours=logprob_lists, gap=st.floats(-6, 6))
def test_a_divergence_is_zero_where_policies_agree_and_k3_never_below(ours: list[float], gap: float) -> None:
    policy = torch.tensor(ours)
    assert bool((kl_estimates(policy, policy + gap, "k3", 20.0) >= 0).all())
    for estimator in ("k1", "k3"):
        assert float(kl_estimates(policy, policy, estimator, 20.0).abs().max()) == 0.0  # type: ignore[arg-type]
