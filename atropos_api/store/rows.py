"""Rows of groups, keys and policies as the flat values of a database table, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from atropos_api.store.base import BodyRef, GroupRow, KeyRow, PolicyRow

BATCH_PLACE: Final = 11
"""Where a group's values name its batch."""

KEY_PLACE: Final = 12
"""Where they name its key."""


def values_of_group(row: GroupRow) -> tuple[Any, ...]:
    return (
        row.seq,
        row.run_id,
        row.env_id,
        row.size,
        row.token_count,
        *row.body,
        row.received_version,
        row.oldest_version,
        row.arrived_at,
        row.batch,
        row.key_id,
        row.form,
    )


def group_of_values(values: Sequence[Any]) -> GroupRow:
    seq, run_id, env_id, size, token_count, segment, offset, length, received, oldest, arrived_at, *rest = values
    batch, key_id, form = rest
    return GroupRow(
        seq=seq,
        run_id=run_id,
        env_id=env_id,
        size=size,
        token_count=token_count,
        body=BodyRef(segment, offset, length),
        received_version=received,
        oldest_version=oldest,
        arrived_at=arrived_at,
        batch=batch,
        key_id=key_id,
        form=form,
    )


def values_of_key(row: KeyRow) -> tuple[Any, ...]:
    return (row.key_id, row.owner, row.key, row.group_count, row.used_at, row.done_at)


def key_of_values(values: Sequence[Any]) -> KeyRow:
    key_id, owner, key, group_count, used_at, done_at = values
    return KeyRow(key_id=key_id, owner=owner, key=key, group_count=group_count, used_at=used_at, done_at=done_at)


def values_of_policy(row: PolicyRow) -> tuple[Any, ...]:
    return (row.run_id, row.version, row.step, row.published_at, row.orphaned)


def policy_of_values(values: Sequence[Any]) -> PolicyRow:
    run_id, version, step, published_at, orphaned = values
    return PolicyRow(run_id=run_id, version=version, step=step, published_at=published_at, orphaned=bool(orphaned))
