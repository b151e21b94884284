"""Conversion of groups to and from the columns form, for clients and for stored groups.

Clients: an array becomes a column if that holds its numbers exactly; any other stays JSON in the head, for the broker
to judge. A group that columns cannot express (tokens that are not int32) raises `NotColumnar` and is sent as JSON.
Broker: a stored group is transcoded without loss, in a thread, for a trainer that asks for the other form. Columns
become JSON text as Python writes it: each float32 as the shortest decimal of the same double. In the other direction an
array becomes a column only if it would yield the very same text again; any other (doubles that no float32 holds, `1`
for `1.0`) stays text in the head.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Final

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from atropos_api.common.errors import AtroposError
from atropos_api.wire.columns import (
    COLUMN_ORDER,
    DISTILLED,
    FLOAT_COLUMNS,
    Column,
    Record,
    decode_head,
    encode_head,
    narrow,
    pack_body,
    pack_record,
    split_columns,
    split_nested,
    split_rows,
    unpack_body,
    unpack_record,
)
from atropos_api.wire.groups import DEFAULT_POLICY, WIRE_KEYS, Batch, Group, as_plain

_PER_TOKEN: Final = tuple(name for name in COLUMN_ORDER if name not in {*DISTILLED, "distill_lengths"})

_encoder = msgspec.json.Encoder(enc_hook=as_plain)


class NotColumnar(AtroposError):
    """The group cannot be expressed in columns, only as JSON."""


class _Fields(Group, kw_only=True):
    """The fields in a group's head: those that are columns are missing."""

    tokens: list[list[int]] = msgspec.field(default_factory=list)
    masks: list[list[int]] = msgspec.field(default_factory=list)


class _Head(msgspec.Struct, kw_only=True):
    lengths: list[int]
    columns: list[str]
    fields: _Fields


class _BatchHead(msgspec.Struct, kw_only=True):
    number: int
    run_id: str
    policy: str = DEFAULT_POLICY


_head_decoder = msgspec.json.Decoder(_Head)

_batch_decoder = msgspec.json.Decoder(_BatchHead)


def encode_submission(environment_id: int, groups: Sequence[Group]) -> bytes:
    head = _encoder.encode({"environment_id": environment_id})
    return pack_body(head, [encode_group(group) for group in groups])


def decode_batch(body: bytes, *, arrays: bool = False) -> Batch:
    """Return a batch; with `arrays` its rows of numbers are arrays that share the memory of `body`."""
    text, _, records = unpack_body(body)
    head = _batch_decoder.decode(text)
    groups = [decode_group(record, arrays=arrays) for record in records]
    return Batch(number=head.number, run_id=head.run_id, policy=head.policy, groups=groups)


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
    """Return the values of all rows in one column; None if there are none, or a column cannot hold them exactly."""
    try:
        fits = bool(rows) and [len(row) for row in rows] == lengths
    except TypeError:  # these are not rows: the broker refuses them and says why
        return None
    return _flatten(name, rows) if fits else None


def _distill_columns(group: Group, lengths: Sequence[int]) -> dict[str, Column | None]:
    """Return all of the distill arrays as columns, or none."""
    given = {name: rows for name in DISTILLED if (rows := getattr(group, name))}
    shapes = [[[len(position) for position in row] for row in rows] for rows in given.values()]
    if not given or any(shape != shapes[0] for shape in shapes) or [len(row) for row in shapes[0]] != lengths:
        return {}
    columns = {name: _flatten(name, chain.from_iterable(rows)) for name, rows in given.items()}
    if any(column is None for column in columns.values()):
        return {}
    return {"distill_lengths": np.array(list(chain.from_iterable(shapes[0])), dtype=np.int32), **columns}


def _flatten(name: str, rows: Iterable[Sequence[Any]]) -> Column | None:
    """Pack rows into a column with `struct`: the fastest way from lists, and it refuses values of another kind."""
    try:
        if name in FLOAT_COLUMNS:
            return narrow(
                np.frombuffer(b"".join([struct.pack(f"{len(row)}d", *row) for row in rows]), dtype=np.float64)
            )
        return np.frombuffer(b"".join([struct.pack(f"{len(row)}i", *row) for row in rows]), dtype=np.int32)
    except struct.error:
        return None


_SPACE: Final = b" \t\r\n"
_FRAME: Final = _SPACE + b"[]"
_NO_ARRAY: Final = frozenset({b"null", b"[]"})
_PER_TOKEN_FLOATS: Final = ("inference_logprobs", "advantages", "ref_logprobs")

# Both patterns begin with what they look for, which is several times faster than a lookbehind would be.
_SHORT_EXPONENT: Final = re.compile(rb"e-(?=[6-9][,\]])")
_HUNDRED_THOUSANDTHS: Final = re.compile(rb"0\.0000[1-9]\d*")

