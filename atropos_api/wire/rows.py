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

_DIGITS: Final = b"0123456789"
_SPACE: Final = b" \t\r\n"
_ZEROES: Final = bytes.maketrans(b"123456789", b"000000000")
_LONG_ID: Final = b"0" * 10
_LONGEST_NUMBER: Final = 300
"""Characters; a number this short is finite unless it has an exponent."""

_rows_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_floats_decoder = msgspec.json.Decoder(list[float])

Judge = Callable[[Any, str], int | float]


def check_ids(raw: bytes, field: str, *, signed: bool = False) -> tuple[list[int], bytes]:
    """Lengths of the rows of an array of integer rows, and its text (rewritten where a value had to be coerced)."""
    lengths = _plain_lengths(raw, _DIGITS + _SPACE + (b"-" if signed else b""))
    if lengths is None or _LONG_ID in raw.translate(_ZEROES):
        return _judge_rows(raw, field, _signed_id if signed else _unsigned_id)
    return lengths, raw


def check_floats(raw: bytes, field: str) -> tuple[list[int], bytes]:
    """As `check_ids`, for rows of finite numbers."""
    lengths = _plain_lengths(raw, _DIGITS + _SPACE + b"+-.eE")
    if lengths is None or _has_long_number(raw) or not _exponents_fit(raw):
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


def _plain_lengths(raw: bytes, allowed: bytes) -> list[int] | None:
    """Row lengths if the text is `[[...],[...]]` of characters in `allowed` and commas; else None.

    What is left of a row without its numbers is its brackets and commas; msgspec has seen that between two commas
    there is one number.
    """
    *rows, end, rest = raw.split(b"]") if raw.count(b"]") >= 2 else (b"", b"", b"x")
    if rest.strip(_SPACE) or end.strip(_SPACE):
        return None
    lengths = []
    opening = b"[["
    for row in rows:
        frame = row.translate(None, allowed)
        commas = len(frame) - 2
        if commas < 0 or frame != opening + b"," * commas:
            return None
        opening = b",["
        lengths.append(commas + 1 if commas or _has_number(row) else 0)
    return lengths


def _has_number(row: bytes) -> bool:
    return any(digit in row for digit in _DIGITS)


def _exponents_fit(raw: bytes) -> bool:
    """Whether rows with exponents hold finite values: -1.2e-05 is common, 1e999 is valid JSON."""
    if b"e" not in raw and b"E" not in raw:
        return True
    rows = [row for row in raw.split(b"]") if b"e" in row or b"E" in row]
    try:
        for row in rows:
            _floats_decoder.decode(b"[" + row.lstrip(b"[, \t\r\n") + b"]")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


def _has_long_number(raw: bytes) -> bool:
    """Whether any value is longer than numbers are: jumps from comma to comma as far apart as one may be."""
    position, last = 0, len(raw) - _LONGEST_NUMBER
    while position < last:
        comma = raw.rfind(b",", position, position + _LONGEST_NUMBER)
        if comma < 0:
            return True
        position = comma + 1
    return False


def _split_rows(raw: bytes, field: str) -> list[bytes]:
    try:
        return [bytes(row) for row in _rows_decoder.decode(raw)]
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidGroup(field, _loads(raw, field), "an array of rows is needed") from None


def _judge_rows(raw: bytes, field: str, judge: Judge) -> tuple[list[int], bytes]:
    found = _loads(raw, field)
    if not isinstance(found, list):
        raise InvalidGroup(field, found, "an array of rows is needed")
    rows = []
    for index, row in enumerate(found):
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
