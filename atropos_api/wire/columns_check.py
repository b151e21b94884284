"""Checks of groups in columns: they are as strict as those for JSON, and no number becomes a Python object."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import msgspec
import numpy as np

from atropos_api.errors import InvalidGroup, InvalidRequest
from atropos_api.wire.columns import (
    DISTILLED,
    FLOAT_COLUMNS,
    Column,
    Record,
    RecordHead,
    decode_head,
    split_columns,
    unpack_body,
)
from atropos_api.wire.group_json import CheckedGroup, check_fields, check_teacher_width, read_policy
from atropos_api.wire.messages import Whole

MOST_GROUPS: Final = 1 << 14
"""Limit on groups in a body: in memory a group takes more than its smallest encoding, so this bounds that memory."""
NO_VALUE: Final = frozenset({b"null", b"[]"})


class SubmissionHead(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Head of a body for `POST /v1/groups`: it names the environment."""

    environment_id: Whole


_submission_decoder = msgspec.json.Decoder(SubmissionHead, strict=False)


def check_submission(body: bytes) -> tuple[int, list[CheckedGroup]]:
    """Check a body; return the environment that sent it and its groups, ready for the queue."""
    head, count, records = unpack_body(body)
    if count > MOST_GROUPS:
        raise InvalidRequest(
            f"the body has {count} groups, {MOST_GROUPS} may be sent at once", field="body", value=count
        )
    try:
        env_id = _submission_decoder.decode(head).environment_id
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body's head has the wrong shape: {error}", field="head") from None
    groups = [check_record(record, where=f"groups[{index}].", env_id=env_id) for index, record in enumerate(records)]
    return env_id, groups


def check_record(record: Record, *, where: str = "", env_id: int | None = None) -> CheckedGroup:
    """Check one group; `env_id` replaces the one in its head. Raises `InvalidGroup`."""
    head = decode_head(record, where)
    if not head.lengths:
        raise InvalidGroup(f"{where}lengths", "[]", "a group holds at least one sequence")
    columns = split_columns(head.lengths, head.columns, record.data, where)
    texts = {key: bytes(raw) for key, raw in head.fields.items()}
    _check_presence(columns, texts, where)
    for name, column in columns.items():
        _check_values(name, column, head.lengths, where)
    found_env_id, oldest_version = check_fields(texts, head.lengths, where=where, env_id=env_id)
    return CheckedGroup(
        text=_open_head(head, texts),
        size=len(head.lengths),
        token_count=sum(head.lengths),
        env_id=found_env_id,
        oldest_version=oldest_version,
        policy=read_policy(texts, where),
        columns=record.data,
    )


def _check_presence(columns: dict[str, Column], texts: dict[str, bytes], where: str) -> None:
    """Check that required arrays are there, each in one place, and those of distillation in the same one."""
    for key in ("masks", "scores"):
        if key not in columns and key not in texts:
            raise InvalidGroup(f"{where}{key}", None, "the field is required")
    for key in columns:
        if key in texts:
            raise InvalidGroup(f"{where}{key}", None, "it is a column and a field; it may be one of them")
    apart = [name for name in DISTILLED if texts.get(name, b"null") not in NO_VALUE]
    if "distill_lengths" in columns and apart:
        raise InvalidGroup(f"{where}{apart[0]}", None, "the distill arrays are either both columns or both fields")


def _check_values(name: str, column: Column, lengths: Sequence[int], where: str) -> None:
    if name in FLOAT_COLUMNS:
        finite = np.isfinite(column)
        if not finite.all():
            place = int(finite.argmin())
            field = where + _locate(name, place, lengths)
            raise InvalidGroup(field, str(column[place]), "a finite number is needed")
    elif name == "distill_lengths":
        check_teacher_width(int(column.max()), where)
    elif name != "masks" and len(column) and column.min() < 0:
        place = int(column.argmin())
        raise InvalidGroup(where + _locate(name, place, lengths), int(column[place]), "a token id is 0 or more")


def _locate(name: str, place: int, lengths: Sequence[int]) -> str:
    """Return a place in a column as the path in a JSON group, such as `tokens[0][3]`."""
    if name in DISTILLED:
        return f"{name}[{place}]"
    starts = list(accumulate(lengths, initial=0))
    row = bisect_right(starts, place) - 1
    return f"{name}[{row}][{place - starts[row]}]"


def _open_head(head: RecordHead, texts: dict[str, bytes]) -> bytes:
    """Return the head as it is stored, open after its fields; a `received_version` that was sent is removed."""
    texts.pop("received_version", None)
    fields = b",".join(b"%b:%b" % (msgspec.json.encode(key), text) for key, text in texts.items())
    frame = msgspec.json.encode({"lengths": head.lengths, "columns": head.columns})
    return b'%b,"fields":{%b' % (frame[:-1], fields)
