"""The columns form loses nothing on the way to JSON and back; bytes that contradict themselves are refused."""

import json
import os
import struct
import tracemalloc

import hypothesis.strategies as st
import numpy as np
from hypothesis import example, given, settings

from atropos_api.errors import InvalidGroup, InvalidRequest
from atropos_api.testing import make_group
from atropos_api.wire.columns import COLUMN_ORDER, decode_head, pack_body, unpack_body, unpack_record
from atropos_api.wire.columns_check import check_record, check_submission
from atropos_api.wire.columns_groups import columns_to_json, decode_group, encode_submission, json_to_columns
from atropos_api.wire.group_json import check_group, decode_fields, finish_text

EXAMPLES = int(os.environ.get("ATROPOS_PROPERTY_EXAMPLES", "100"))

floats32 = st.integers(0, 2**32 - 1).map(lambda bits: float(np.uint32(bits).view(np.float32))).filter(np.isfinite)
python_floats = floats32 | st.floats(-20, 0, width=32) | st.floats(-(2.0**-13), 0, width=32)
odd_floats = st.floats(-3.4e38, 3.4e38).map(repr) | st.sampled_from(
    ["1", "0", "-0", "-0.0", "1E-7", "1e-7", "0.1", "1e-05", "0.00001", "1.50", "10.00001", "3.4028235e38", "1e-300"]
)
ids = st.integers(0, 2**31 - 1).map(str)
masks = st.integers(-(2**31), 2**31 - 1).map(str) | st.sampled_from(["-100", "-0", "0"])
spaces = st.sampled_from(["", " ", "\n"])
small = st.sampled_from(["null", "[]", "{}", '{"a":[1.50,"\\u00e9"]}', '"text"', "1e5"])


def array(space, rows):
    return f"[{space}" + f",{space}".join(f"[{space}" + f",{space}".join(row) + f"{space}]" for row in rows) + "]"


@st.composite
def json_groups(draw):
    """Draw a valid group as text, in digits that encoders might write."""
    space = draw(spaces)
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))

    def rows(values):
        return array(space, [draw(st.lists(values, min_size=length, max_size=length)) for length in lengths])

    written = st.one_of(python_floats.map(repr), odd_floats) if draw(st.booleans()) else python_floats.map(repr)
    texts = {"tokens": rows(ids), "masks": rows(masks), "scores": json.dumps([0.5] * len(lengths))}
    for key in draw(st.sets(st.sampled_from(["inference_logprobs", "advantages", "ref_logprobs"]))):
        texts[key] = rows(written)
    if draw(st.booleans()):
        counts = [[draw(st.integers(0, 2)) for _ in range(length)] for length in lengths]
        for key in draw(st.sets(st.sampled_from(["distill_token_ids", "distill_logprobs"]))):
            value = ids if key == "distill_token_ids" else written
            cells = [[draw(st.lists(value, min_size=count, max_size=count)) for count in row] for row in counts]
            texts[key] = f"[{','.join(array(space, row) for row in cells)}]"
    for key in draw(st.sets(st.sampled_from(["mine", "lengths", "columns", "distill_lengths", "messages", "images"]))):
        texts[key] = draw(small) if key != "messages" else "[]"
    return "{" + ",".join(f'"{key}":{text}' for key, text in texts.items()) + "}", space


@settings(max_examples=EXAMPLES)
@given(group=json_groups(), version=st.none() | st.integers(0, 99))
def test_json_text_survives_the_way_through_columns(group, version):
    text, space = group
    stored = finish_text(check_group(decode_fields(text.encode()), env_id=4), version)
    back = columns_to_json(json_to_columns(stored))
    if space:
        back, stored = (found.translate(None, b" \n") for found in (back, stored))
    assert back == stored


def write_column(name, values):
    return struct.pack(
        f"<{len(values)}{'i' if name in {'tokens', 'masks', 'distill_lengths', 'distill_token_ids'} else 'f'}", *values
    )


