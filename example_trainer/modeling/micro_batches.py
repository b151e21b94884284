"""Micro-batches packed to a token budget, and the forward that computes hidden states at trained positions.

Rows of one group share their prompt: it is stored once and every answer attends to it, which computes the same
function. Tokens that no trained token depends on (the last token, masked tokens at the end) are left out. Packing
is a pure function of rows and budget, so a resumed run packs in the same way as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from example_trainer.modeling.attention import AttentionLayout, Segment, build_layout, no_mask

LayoutKind = Literal["shared", "packed", "rows"]

IntArray = NDArray[np.int64]

MIN_SHARED_PREFIX = 4
ROW_MULTIPLE = 8
PAIRS_PER_TOKEN = 6 * 1024


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Row:
    """One sequence of a batch: the input of the forward."""

    tokens: IntArray
    """[L] token ids."""
    targets: IntArray
    """[N] ascending positions of trained tokens, each at least 1."""
    first_target: int
    """Index of this row's first entry in arrays over all trained tokens of the batch."""
    group: int
    sample: int = 0
    """Index of the sequence in its group."""

    @property
    def forward_length(self) -> int:
        """Number of tokens to forward: the state at t - 1 predicts token t, so the last target is not forwarded."""
        return int(self.targets[-1])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedBatch:
    """The tokens of one forward, and the index of the state that predicts each trained token."""

    tokens: Tensor
    """[1, T] packed tokens, or [B, L] padded rows."""
    positions: Tensor
    """Position of each token inside its own sequence, in the same shape."""
    layout: AttentionLayout | None
    """Attention layout of packed tokens; None for padded rows."""
    hidden_index: Tensor
    """[N] flat index of the predicting state."""
    target_index: Tensor
    """[N] index into arrays over all trained tokens of the batch."""
    useful_tokens: int
    """Number of tokens without padding; a prompt counts once per computed copy."""

    @property
    def computed_tokens(self) -> int:
        return self.tokens.numel()


@dataclass(frozen=True, slots=True)
class _Unit:
    """Rows that are packed together because they share `prefix` leading tokens."""

    rows: tuple[Row, ...]
    prefix: int

    @property
    def cost(self) -> int:
        """Number of computed tokens."""
        return self.prefix + sum(row.forward_length - self.prefix for row in self.rows)

    @property
    def attended_pairs(self) -> int:
        """Number of query-key pairs under the causal mask."""
        own = [row.forward_length - self.prefix for row in self.rows]
        return (self.prefix**2 + sum(length * (2 * self.prefix + length) for length in own)) // 2


def plan_micro_batches(
    rows: Sequence[Row], token_budget: int, *, share_prefixes: bool = True, pairs_per_token: int = PAIRS_PER_TOKEN
) -> list[list[_Unit]]:
    """Plan as few micro-batches of at most `token_budget` tokens as first-fit decreasing finds, then balance the work.

    A row longer than the budget gets a micro-batch of its own.
    """
    units = [unit for group in _by_group(rows) for unit in _units_of_group(group, token_budget, share_prefixes)]
    order = sorted(range(len(units)), key=lambda index: (-units[index].cost, index))
    bins: list[list[int]] = []
    room: list[int] = []
    for index in order:
        place = next((at for at, left in enumerate(room) if units[index].cost <= left), None)
        if place is None:
            bins.append([])
            room.append(token_budget)
            place = len(bins) - 1
        bins[place].append(index)
        room[place] -= units[index].cost
    planned = _balance(units, len(bins), token_budget, pairs_per_token) or bins
    return [[units[index] for index in sorted(members)] for members in planned]


def _balance(units: Sequence[_Unit], count: int, token_budget: int, pairs_per_token: int) -> list[list[int]] | None:
    """Spread the units over `count` micro-batches of similar work: heaviest unit first, each to the lightest so far.

    Long sequences spend more on attention than on their tokens, and with several ranks all wait for the heaviest
    micro-batch. Returns None if this order exceeds the budget.
    """
    work = [unit.cost + unit.attended_pairs / pairs_per_token for unit in units]
    bins: list[list[int]] = [[] for _ in range(count)]
    done, room = [0.0] * count, [token_budget] * count
    for index in sorted(range(len(units)), key=lambda index: (-work[index], index)):
        open_bins = [at for at in range(count) if units[index].cost <= room[at] or not bins[at]]
        if not open_bins:
            return None
        place = min(open_bins, key=lambda at: (done[at], at))
        bins[place].append(index)
        done[place] += work[index]
        room[place] -= units[index].cost
    return bins


def pack_rows(
    rows: Sequence[Row],
    token_budget: int,
    *,
    device: torch.device,
    layout: LayoutKind = "shared",
    varlen: bool = False,
    pad_to: int = ROW_MULTIPLE,
    pairs_per_token: int = PAIRS_PER_TOKEN,
) -> list[PackedBatch]:
    """Return all micro-batches of one optimizer step, in a fixed order.

    The length of padded rows is a multiple of `pad_to`. `pairs_per_token` is the number of query-key pairs that cost
    as much as one token in the linear layers, about six times the hidden size.
    """
    if layout == "rows":
        return [_pad(chunk, device, pad_to) for chunk in _row_chunks(rows, token_budget, pad_to)]
    planned = plan_micro_batches(rows, token_budget, share_prefixes=layout == "shared", pairs_per_token=pairs_per_token)
    return [_pack(units, device, varlen=varlen) for units in planned]


