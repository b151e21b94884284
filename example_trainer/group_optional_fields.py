"""Optional fields of a group besides tokens and scores: advantages, reference logprobs, a teacher's logprobs.

All are aligned with the tokens as `inference_logprobs` are: the entry at a position is about the token there. Each
function returns the values at the trained positions of one sequence, or None if the group has none for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from atropos_api.wire import Batch, Group
from atropos_api.wire.groups import ABSENT, OPTIONAL_PER_SEQUENCE
from example_trainer.errors import BadBatch

FloatArray = NDArray[np.float32]

IntArray = NDArray[np.int64]

Teacher = tuple[IntArray, FloatArray]
"""Token ids `[n, K]` and their logprobs, padded with -inf if there are fewer than K."""


def supplied_advantages(group: Group, index: int, targets: IntArray, length: int) -> FloatArray | None:
    """Return the advantages sent by the environment: one per token, or a single one for the sequence."""
    values = _row(group.advantages, index)
    if values is None:
        return None
    if len(values) == 1:
        return np.full(len(targets), values[0], dtype=np.float32)
    return _at_targets(values, targets, length, f"{where(group, index)}: advantages", "send one, or one a token")


def supplied_reference(group: Group, index: int, targets: IntArray, length: int) -> FloatArray | None:
    """Return the reference policy's logprobs sent by the environment; they take precedence over the trainer's own."""
    values = _row(group.ref_logprobs, index)
    if values is None:
        return None
    return _at_targets(values, targets, length, f"{where(group, index)}: ref_logprobs", "send one a token, or none")


def supplied_teacher(group: Group, index: int, targets: IntArray, length: int) -> Teacher | None:
    """Return the teacher's tokens and logprobs at each trained position."""
    ids, logprobs = _row(group.distill_token_ids, index), _row(group.distill_logprobs, index)
    if ids is None or logprobs is None:
        return None
    if len(ids) != length or len(logprobs) != length:
        raise BadBatch(
            f"{where(group, index)}: {len(ids)} distill_token_ids and {len(logprobs)} distill_logprobs for {length} "
            "tokens; send one list a token"
        )
    return _padded(group, index, [_listed(ids[at]) for at in targets], [_listed(logprobs[at]) for at in targets])


def leave_out_absent(batch: Batch) -> tuple[Batch, int]:
    """Return the batch without the rows of absent members, and their number.

    A baseline over the others alone is that of a group that had been collected with so many members.
    """
    groups = [_present(group) for group in batch.groups]
    absent = sum(len(before.tokens) - len(after.tokens) for before, after in zip(batch.groups, groups, strict=True))
    return (replace(batch, groups=groups) if absent else batch), absent


def _present(group: Group) -> Group:
    rows = [index for index in range(len(group.tokens)) if not override_of(group, index).get(ABSENT)]
    if len(rows) == len(group.tokens):
        return group
    keys = ("tokens", "masks", "scores", *OPTIONAL_PER_SEQUENCE)
    kept = {key: [values[at] for at in rows] for key in keys if (values := getattr(group, key))}
    return replace(group, **kept)


def override_of(group: Group, index: int) -> Mapping[str, Any]:
    """Return what the environment has overridden for one sequence."""
    found = group.overrides[index] if group.overrides and index < len(group.overrides) else None
    return found or {}


def where(group: Group, index: int) -> str:
    """Return a sequence's name for error messages."""
    environment = "unknown" if group.env_id is None else group.env_id
    return f"environment {environment}, sequence {index} of its group"


def _row(rows: Any, index: int) -> Any:
    """Return the entry of one sequence, or None; absent, null and empty all mean that nothing is supplied."""
    if rows is None or index >= len(rows) or rows[index] is None or len(rows[index]) == 0:
        return None
    return rows[index]


def _at_targets(values: Any, targets: IntArray, length: int, what: str, remedy: str) -> FloatArray:
    if len(values) != length:
        raise BadBatch(f"{what}: {len(values)} values for {length} tokens; {remedy}")
    chosen = np.asarray(values, dtype=np.float32)[targets]
    bad = np.flatnonzero(~np.isfinite(chosen))
    if len(bad):
        raise BadBatch(f"{what}: {chosen[bad[0]]:g} at trained position {targets[bad[0]]}; send finite numbers")
    return chosen


def _listed(entry: Any) -> list[Any]:
    return [] if entry is None else list(entry)


def _padded(group: Group, index: int, ids: list[list[int]], logprobs: list[list[float]]) -> Teacher:
    width = max((len(row) for row in ids), default=0)
    padded_ids = np.zeros((len(ids), width), dtype=np.int64)
    padded = np.full((len(ids), width), -np.inf, dtype=np.float32)
    for at, (some, values) in enumerate(zip(ids, logprobs, strict=True)):
        if len(some) != len(values):
            raise BadBatch(
                f"{where(group, index)}: {len(some)} distill_token_ids but {len(values)} distill_logprobs at its "
                f"trained token {at}; send equally many of both"
            )
        padded_ids[at, : len(some)], padded[at, : len(values)] = some, values
    return padded_ids, padded
