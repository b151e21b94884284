"""Checks of number arrays in their JSON text, so that a token never becomes a Python object on its way through.

msgspec has checked the syntax; what is left is decided on the characters of each row: integers only, no sign, no
number too long to fit. Whatever looks unusual is decoded and judged value by value, and what Atropos' own broker
would have read as a number (`"1.5"`, `true`, `3.0` for an id) is rewritten as that number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, Final

import msgspec

from atropos_api.errors import InvalidGroup

ID_LIMIT: Final = 2**31
"""Token ids travel as int32 to every trainer."""

_ZEROES: Final = bytes.maketrans(b"123456789", b"000000000")
_SPACE: Final = b" \t\r\n"
_LONG_ID: Final = b"0" * 10
_LONG_NUMBER: Final = b"0" * 64
_rows_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_floats_decoder = msgspec.json.Decoder(list[float])

Judge = Callable[[Any, str], int | float]


def check_ids(raw: bytes, field: str, *, signed: bool = False) -> tuple[list[int], bytes]:
    """Lengths of the rows of an array of integer rows, and its text (rewritten where a value had to be coerced)."""
    lengths = []
    allowed = b"0,-" if signed else b"0,"
    for row in _split_rows(raw, field):
        plain = row.translate(_ZEROES, _SPACE)
        if plain.translate(None, allowed) != b"[]" or _LONG_ID in plain:
            return _judge_rows(raw, field, _signed_id if signed else _unsigned_id)
        lengths.append(plain.count(b",") + 1 if len(plain) > 2 else 0)
    return lengths, raw


def check_floats(raw: bytes, field: str) -> tuple[list[int], bytes]:
    """As `check_ids`, for rows of finite numbers."""
    lengths = []
    for row in _split_rows(raw, field):
        plain = row.translate(_ZEROES, _SPACE)
        if plain.translate(None, b"0,-.") == b"[]" and _LONG_NUMBER not in plain:
            lengths.append(plain.count(b",") + 1 if len(plain) > 2 else 0)
            continue
        # Exponents are common (-1.2e-05) and need a look at their value: 1e999 is valid JSON.
        try:
            lengths.append(len(_floats_decoder.decode(row)))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return _judge_rows(raw, field, _finite)
    return lengths, raw


def check_numbers(raw: bytes, field: str) -> tuple[int, bytes]:
    """Length and text of one flat array of finite numbers."""
    try:
        return len(_floats_decoder.decode(raw)), raw
    except (msgspec.DecodeError, UnicodeDecodeError):
        values = _loads(raw, field)
    if not isinstance(values, list):
        raise InvalidGroup(field, values, "an array of numbers is needed")
    judged = [_finite(value, f"{field}[{index}]") for index, value in enumerate(values)]
    return len(judged), msgspec.json.encode(judged)


def check_nested(raw: bytes, field: str, *, ids: bool) -> list[list[int]]:
    """Lengths [sequence][position] of a three-deep array of numbers."""
    check = check_ids if ids else check_floats
    return [check(row, f"{field}[{index}]")[0] for index, row in enumerate(_split_rows(raw, field))]


def _split_rows(raw: bytes, field: str) -> list[bytes]:
    try:
        return [bytes(row) for row in _rows_decoder.decode(raw)]
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidGroup(field, _loads(raw, field), "an array of rows is needed") from None


def _judge_rows(raw: bytes, field: str, judge: Judge) -> tuple[list[int], bytes]:
    rows = []
    for index, row in enumerate(_loads(raw, field)):
        if not isinstance(row, list):
            raise InvalidGroup(f"{field}[{index}]", row, "an array is needed")
        rows.append([judge(value, f"{field}[{index}][{place}]") for place, value in enumerate(row)])
    return [len(row) for row in rows], msgspec.json.encode(rows)


def _loads(raw: bytes, field: str) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise InvalidGroup(field, raw[:80].decode("utf-8", "replace"), "not valid JSON text") from None


def _finite(value: Any, field: str) -> float:
    number = value
    if isinstance(value, str | bool):
        try:
            number = float(value)
        except ValueError:
            raise InvalidGroup(field, value, "a number is needed") from None
    if not isinstance(number, int | float):
        raise InvalidGroup(field, value, _number_needed(value))
    try:
        as_float = float(number)
    except OverflowError:
        as_float = math.inf
    if not math.isfinite(as_float):
        raise InvalidGroup(field, str(as_float), "a finite number is needed")
    return number


def _signed_id(value: Any, field: str) -> int:
    number = _finite(value, field)
    if number != int(number):
        raise InvalidGroup(field, value, "an integer is needed")
    if not -ID_LIMIT <= number < ID_LIMIT:
        raise InvalidGroup(field, str(value), "it does not fit in 32 bits")
    return int(number)


def _unsigned_id(value: Any, field: str) -> int:
    number = _signed_id(value, field)
    if number < 0:
        raise InvalidGroup(field, value, "a token id is 0 or more")
    return number


def _number_needed(value: object) -> str:
    if value is None:
        return "a number is needed (some encoders write null for NaN)"
    return "a number is needed"