def empty_micro_batch(device: torch.device, *, layout: LayoutKind = "shared", varlen: bool = False) -> PackedBatch:
    """Return a micro-batch of one untrained token: its forward and backward run the whole model but add nothing."""
    nothing = torch.zeros(0, dtype=torch.long, device=device)
    tokens = torch.zeros(1, 1, dtype=torch.long, device=device)
    return PackedBatch(
        tokens=tokens,
        positions=torch.zeros_like(tokens),
        layout=None if layout == "rows" else build_layout([Segment(0, 1)], 1, device, varlen=varlen),
        hidden_index=nothing,
        target_index=nothing,
        useful_tokens=0,
    )


def forward_hidden(module: Any, batch: PackedBatch) -> Tensor:
    """Return the `[T, H]` final hidden states of every computed token, before the output head."""
    backbone = find_backbone(module)
    if batch.layout is None:
        states = backbone(input_ids=batch.tokens, position_ids=batch.positions, use_cache=False).last_hidden_state
    else:
        states = backbone(
            input_ids=batch.tokens,
            attention_mask=no_mask(batch.tokens.device),
            position_ids=batch.positions,
            use_cache=False,
            packed_layout=batch.layout,
        ).last_hidden_state
    hidden: Tensor = states.reshape(-1, states.shape[-1])
    return hidden


def find_backbone(module: Any) -> Any:
    """Return the transformer below the output head; in a PEFT model it is the one with the adapters in place."""
    inner = module.get_base_model() if hasattr(module, "get_base_model") else module
    return getattr(inner, inner.base_model_prefix)


def _by_group(rows: Sequence[Row]) -> Iterable[list[Row]]:
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return groups.values()


def _units_of_group(rows: Sequence[Row], token_budget: int, share_prefixes: bool) -> Iterable[_Unit]:
    prefix = _shared_prefix(rows) if share_prefixes and len(rows) > 1 else 0
    if prefix < MIN_SHARED_PREFIX:
        yield from (_Unit((row,), 0) for row in rows)
        return
    taken: list[Row] = []
    cost = prefix
    for row in rows:
        own = row.forward_length - prefix
        if taken and cost + own > token_budget:
            yield _Unit(tuple(taken), prefix)
            taken, cost = [], prefix
        taken.append(row)
        cost += own
    yield _Unit(tuple(taken), prefix)


def _shared_prefix(rows: Sequence[Row]) -> int:
    """Return the number of leading tokens that all rows share and none of them trains."""
    limit = min(min(int(row.targets[0]), row.forward_length) for row in rows)
    first = rows[0].tokens[:limit]
    for row in rows[1:]:
        differs = np.flatnonzero(first != row.tokens[: len(first)])
        if len(differs):
            first = first[: differs[0]]
    return len(first)


def _pack(units: Sequence[_Unit], device: torch.device, *, varlen: bool) -> PackedBatch:
    pieces: list[IntArray] = []
    positions: list[IntArray] = []
    hidden: list[IntArray] = []
    targets: list[IntArray] = []
    segments: list[Segment] = []
    end = 0

    def lay_down(tokens: IntArray, first_position: int, segment: Segment) -> None:
        nonlocal end
        pieces.append(tokens)
        positions.append(np.arange(first_position, first_position + len(tokens)))
        segments.append(segment)
        end += len(tokens)

    for unit in units:
        prefix, prefix_start = unit.prefix, end
        if prefix:
            lay_down(unit.rows[0].tokens[:prefix], 0, Segment(end, prefix))
        for row in unit.rows:
            own = row.tokens[prefix : row.forward_length]
            start = end
            if len(own):
                lay_down(own, prefix, Segment(end, len(own), prefix_start if prefix else 0, prefix))
            predicting = row.targets - 1
            hidden.append(np.where(predicting < prefix, prefix_start + predicting, start + predicting - prefix))
            targets.append(np.arange(row.first_target, row.first_target + len(row.targets)))
    return PackedBatch(
        tokens=torch.from_numpy(np.concatenate(pieces))[None].to(device),
        positions=torch.from_numpy(np.concatenate(positions))[None].to(device),
        layout=build_layout(segments, end, device, varlen=varlen),
        hidden_index=torch.from_numpy(np.concatenate(hidden)).to(device),
        target_index=torch.from_numpy(np.concatenate(targets)).to(device),
        useful_tokens=end,
    )


def _row_chunks(rows: Sequence[Row], token_budget: int, pad_to: int) -> Iterable[list[Row]]:
    """Yield chunks of rows of similar length, so that padding them to the longest wastes little."""
    chunk: list[Row] = []
    for row in sorted(rows, key=lambda row: (-row.forward_length, row.first_target)):
        width = _round_up(chunk[0].forward_length if chunk else row.forward_length, pad_to)
        if chunk and (len(chunk) + 1) * width > token_budget:
            yield chunk
            chunk = []
        chunk.append(row)
    if chunk:
        yield chunk


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _pad(rows: Sequence[Row], device: torch.device, pad_to: int) -> PackedBatch:
    width = _round_up(max(row.forward_length for row in rows), pad_to)
    tokens = np.zeros((len(rows), width), dtype=np.int64)
    for at, row in enumerate(rows):
        tokens[at, : row.forward_length] = row.tokens[: row.forward_length]
    hidden = [at * width + row.targets - 1 for at, row in enumerate(rows)]
    targets = [np.arange(row.first_target, row.first_target + len(row.targets)) for row in rows]
    return PackedBatch(
        tokens=torch.from_numpy(tokens).to(device),
        positions=torch.arange(width, device=device).expand(len(rows), width),
        layout=None,
        hidden_index=torch.from_numpy(np.concatenate(hidden)).to(device),
        target_index=torch.from_numpy(np.concatenate(targets)).to(device),
        useful_tokens=sum(row.forward_length for row in rows),
    )