@st.composite
def column_groups(draw):
    """Draw a valid group in columns, written by the format's description alone."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    count = sum(lengths)
    names = {"tokens", "masks", *draw(st.sets(st.sampled_from(["inference_logprobs", "advantages", "ref_logprobs"])))}
    distilled = draw(st.sets(st.sampled_from(["distill_token_ids", "distill_logprobs"])))
    counts = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    columns = {}
    for name in COLUMN_ORDER:
        if name == "distill_lengths" and distilled:
            columns[name] = counts
        elif name in names | distilled:
            values = {"tokens": st.integers(0, 2**31 - 1), "masks": st.integers(-(2**31), 2**31 - 1)}
            values["distill_token_ids"] = values["tokens"]
            size = sum(counts) if name in distilled else count
            columns[name] = draw(st.lists(values.get(name, floats32), min_size=size, max_size=size))
    fields = {"scores": [0.5] * len(lengths), "env_id": 4, "mine": draw(st.sampled_from([None, [], {"a": "é"}]))}
    head = json.dumps({"lengths": lengths, "columns": list(columns), "fields": fields}).encode()
    head += b" " * (-len(head) % 4)
    data = b"".join(write_column(name, values) for name, values in columns.items())
    return struct.pack("<II", len(head), len(data)) + head + data, columns


@settings(max_examples=EXAMPLES)
@given(group=column_groups())
def test_columns_survive_the_way_through_json_bit_by_bit(group):
    written, columns = group
    stored = finish_text(check_record(unpack_record(written)), 3)
    text = columns_to_json(stored)
    back = json_to_columns(text)
    assert unpack_record(back).data == unpack_record(stored).data == unpack_record(written).data
    assert columns_to_json(back) == text
    delivered = json.loads(text)
    assert [value for row in delivered["tokens"] for value in row] == columns["tokens"]
    if "inference_logprobs" in columns:
        assert f"[{', '.join(map(repr, columns['inference_logprobs']))}]" == json.dumps(
            [value for row in delivered["inference_logprobs"] for value in row]
        )
    assert delivered["received_version"] == 3


@settings(max_examples=EXAMPLES)
@given(values=st.lists(python_floats, min_size=1, max_size=20))
@example(values=[9.99999974737875e-05, 9.999999747378752e-06, 1.0000000656873453e-05, 10.000010013580322, 1e-45, 1e16])
def test_floats_are_written_as_python_writes_them(values):
    exact = [float(np.float32(value)) for value in values]
    head = json.dumps({"lengths": [len(exact)], "columns": ["tokens", "inference_logprobs"], "fields": {}}).encode()
    head += b" " * (-len(head) % 4)
    data = struct.pack(f"<{len(exact)}i", *range(len(exact))) + struct.pack(f"<{len(exact)}f", *exact)
    text = columns_to_json(struct.pack("<II", len(head), len(data)) + head + data)
    assert f'"inference_logprobs":[{json.dumps(exact, separators=(",", ":"))}]'.encode() in text


GROUPS = [
    make_group(3, 5, version=2),
    make_group(2, 4, distill_token_ids=[[[1, 2]] * 4] * 2, ref_logprobs=[[0.5] * 4] * 2),
]
BODY = encode_submission(3, GROUPS)
HUGE = st.sampled_from([struct.pack("<I", value) for value in (0, 3, 4, 2**16, 2**31 - 4, 2**31, 2**32 - 4, 2**32 - 1)])


@st.composite
def damaged_bodies(draw):
    body = bytearray(BODY)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(body) - 1))
        kind = draw(st.sampled_from(["cut", "byte", "length", "digits", "insert"]))
        if kind == "cut":
            del body[max(1, place) :]
        elif kind == "byte":
            body[place] = draw(st.integers(0, 255))
        elif kind == "length":
            body[place // 4 * 4 : place // 4 * 4 + 4] = draw(HUGE)
        elif kind == "digits":
            body[place : place + 9] = b"9" * len(body[place : place + 9])
        else:
            body[place:place] = draw(st.binary(max_size=8))
    return bytes(body)


@settings(max_examples=EXAMPLES)
@given(body=damaged_bodies())
def test_damaged_bodies_are_the_senders_fault_and_cost_no_memory(body):
    tracemalloc.start()
    try:
        _, groups = check_submission(body)
    except (InvalidRequest, InvalidGroup):
        groups = []
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 200_000
    for group in groups:
        stored = finish_text(group, None)
        assert json.loads(columns_to_json(stored))["received_version"] is None


@settings(max_examples=EXAMPLES)
@given(body=st.binary(max_size=200))
def test_bytes_that_are_not_columns_are_refused(body):
    for attempt in (body, BODY[:8] + body, BODY[:16] + body):
        try:
            _, groups = check_submission(attempt)
        except (InvalidRequest, InvalidGroup):
            continue
        assert groups == []


def test_what_is_checked_is_what_is_kept():
    _, groups = check_submission(BODY)
    head, count, records = unpack_body(pack_body(b"{}", [finish_text(group, 1) for group in groups]))
    assert (bytes(head), count) == (b"{}  ", 2)
    for record, group, sent in zip(records, groups, GROUPS, strict=True):
        lengths = decode_head(record).lengths
        assert (len(lengths), sum(lengths)) == (group.size, group.token_count)
        kept = decode_group(record)
        for name in ("scores", *COLUMN_ORDER):
            if name != "distill_lengths":
                assert getattr(kept, name) == getattr(sent, name), name
