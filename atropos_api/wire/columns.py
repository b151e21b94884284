"""The binary columns form: small fields as JSON, number arrays as their bytes in memory (docs/reference/columns.md).

A body is a prefix, a JSON head, and groups one after another; a group is a prefix, a JSON head, and its columns. The
same layout carries submissions, stored groups and batches, so a stored group is delivered by joining bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from atropos_api.errors import InvalidGroup, InvalidRequest

MEDIA_TYPE: Final = "application/vnd.atropos.columns"
VERSION: Final = 1
MAGIC: Final = b"ATRCOLS%c" % VERSION
FLOAT_COLUMNS: Final = ("inference_logprobs", "advantages", "ref_logprobs", "distill_logprobs")
DISTILLED: Final = ("distill_token_ids", "distill_logprobs")
COLUMN_ORDER: Final = (
    "tokens",
    "masks",
    "inference_logprobs",
    "advantages",
    "ref_logprobs",
    "distill_lengths",
    "distill_token_ids",
    "distill_logprobs",
)
"""The order of the columns; a group may lack some."""

ALIGNMENT: Final = 4
_BODY: Final = struct.Struct("<8sII")
_RECORD: Final = struct.Struct("<II")

Column = NDArray[np.int32] | NDArray[np.float32]
RowLength = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]


class RecordHead(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Head of a group: `fields` is the group's JSON object without the keys stored as columns."""

    lengths: list[RowLength]
    columns: list[str]
    fields: dict[str, msgspec.Raw]


class Record(NamedTuple):
    """One group of a body: the text of its head, and its columns."""

    head: memoryview
    data: memoryview


_head_decoder = msgspec.json.Decoder(RecordHead)


def pack_body(head: bytes, records: Sequence[bytes]) -> bytes:
    return b"".join((begin_body(head, len(records)), *records))


def begin_body(head: bytes, count: int) -> bytes:
    """Return the part of a body that precedes its `count` groups."""
    head = _pad(head)
    return _BODY.pack(MAGIC, len(head), count) + head


def pack_record(head: bytes, *columns: bytes | memoryview) -> tuple[bytes | memoryview, ...]:
    """Return a group in pieces, to be joined: the head is padded, the columns follow as they are."""
    head = _pad(head)
    return (_RECORD.pack(len(head), sum(map(len, columns))), head, *columns)


def unpack_body(body: bytes) -> tuple[memoryview, int, Iterator[Record]]:
    """Return the head of a body, the number of groups that it declares, and an iterator over those groups.

    Nothing is copied, every size is checked against the bytes, and each group is read only when the iterator reaches
    it.
    """
    if len(body) < _BODY.size:
        raise _malformed(f"it has {len(body)} bytes, its prefix alone takes {_BODY.size}")
    magic, head_bytes, count = _BODY.unpack_from(body)
    if magic != MAGIC:
        raise _malformed(f"it begins with {magic!r}, version {VERSION} begins with {MAGIC!r}")
    view = memoryview(body)
    head, place = _take(view, _BODY.size, head_bytes, "its head")
    return head, count, _take_records(view, place, count)


def unpack_record(stored: bytes) -> Record:
    """Return one group that stands alone, as the broker keeps it."""
    record, _ = _take_record(memoryview(stored), 0, "the group")
    return record


def decode_head(record: Record, where: str = "") -> RecordHead:
    try:
        return _head_decoder.decode(record.head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{where}head: {error}", field=f"{where}head") from None


def encode_head(lengths: Sequence[int], names: Sequence[str], fields: bytes) -> bytes:
    """Return the head of a group, from the text of its fields."""
    frame = msgspec.json.encode({"lengths": lengths, "columns": names})
    return b'%b,"fields":%b}' % (frame[:-1], fields)


def split_columns(lengths: Sequence[int], names: Sequence[str], data: memoryview, where: str = "") -> dict[str, Column]:
    """Return the columns by name, as views of `data`; each must be as long as the row lengths say."""
    _check_names(names, where)
    values = np.frombuffer(data, dtype="<i4")
    per_token = sum(lengths)
    columns: dict[str, Column] = {}
    place = 0
    for name in names:
        count = _sum_lengths(columns["distill_lengths"], where) if name in DISTILLED else per_token
        part = values[place : place + count]
        if len(part) != count:
            raise InvalidGroup(f"{where}{name}", len(part), f"a column of {count} values is needed, as the lengths say")
        columns[name] = part.view("<f4") if name in FLOAT_COLUMNS else part
        place += count
    if place != len(values):
        raise InvalidGroup(f"{where}columns", len(values), f"{place} values are needed, as the lengths say")
    return columns


def split_rows(column: NDArray[Any], lengths: Sequence[int]) -> list[NDArray[Any]]:
    """Return the rows of a column, as views."""
    bounds = accumulate(lengths, initial=0)
    return [column[start:end] for start, end in pairwise(bounds)]


def split_nested(columns: dict[str, Column], name: str, lengths: Sequence[int]) -> Iterator[list[NDArray[Any]]]:
    """Yield a distill column's rows of rows."""
    counts: list[int] = columns["distill_lengths"].tolist()
    rows = iter(split_rows(columns[name], counts))
    return ([next(rows) for _ in range(length)] for length in lengths)


def narrow(values: NDArray[np.float64]) -> NDArray[np.float32] | None:
    """Return the numbers as float32, or None if that would change one."""
    with np.errstate(over="ignore"):
        narrowed = values.astype(np.float32)
    return narrowed if np.array_equal(narrowed, values) else None


def _check_names(names: Sequence[str], where: str) -> None:
    known = [name for name in COLUMN_ORDER if name in names]
    if known != list(names):
        raise InvalidGroup(f"{where}columns", ", ".join(names), f"only {', '.join(COLUMN_ORDER)}, in this order")
    if "tokens" not in names:
        raise InvalidGroup(f"{where}tokens", None, "the column is required")
    if ("distill_lengths" in names) != any(name in names for name in DISTILLED):
        raise InvalidGroup(f"{where}distill_lengths", None, "it goes with the distill columns, and they with it")


def _sum_lengths(column: Column, where: str) -> int:
    if len(column) and column.min() < 0:
        raise InvalidGroup(f"{where}distill_lengths", int(column.min()), "a length is 0 or more")
    return int(column.sum(dtype=np.int64))


def _take_records(view: memoryview, place: int, count: int) -> Iterator[Record]:
    for index in range(count):
        record, place = _take_record(view, place, f"groups[{index}]")
        yield record
    if place != len(view):
        raise _malformed(f"{len(view) - place} bytes follow the last of {count} groups")


def _take_record(view: memoryview, place: int, what: str) -> tuple[Record, int]:
    prefix, place = _take(view, place, _RECORD.size, f"the prefix of {what}")
    head_bytes, data_bytes = _RECORD.unpack(prefix)
    head, place = _take(view, place, head_bytes, f"the head of {what}")
    data, place = _take(view, place, data_bytes, f"the columns of {what}")
    return Record(head, data), place


def _take(view: memoryview, place: int, size: int, what: str) -> tuple[memoryview, int]:
    if size % ALIGNMENT:
        raise _malformed(f"{what} takes {size} bytes, not a multiple of {ALIGNMENT}")
    if size > len(view) - place:
        raise _malformed(f"{what} takes {size} bytes, {len(view) - place} are left")
    return view[place : place + size], place + size


def _pad(head: bytes) -> bytes:
    return head + b" " * (-len(head) % ALIGNMENT)


def _malformed(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the body is not in the columns form: {reason}", field="body")
