"""Groups as clients hold them, to and from the columns form.

Arrays whose numbers a column holds exactly become columns; any other stays JSON in the head, for the broker to judge.
What columns cannot say at all (tokens that are no int32) raises `NotColumnar`: such a group goes as JSON.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from atropos_api.common.errors import AtroposError
from atropos_api.wire.columns import (
    COLUMN_ORDER,
    DISTILLED,
    FLOAT_COLUMNS,
    Column,
    Record,
    encode_head,
    narrow,
    pack_body,
    pack_record,
    split_columns,
    split_nested,
    split_rows,
    unpack_body,
)
from atropos_api.wire.groups import Batch, Group

_PER_TOKEN: Final = tuple(name for name in COLUMN_ORDER if name not in {*DISTILLED, "distill_lengths"})
_encoder = msgspec.json.Encoder()


class NotColumnar(AtroposError):
    """The group can only be written as JSON."""


class _Fields(Group, kw_only=True):
    """What the head of a group may leave to its columns."""

    tokens: list[list[int]] = msgspec.field(default_factory=list)
    masks: list[list[int]] = msgspec.field(default_factory=list)


class _Head(msgspec.Struct, kw_only=True):
    lengths: list[int]
    columns: list[str]
    fields: _Fields


class _BatchHead(msgspec.Struct, kw_only=True):
    number: int
    run_id: str


_head_decoder = msgspec.json.Decoder(_Head)
_batch_decoder = msgspec.json.Decoder(_BatchHead)


def encode_submission(environment_id: int, groups: Sequence[Group]) -> bytes:
    head = _encoder.encode({"environment_id": environment_id})
    return pack_body(head, [encode_group(group) for group in groups])


def decode_batch(body: bytes, *, arrays: bool = False) -> Batch:
    """A batch; with `arrays` its rows of numbers are arrays that share the memory of `body`."""
    text, _, records = unpack_body(body)
    head = _batch_decoder.decode(text)
    groups = [decode_group(record, arrays=arrays) for record in records]
    return Batch(number=head.number, run_id=head.run_id, groups=groups)


def encode_group(group: Group) -> bytes:
    lengths = [len(row) for row in group.tokens]
    found = {name: _column_of(name, getattr(group, name), lengths) for name in _PER_TOKEN}
    found |= _distill_columns(group, lengths)
    columns = {name: column for name in COLUMN_ORDER if (column := found.get(name)) is not None}
    if "tokens" not in columns or 0 in lengths:
        raise NotColumnar("the tokens are not rows of 32-bit integers")
    fields = {name: getattr(group, name) for name in group.__struct_fields__ if name not in columns}
    text = _encoder.encode({name: value for name, value in fields.items() if value is not None})
    head = encode_head(lengths, list(columns), text)
    return b"".join(pack_record(head, *(column.tobytes() for column in columns.values())))


def decode_group(record: Record, *, arrays: bool = False) -> Group:
    head = _head_decoder.decode(record.head)
    columns = split_columns(head.lengths, head.columns, record.data)
    values = {name: getattr(head.fields, name) for name in Group.__struct_fields__}
    for name, column in columns.items():
        if name in DISTILLED:
            nested = split_nested(columns, name, head.lengths)
            values[name] = [_as_rows(rows, arrays=arrays) for rows in nested]
        elif name != "distill_lengths":
            values[name] = _as_rows(split_rows(column, head.lengths), arrays=arrays)
    return Group(**values)


def _as_rows(rows: list[NDArray[Any]], *, arrays: bool) -> list[Any]:
    return list(rows) if arrays else [row.tolist() for row in rows]


def _column_of(name: str, rows: Any, lengths: Sequence[int]) -> Column | None:
    """The values of all rows one after another; None if there are none, or a column cannot hold them as they are."""
    try:
        fits = bool(rows) and [len(row) for row in rows] == lengths
    except TypeError:  # no rows at all: the broker says what it thinks of that
        return None
    return _flatten(name, rows) if fits else None


def _distill_columns(group: Group, lengths: Sequence[int]) -> dict[str, Column | None]:
    """All of the distill arrays, or none."""
    given = {name: rows for name in DISTILLED if (rows := getattr(group, name))}
    shapes = [[[len(position) for position in row] for row in rows] for rows in given.values()]
    if not given or any(shape != shapes[0] for shape in shapes) or [len(row) for row in shapes[0]] != lengths:
        return {}
    columns = {name: _flatten(name, chain.from_iterable(rows)) for name, rows in given.items()}
    if any(column is None for column in columns.values()):
        return {}
    return {"distill_lengths": np.array(list(chain.from_iterable(shapes[0])), dtype=np.int32), **columns}


def _flatten(name: str, rows: Iterable[Sequence[Any]]) -> Column | None:
    """Packing row by row with `struct` is the fastest way from lists, and refuses what is no number of its kind."""
    try:
        if name in FLOAT_COLUMNS:
            return narrow(
                np.frombuffer(b"".join([struct.pack(f"{len(row)}d", *row) for row in rows]), dtype=np.float64)
            )
        return np.frombuffer(b"".join([struct.pack(f"{len(row)}i", *row) for row in rows]), dtype=np.int32)
    except struct.error:
        return None
