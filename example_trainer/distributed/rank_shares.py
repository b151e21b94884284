"""Data that ranks exchange in a step: the rows of each optimizer step, loss weights, and values for metrics.

Every result here is the same function of the whole batch for any number of ranks, so loss, gradients and metrics are
too. With one rank nothing is exchanged or copied.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from example_trainer.distributed.ranks import Ranks
from example_trainer.modeling.micro_batches import Row
from example_trainer.objective.losses import token_weights

if TYPE_CHECKING:
    from example_trainer.objective.losses import Targets


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FirstPass:
    """Values from the first pass over a batch, at each of its `[N]` trained tokens."""

    targets: Targets
    logprobs: Tensor
    entropies: Tensor
    first_logprobs: Tensor
    """Logprobs of the tokens computed before any weight changed; NaN for the others."""


@dataclass(frozen=True, slots=True, order=True)
class _Unit:
    """Rows that stay in one mini-batch; sorted by descending cost, then content, so that rank order has no effect."""

    falling_cost: int
    digest: bytes
    index: int
    rank: int
    rows: tuple[int, ...]


def plan_mini_batches(rows: Sequence[Row], parts: int, ranks: Ranks) -> list[list[Row]]:
    """Return this rank's rows in each of `parts` optimizer steps: whole groups, balanced in tokens, in batch order.

    There are fewer steps if all ranks together have fewer rows than `parts`, and none if they have no rows. Groups
    are split only if there are fewer of them than steps; their advantages are final by then.
    """
    if parts == 1:
        return [list(rows)] if ranks.any(bool(rows)) else []
    shares = ranks.gather([astuple(unit) for unit in _units(rows, ranks.rank)])
    groups = [_Unit(*unit) for share in shares for unit in share]
    units = groups if len(groups) >= parts else [piece for unit in groups for piece in _cut(unit)]
    parts = min(parts, len(units))
    loads, own_rows = [0] * parts, [list[int]() for _ in range(parts)]
    for unit in sorted(units):
        lightest = loads.index(min(loads))
        loads[lightest] -= unit.falling_cost
        if unit.rank == ranks.rank:
            own_rows[lightest] += unit.rows
    return [[rows[at] for at in sorted(chosen)] for chosen in own_rows]


def step_weights(
    rows: Sequence[Row],
    total: int,
    aggregation: Literal["token", "sequence", "constant"],
    constant_length: int,
    ranks: Ranks,
) -> Tensor:
    """Return `[total]` loss weights of one optimizer step, 0 outside `rows`; denominators count all ranks' rows."""
    shares = ranks.gather([len(row.targets) for row in rows])
    counts = torch.tensor([count for share in shares for count in share], dtype=torch.long)
    weights_by_sequence = torch.split(token_weights(counts, aggregation, constant_length), counts.tolist())
    before = sum(len(share) for share in shares[: ranks.rank])
    weights = torch.zeros(total)
    for row, values in zip(rows, weights_by_sequence[before : before + len(rows)], strict=True):
        weights[row.first_target : row.first_target + len(row.targets)] = values
    return weights


def gather_first_pass(own: FirstPass, ranks: Ranks) -> FirstPass:
    """Return the values of all ranks joined, without the columns of teacher and masks, which only the loss needs."""
    if ranks.world_size == 1:
        return own
    per_token = replace(own.targets, teacher_ids=None, teacher_logprobs=None, mask_ids=None, mask_bounds=None)
    host = torch.device("cpu")
    arrays = (own.logprobs.to(host), own.entropies.to(host), own.first_logprobs.to(host))
    shares = ranks.gather((_tensors_of(per_token.to(host)), arrays))
    logprobs, entropies, first = (torch.cat(pieces) for pieces in zip(*(arrays for _, arrays in shares), strict=True))
    targets = _join([type(per_token)(**tensors) for tensors, _ in shares])
    return FirstPass(targets=targets, logprobs=logprobs, entropies=entropies, first_logprobs=first)


def _tensors_of(targets: Targets) -> dict[str, Any]:
    return {field.name: getattr(targets, field.name) for field in fields(targets)}


def _units(rows: Sequence[Row], rank: int) -> list[_Unit]:
    by_group: dict[int, list[int]] = defaultdict(list)
    for at, row in enumerate(rows):
        by_group[row.group].append(at)
    return [_unit(rows, at, index, rank) for index, at in enumerate(by_group.values())]


def _unit(rows: Sequence[Row], chosen: Sequence[int], index: int, rank: int) -> _Unit:
    digest = hashlib.blake2b(digest_size=8)
    for at in chosen:
        digest.update(rows[at].tokens.tobytes())
    return _Unit(-sum(rows[at].forward_length for at in chosen), digest.digest(), index, rank, tuple(chosen))


def _cut(unit: _Unit) -> Iterator[_Unit]:
    """Split a group into units of one row, each with an equal part of its cost."""
    for number, at in enumerate(unit.rows):
        yield _Unit(unit.falling_cost // len(unit.rows), unit.digest, number, unit.rank, (at,))


def _join(pieces: Sequence[Targets]) -> Targets:
    """Return all ranks' targets concatenated; a field that some ranks lack is NaN (or 0) at their tokens."""
    present = [piece for piece in pieces if len(piece)] or list(pieces[:1])
    joined: dict[str, Any] = {field.name: _join_field(present, field.name) for field in fields(present[0])}
    sizes = [0, *(int(piece.sequences[-1]) + 1 if len(piece) else 0 for piece in present[:-1])]
    offsets = torch.tensor(sizes).cumsum(0).tolist()
    sequences = torch.cat([piece.sequences + offset for piece, offset in zip(present, offsets, strict=True)])
    return replace(present[0], **joined | {"sequences": sequences})


def sum_by_name(shares: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the sum of each name's values over `shares`; a name may be missing in some of them."""
    total: dict[str, float] = defaultdict(float)
    for share in shares:
        for name, value in share.items():
            total[name] += value
    return total


def _join_field(pieces: Sequence[Targets], name: str) -> Tensor | None:
    values: list[Tensor | None] = [getattr(piece, name) for piece in pieces]
    known = next((value for value in values if value is not None), None)
    if known is None:
        return None
    filler = torch.nan if known.is_floating_point() else 0
    unknown = [torch.full((len(piece),), filler, dtype=known.dtype) for piece in pieces]
    return torch.cat([other if value is None else value for value, other in zip(values, unknown, strict=True)])
