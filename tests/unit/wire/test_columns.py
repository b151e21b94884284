"""The columns form matches its description, invalid bodies are refused, and clients get the same groups back."""

import json
import re
import struct
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest

from atropos_api.errors import InvalidGroup, InvalidRequest
from atropos_api.testing import make_group
from atropos_api.wire import Group
from atropos_api.wire.columns import pack_body, unpack_body
from atropos_api.wire.columns_check import check_submission
from atropos_api.wire.columns_groups import (
    NotColumnar,
    columns_to_json,
    decode_batch,
    decode_group,
    encode_group,
    encode_submission,
    json_to_columns,
)
from atropos_api.wire.group_json import check_group, decode_fields, finish_text

DESCRIPTION = Path(__file__).parents[3] / "docs/reference/columns.md"
TOKENS, MASKS, LOGPROBS = [1, 2, 3], [-100, 2, 3], [1.0, -0.5, -0.25]


def find_block(kind):
    return re.search(rf"```{kind}\n(.*?)```", DESCRIPTION.read_text(), re.DOTALL)[1]


def example_bytes():
    return b"".join(bytes.fromhex(line[6:54]) for line in find_block("hexdump").splitlines())


def padded(head):
    text = json.dumps(head).encode()
    return text + b" " * (-len(text) % 4)


def write(*, lengths=(2, 1), columns=("tokens", "masks", "inference_logprobs"), values=None, body=None, **fields):
    """Write a submission of one group byte by byte; `fields` are added to its head, or replace parts of it."""
    held = {"tokens": TOKENS, "masks": MASKS, "inference_logprobs": LOGPROBS} | (values or {})
    fields = {key: value for key, value in ({"scores": [0.5, 1]} | fields).items() if value != "-"}
    ids = {"tokens", "masks", "distill_lengths", "distill_token_ids"}
    data = b"".join(struct.pack(f"<{len(held[name])}{'i' if name in ids else 'f'}", *held[name]) for name in columns)
    head = padded({"lengths": lengths, "columns": columns, "fields": fields})
    record = struct.pack("<II", len(head), len(data)) + head + data
    outer = padded(body or {"environment_id": 3})
    return b"ATRCOLS\x01" + struct.pack("<II", len(outer), 1) + outer + record


def test_the_example_of_the_description_is_what_our_client_sends():
    group = msgspec.convert(json.loads(find_block("json"))["groups"][0], Group)
    assert encode_submission(3, [group]) == example_bytes()


def test_the_example_of_the_description_is_taken_and_means_what_it_says():
    env_id, (group,) = check_submission(example_bytes())
    assert (env_id, group.size, group.token_count, group.oldest_version, group.form) == (3, 2, 5, 7, "columns")
    stored = json.loads(columns_to_json(finish_text(group, 9)))
    for key, value in json.loads(find_block("json"))["groups"][0].items():
        assert stored[key] == value
    assert (stored["env_id"], stored["received_version"], stored["messages"]) == (3, 9, None)


DISTILLED = ("tokens", "masks", "distill_lengths", "distill_token_ids", "distill_logprobs")
NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value", "changes"),
    [
        ("tokens[1][0]", -7, {"values": {"tokens": [1, 2, -7]}}),
        ("tokens", None, {"columns": ("masks",)}),
        ("tokens", None, {"tokens": [[1, 2], [3]]}),
        ("masks", None, {"columns": ("tokens",)}),
        ("masks[0]", 1, {"columns": ("tokens",), "masks": [[1], [2, 3]]}),
        ("inference_logprobs[0][1]", "nan", {"values": {"inference_logprobs": [1.0, NAN, NAN]}}),
        ("inference_logprobs[1][0]", "-inf", {"values": {"inference_logprobs": [1.0, 1.0, -INFINITY]}}),
        ("inference_logprobs", 2, {"values": {"inference_logprobs": [1.0, 1.0]}}),
        ("columns", 10, {"values": {"inference_logprobs": [1.0] * 4}}),
        (
            "masks",
            2,
            {"lengths": (2, 2), "columns": ("tokens", "masks"), "values": {"tokens": [1] * 4, "masks": [2] * 2}},
        ),
        ("lengths", "[]", {"lengths": ()}),
        ("columns", "masks, tokens", {"columns": ("masks", "tokens")}),
        ("columns", "tokens, tokens", {"columns": ("tokens", "tokens")}),
        ("columns", "tokens, mine", {"columns": ("tokens", "mine"), "values": {"mine": [1.0] * 3}}),
        ("scores", None, {"scores": "-"}),
        ("scores", 1, {"scores": [1]}),
        ("scores[1]", None, {"scores": [1, None]}),
        ("advantages[1]", 2, {"advantages": [[1, 1], [1, 1]]}),
        ("messages[0][0]", "{'role': 'user'}", {"messages": [[{"role": "user"}]]}),
        ("policy_versions[0]", "[0, 3, 2]", {"policy_versions": [[[0, 3, 2]], []]}),
        ("policy", "7", {"policy": 7}),
        ("distill_lengths", None, {"columns": ("tokens", "masks", "distill_token_ids")}),
        ("distill_lengths", -1, {"columns": DISTILLED[:4], "values": {"distill_lengths": [2, -1, 1]}}),
        (
            "distill_token_ids",
            1025,
            {"columns": DISTILLED[:4], "values": {"distill_lengths": [0, 1025, 0], "distill_token_ids": [3] * 1025}},
        ),
        (
            "distill_token_ids[1]",
            -4,
            {"columns": DISTILLED[:4], "values": {"distill_lengths": [1, 0, 1], "distill_token_ids": [3, -4]}},
        ),
        (
            "distill_logprobs",
            None,
            {
                "columns": DISTILLED[:4],
                "values": {"distill_lengths": [1, 0, 1], "distill_token_ids": [3, 4]},
                "distill_logprobs": [[[0.1], []], [[0.1]]],
            },
        ),
    ],
)
def test_what_no_trainer_could_use_is_refused_by_its_place_and_value(field, value, changes):
    values = {"distill_token_ids": [], "distill_logprobs": []} | changes.pop("values", {})
    with pytest.raises(InvalidGroup) as caught:
        check_submission(write(values=values, **changes))
    assert (caught.value.field, caught.value.details["value"]) == (f"groups[0].{field}", value)


