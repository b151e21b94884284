"""The check of arrays by their characters gives the same result as reading every number."""

import json

import hypothesis.strategies as st
from hypothesis import given, settings

from atropos_api.errors import InvalidGroup
from atropos_api.wire.json_arrays import FLOAT_LIMIT, check_floats, check_ids

ODD = [
    "-1", "1.5", "1e3", "1E-7", "1e999", "true", "null", '"7"', '"x"', "[1]", "{}", "99999999999", "2147483647",
    "2147483648", "-2147483649", "9" * 320, "0." + "3" * 400, "-0", "-100",
    "1e5", "-1.25e-07", "1E5", "5e-324", "1e+300", "3.4e38", "-3.5e38", "1e-999", "9" * 127, "999999999", "1000000000",
]  # fmt: skip
ids = st.integers(-100, 60_000).map(str)
plain = ids | st.floats(-30, 1).map(repr)
values = plain | st.sampled_from(ODD)
spaces = st.sampled_from(["", " ", "\n\t"])


@st.composite
def arrays(draw):
    space = draw(spaces)
    rows = draw(st.lists(st.lists(draw(st.sampled_from([ids, plain, values])), max_size=5), max_size=4))
    texts = [f"[{space}" + f",{space}".join(row) + f"{space}]" for row in rows]
    if draw(st.integers(0, 19)) == 0:
        texts.append(draw(st.sampled_from(["3", "null", '"a]b"', '"],["'])))
    return f"[{space}" + f",{space}".join(texts) + f"{space}]"


def is_number(value):
    try:
        return isinstance(value, str | int | float) and -FLOAT_LIMIT < float(value) < FLOAT_LIMIT
    except (ValueError, OverflowError):
        return False


def is_id(value, signed):
    return (
        is_number(value) and float(value) == int(float(value)) and (-(2**31) if signed else 0) <= float(value) < 2**31
    )


def as_floats(rows):
    return [[float(value) for value in row] for row in rows]


def judge(check, raw, good):
    judge_text(check, raw, good)
    # Large arrays are checked in another way than small ones: spaces make the same array large.
    judge_text(check, raw[0] + " " * 16384 + raw[1:], good)


def judge_text(check, raw, good):
    rows = json.loads(raw)
    valid = all(isinstance(row, list) and all(good(value) for value in row) for row in rows)
    try:
        lengths, text = check(raw.encode(), "field")
    except InvalidGroup:
        assert not valid
        return
    assert valid
    assert lengths == [len(row) for row in rows]
    assert as_floats(json.loads(text)) == as_floats(rows)


@settings(max_examples=600)
@given(raw=arrays())
def test_floats_are_taken_exactly_when_all_are_finite_in_32_bits(raw):
    judge(check_floats, raw, is_number)


@settings(max_examples=600)
@given(raw=arrays(), signed=st.booleans())
def test_ids_are_taken_exactly_when_all_fit(raw, signed):
    judge(lambda text, field: check_ids(text, field, signed=signed), raw, lambda value: is_id(value, signed))