_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def columns_to_json(stored: bytes) -> bytes:
    """Return the JSON text of a group stored in columns, with all keys of the contract in their order."""
    record = unpack_record(stored)
    head = decode_head(record)
    columns = split_columns(head.lengths, head.columns, record.data)
    texts = {key: bytes(raw) for key, raw in head.fields.items()}
    for name, column in columns.items():
        if name in DISTILLED:
            texts[name] = _render_nested(name, columns, head.lengths)
        elif name != "distill_lengths":
            texts[name] = render_rows(name, split_rows(column, head.lengths))
    order = (*WIRE_KEYS, *(key for key in head.fields if key not in WIRE_KEYS))
    return _join_fields((key, texts.get(key, b"null")) for key in order)


def json_to_columns(stored: bytes) -> bytes:
    """Return the columns form of a group stored as (checked) JSON text."""
    texts = {key: bytes(raw) for key, raw in _fields_decoder.decode(stored).items()}
    lengths = row_lengths(texts["tokens"])
    columns: dict[str, Column] = {"tokens": _parse_ids(texts.pop("tokens"))}
    if b"-0" not in texts["masks"]:
        columns["masks"] = _parse_ids(texts.pop("masks"))
    for name in _PER_TOKEN_FLOATS:
        column = _parse_floats(name, texts.get(name, b"null"), lengths)
        if column is not None:
            columns[name] = column
            del texts[name]
    columns |= _take_distilled(texts)
    fields = _join_fields((key, text) for key, text in texts.items() if text != b"null" or key not in WIRE_KEYS)
    order = [name for name in COLUMN_ORDER if name in columns]
    return b"".join(pack_record(encode_head(lengths, order, fields), *(columns[name].tobytes() for name in order)))


def render_rows(name: str, rows: Sequence[NDArray[Any]]) -> bytes:
    """Return rows as JSON text, floats as Python writes them."""
    if name not in FLOAT_COLUMNS:
        return orjson.dumps(list(rows), option=orjson.OPT_SERIALIZE_NUMPY)
    text = orjson.dumps([row.astype(np.float64) for row in rows], option=orjson.OPT_SERIALIZE_NUMPY)
    return _as_python_writes(text)


def row_lengths(text: bytes) -> list[int]:
    """Return the number of values in each row of a checked array of rows, none of them empty."""
    return [row.count(b",") + (not index) for index, row in enumerate(text.split(b"]")[:-2])]


def _parse_ids(text: bytes) -> NDArray[np.int32]:
    return np.fromstring(text.translate(None, _FRAME), dtype=np.int32, sep=",")


def _parse_floats(name: str, text: bytes, lengths: Sequence[int]) -> NDArray[np.float32] | None:
    """Return the column of an array of float rows, or None if its text could not be restored from it."""
    if text in _NO_ARRAY:
        return None
    values = orjson.loads(b"[%b]" % text.translate(None, _FRAME))
    column = narrow(np.frombuffer(struct.pack(f"{len(values)}d", *values), dtype=np.float64))
    if column is None or render_rows(name, split_rows(column, lengths)) != text.translate(None, _SPACE):
        return None
    return column


def _as_python_writes(text: bytes) -> bytes:
    """Write exponents as Python's `repr` does: below 1e-4, with two digits; orjson writes them below 1e-5, with one."""
    return _HUNDRED_THOUSANDTHS.sub(_with_exponent, _SHORT_EXPONENT.sub(b"e-0", text))


def _with_exponent(match: re.Match[bytes]) -> bytes:
    number = match[0]
    start = match.start()
    if start and match.string[start - 1] not in b"[,-":
        return number
    digits = number[6:]
    return b"%b%b%be-05" % (digits[:1], b"." if len(digits) > 1 else b"", digits[1:])


def _take_distilled(texts: dict[str, bytes]) -> dict[str, Column]:
    """Move the distill arrays from `texts` into columns, if the text of each can be restored exactly."""
    nested = {name: orjson.loads(texts[name]) for name in DISTILLED if texts.get(name, b"null") not in _NO_ARRAY}
    # A key of that name that the sender added must stay as it is.
    if not nested or "distill_lengths" in texts:
        return {}
    shape = next(iter(nested.values()))
    lengths = [len(row) for row in shape]
    counts = [len(position) for row in shape for position in row]
    columns: dict[str, Column] = {"distill_lengths": np.array(counts, dtype=np.int32)}
    for name, rows in nested.items():
        column = _as_column(name, [value for row in rows for position in row for value in position])
        if column is None:
            return {}
        columns[name] = column
        if _render_nested(name, columns, lengths) != texts[name].translate(None, _SPACE):
            return {}
    for name in nested:
        del texts[name]
    return columns


def _as_column(name: str, values: list[Any]) -> Column | None:
    try:
        if name in FLOAT_COLUMNS:
            return narrow(np.array(values, dtype=np.float64))
        return np.array(values, dtype=np.int64).astype(np.int32)
    except (TypeError, ValueError, OverflowError):
        return None


def _render_nested(name: str, columns: dict[str, Column], lengths: Sequence[int]) -> bytes:
    return b"[%b]" % b",".join(render_rows(name, rows) for rows in split_nested(columns, name, lengths))


def _join_fields(fields: Iterable[tuple[str, bytes]]) -> bytes:
    return b"{%b}" % b",".join(b"%b:%b" % (msgspec.json.encode(key), text) for key, text in fields)