GOOD = write()


@pytest.mark.parametrize(
    ("reason", "body"),
    [
        ("it has 0 bytes", b""),
        ("it begins with", b"ATRCOLS\x02" + GOOD[8:]),
        ("not a multiple of 4", GOOD[:8] + struct.pack("<I", 21) + GOOD[12:]),
        ("4294967292 bytes", GOOD[:8] + struct.pack("<I", 2**32 - 4) + GOOD[12:]),
        ("the prefix of groups\\[1\\] takes 8 bytes, 0 are left", GOOD[:12] + struct.pack("<I", 2) + GOOD[16:]),
        ("the columns of groups\\[0\\] takes", GOOD[:-4]),
        ("16385 groups, 16384 may be sent at once", GOOD[:12] + struct.pack("<I", 16385) + GOOD[16:]),
        ("4 bytes follow the last of 1 groups", GOOD + bytes(4)),
        ("wrong shape", write(body={"environment_id": "x"})),
        ("wrong shape", write(body={"environment_id": 1, "mine": 1})),
        ("head", write(lengths=(2, 0))),
        ("head", write(lengths=(2, 2**40))),
        ("head", GOOD.replace(b'"lengths"', b'"lengthz"')),
        ("head", GOOD.replace(b'"lengths"', b'"leng\xffhs"')),
    ],
)
def test_a_body_that_is_not_what_it_says_is_refused(reason, body):
    with pytest.raises(InvalidRequest, match=reason):
        check_submission(body)


def test_lengths_that_lie_cost_no_memory():
    with pytest.raises(InvalidGroup, match=r"lengths say"):
        check_submission(write(lengths=(2**31 - 1,) * 1000))


def test_unknown_keys_survive_and_the_brokers_own_are_not_taken_from_outside():
    _, (group,) = check_submission(write(mine={"b": [1.5, None]}, lengths_=7, env_id=99, received_version=99))
    stored = json.loads(columns_to_json(finish_text(group, None)))
    assert (stored["mine"], stored["lengths_"], stored["env_id"]) == ({"b": [1.5, None]}, 7, 3)
    assert stored["received_version"] is None


def test_numbers_that_no_float32_equals_stay_text_in_the_head():
    text = b'{"tokens":[[1]],"masks":[[1]],"scores":[0.1],"inference_logprobs":[[-0.1]],"advantages":[[-0.5]]}'
    stored = finish_text(check_group(decode_fields(text)), 1)
    record = json_to_columns(stored)
    assert b'"inference_logprobs":[[-0.1]]' in record
    assert b'"columns":["tokens","masks","advantages"]' in record
    assert columns_to_json(record) == stored


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"inference_logprobs": [[0.1] * 5] * 3},
        {"advantages": []},
        {"distill_token_ids": [[[1, 2], [], [3], [4], [5]]] * 3, "distill_logprobs": [[[1, 2], [], [3], [4], [5]]] * 3},
        {"distill_logprobs": [[[0.1], [], [], [], []]] * 3},
        {"sampling_masks": [[[], [], [3, 1], [4], [5, 6, 7]]] * 3},
        {"messages": [[{"role": "user", "content": "é"}]] * 3, "overrides": [None, {"a": 1}, {}], "env_id": -1},
    ],
)
def test_groups_survive_the_way_through_our_own_client(changes):
    group = make_group(3, 5, version=2, **changes)
    (record,) = unpack_body(encode_submission(1, [group]))[2]
    assert decode_group(record) == group
    arrays = decode_group(record, arrays=True)
    assert [row.tolist() for row in arrays.tokens] == group.tokens
    assert np.shares_memory(arrays.tokens[0], np.frombuffer(record.data, np.int32))


@pytest.mark.parametrize("changes", [{"masks": [[1] * 4, [1] * 6, [1] * 5]}, {"ref_logprobs": [[1.0] * 14, [1.0]]}])
def test_ragged_rows_do_not_pass_as_columns_of_the_right_length(changes):
    with pytest.raises(InvalidGroup):
        check_submission(encode_submission(1, [make_group(3, 5, **changes)]))


@pytest.mark.parametrize("tokens", [[[1, 2.5]], [[2**31, 1]], [["a", 1]], [], [[]]])
def test_groups_that_columns_cannot_say_are_told_apart(tokens):
    with pytest.raises(NotColumnar):
        encode_group(make_group(1, 2, tokens=tokens))


def test_a_batch_is_read_as_lists_or_as_arrays():
    groups = [make_group(2, 3), make_group(1, 4)]
    body = pack_body(b'{"number":4,"run_id":"r"}', [encode_group(group) for group in groups])
    batch = decode_batch(body)
    assert (batch.number, batch.run_id, batch.groups) == (4, "r", groups)
    assert decode_batch(body, arrays=True).groups[1].inference_logprobs[0].dtype == np.float32


def test_a_body_of_groups_that_are_nothing_costs_no_memory():
    count = 16384
    body = GOOD[:8] + struct.pack("<II", 24, count) + padded({"environment_id": 3}) + bytes(8 * count)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match=r"groups\[0\]\.head"):
            check_submission(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20_000
