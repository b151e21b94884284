"""Checks of number arrays in their JSON text, so that no token becomes a Python object on its way.

msgspec has checked the syntax; the rest is decided on the characters of a whole array: integers only, no sign, no
number too long to fit. For a small array numpy's calls cost too much: ids are removed from the text, and what is left
shows how many there were; floats are decoded and thrown away. An array that looks unusual is decoded and checked value
by value, and what Atropos' own broker would have read as a number (`"1.5"`, `true`, `3.0` for an id) is rewritten as
that number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from atropos_api.errors import InvalidGroup

ID_LIMIT: Final = 2**31
"""Limit on token ids: every trainer gets them as int32."""

FLOAT_LIMIT: Final = 2.0**128 - 2.0**103
"""Limit on floats: every trainer gets them as float32, in which larger ones are infinite."""

SPACE: Final = b" \t\r\n"
_COMMA: Final = ord(",")
_MINUS: Final = ord("-")
_CLOSING: Final = ord("]")
_EXPONENT: Final = ord("e")
_ALL_TRUE: Final = np.uint64(0x0101010101010101)
"""Eight true booleans, read as one integer."""

_FEW_IDS_BYTES: Final = 1 << 12
_FEW_FLOATS_BYTES: Final = 1 << 14
"""Below this much text, numpy costs more than it saves."""

_IDS: Final = b"0123456789" + SPACE
_SIGNED_IDS: Final = _IDS + b"-"
_DIGITS_ALIKE: Final = bytes.maketrans(b"123456789", b"000000000")
_TEN_DIGITS: Final = b"0" * 10

_RowsDecoder = msgspec.json.Decoder[list[list[Any]]]

_rows_decoder = msgspec.json.Decoder(list[msgspec.Raw])

_ids_decoder: _RowsDecoder = msgspec.json.Decoder(list[list[Annotated[int, msgspec.Meta(ge=0, lt=ID_LIMIT)]]])

_masks_decoder: _RowsDecoder = msgspec.json.Decoder(list[list[Annotated[int, msgspec.Meta(ge=-ID_LIMIT, lt=ID_LIMIT)]]])

Float = Annotated[float, msgspec.Meta(gt=-FLOAT_LIMIT, lt=FLOAT_LIMIT)]

_float_rows_decoder = msgspec.json.Decoder(list[list[Float]])

_floats_decoder = msgspec.json.Decoder(list[Float])

Characters = NDArray[np.uint8]

Judge = Callable[[Any, str], int | float]


def check_ids(raw: bytes, field: str, *, signed: bool = False) -> tuple[list[int], bytes]:
    """Return the row lengths of an array of integer rows, and its text (rewritten if a value had to be coerced)."""
    if len(raw) >= _FEW_IDS_BYTES:
        lengths = _row_lengths(raw) if _holds_ids(raw, signed=signed) else None
    elif (lengths := _outlined_lengths(raw, signed=signed)) is None and (signed or b"-" not in raw):
        lengths = _decoded_lengths(_masks_decoder if signed else _ids_decoder, raw)
    if lengths is None:
        return _judge_rows(raw, field, _signed_id if signed else _unsigned_id)
    return lengths, raw


def check_floats(raw: bytes, field: str) -> tuple[list[int], bytes]:
    """Check rows of numbers that are finite as float32; return the same as `check_ids`."""
    if len(raw) < _FEW_FLOATS_BYTES:
        lengths = _decoded_lengths(_float_rows_decoder, raw)
    else:
        lengths = _row_lengths(raw) if _holds_finite(raw) else None
    if lengths is None:
        return _judge_rows(raw, field, _finite)
    return lengths, raw


def check_numbers(raw: bytes, field: str) -> tuple[int, bytes]:
    """Return the length and the text of one flat array of numbers that are finite as float32."""
    try:
        return len(_floats_decoder.decode(raw)), raw
    except (msgspec.DecodeError, UnicodeDecodeError):
        values = _loads(raw, field)
    if not isinstance(values, list):
        raise InvalidGroup(field, values, "an array of numbers is needed")
    judged = [_finite(value, f"{field}[{index}]") for index, value in enumerate(values)]
    return len(judged), msgspec.json.encode(judged)


def check_nested(raw: bytes, field: str, *, ids: bool) -> tuple[list[list[int]], bytes]:
    """Return the lengths [sequence][position] of a three-level array of numbers, and its text."""
    check = check_ids if ids else check_floats
    rows = _split_rows(raw, field)
    checked = [check(row, f"{field}[{index}]") for index, row in enumerate(rows)]
    same = all(text is row for row, (_, text) in zip(rows, checked, strict=True))
    return [lengths for lengths, _ in checked], raw if same else b"[%b]" % b",".join(text for _, text in checked)


def _outlined_lengths(raw: bytes, *, signed: bool) -> list[int] | None:
    """Return the row lengths of an array of arrays of two or more ids; None for other JSON texts, or if unsure.

    Without its ids and spaces such an array reads `[[,,],[,,]]`, and no other text does.
    """
    if _TEN_DIGITS in raw.translate(_DIGITS_ALIKE):
        return None
    outline = raw.translate(None, _SIGNED_IDS if signed else _IDS)
    commas = list(map(len, outline[2:-2].split(b"],[")))
    only_commas = sum(commas) + len(commas) == outline.count(b",") + 1
    framed = outline[:2] == b"[[" and outline[-2:] == b"]]"
    # Once its id is removed, a row of one id looks like an empty row.
    return [count + 1 for count in commas] if framed and only_commas and min(commas) > 0 else None


def _decoded_lengths(decoder: _RowsDecoder, raw: bytes) -> list[int] | None:
    """Return the row lengths of a small array by decoding it: that is faster than many checks of its text."""
    try:
        return list(map(len, decoder.decode(raw)))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _holds_ids(raw: bytes, *, signed: bool) -> bool:
    """Return True if a valid JSON text holds only integers of at most nine digits."""
    if b'"' in raw or b"." in raw or b"E" in raw or (not signed and b"-" in raw):
        return False
    characters = np.frombuffer(raw, np.uint8)
    # Words, objects and the other exponent (e) contain characters above these.
    return bool(characters.max() <= _CLOSING) and not _has_ten_digits(characters)


def _holds_finite(raw: bytes) -> bool:
    """Return True if a valid JSON text holds only numbers that are finite as float32."""
    if b'"' in raw:
        return False
    characters = np.frombuffer(raw, np.uint8)
    if characters.max() > _EXPONENT or _has_long_number(characters):
        return False
    exponents = np.flatnonzero(characters == _EXPONENT)
    if b"E" in raw or not (characters[exponents + 1] == _MINUS).all():
        return _exponents_fit(raw)
    return True


def _row_lengths(raw: bytes) -> list[int] | None:
    """Return the row lengths of a valid JSON text of numbers if it is an array of arrays, and no deeper; else None."""
    opening = raw.find(b"[", 1)
    if opening < 0 or raw[:opening].strip(SPACE) != b"[":
        return None
    commas = np.frombuffer(raw, np.uint8) == _COMMA
    lengths = []
    while True:
        end = raw.find(b"]", opening)
        if raw.find(b"[", opening + 1, end) >= 0:
            return None
        count = int(np.count_nonzero(commas[opening:end]))
        lengths.append(count + 1 if count or raw[opening + 1 : end].strip(SPACE) else 0)
        opening = raw.find(b"[", end)
        if opening < 0:
            return lengths if raw[end + 1 :].strip(SPACE) == b"]" else None
        if raw[end + 1 : opening].strip(SPACE) != b",":
            return None


def _has_ten_digits(characters: Characters) -> bool:
    """Return True if ten digits follow one another: an id of fewer fits in 32 bits."""
    digits = _digits(characters)
    two = digits[:-1] & digits[1:]
    four = two[:-2] & two[2:]
    eight = four[:-4] & four[4:]
    return bool((eight[:-2] & two[8:]).any())


def _has_long_number(characters: Characters) -> bool:
    """Return True if so many digits follow one another that the number may be too large; one of 38 digits fits."""
    digits = _digits(characters)
    # At any alignment, 39 digits hold four whole words of eight, and those of a usual float no more than two.
    eights = digits[: len(digits) - len(digits) % 8].view(np.uint64) == _ALL_TRUE
    pairs = eights[:-1] & eights[1:]
    return bool((pairs[:-2] & pairs[2:]).any())


def _digits(characters: Characters) -> NDArray[np.bool_]:
    # The type is unsigned, so characters below "0" wrap around to large values.
    return (characters - np.uint8(ord("0"))) < 10


def _exponents_fit(raw: bytes) -> bool:
    """Return True if rows with exponents hold values that fit: 1e5 is rare, and 1e999 is valid JSON but infinite."""
    rows = [row for row in raw.split(b"]") if b"e" in row or b"E" in row]
    try:
        for row in rows:
            _floats_decoder.decode(b"[" + row.lstrip(b"[, \t\r\n") + b"]")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


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
    if not -FLOAT_LIMIT < as_float < FLOAT_LIMIT:
        raise InvalidGroup(field, str(as_float), "a number that is finite in 32 bits is needed")
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
