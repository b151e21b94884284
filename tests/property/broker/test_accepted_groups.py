"""A trainer that decodes by type can read every group that the broker accepts: none makes its batch unreadable.

`ATROPOS_ACCEPTED_EXAMPLES=2000` makes the short run long.
"""

import copy
import json
import os

import hypothesis.strategies as st
import msgspec
from hypothesis import given, settings

from atropos_api.errors import BrokerError
from atropos_api.wire import Group
from atropos_api.wire.group_json import check_group, decode_fields, finish_text
from atropos_api.wire.group_json_small import check_body
from atropos_api.wire.groups import WIRE_KEYS

EXAMPLES = int(os.environ.get("ATROPOS_ACCEPTED_EXAMPLES", "300"))
GROUP = {
    "tokens": [[1, 2, 3], [4, 5, 6]],
    "masks": [[-100, 2, 3], [-100, 5, 6]],
    "scores": [1.0, 0.5],
    "advantages": [[0.5, 0.5, 0.5], [1.0, 1.0, 1.0]],
    "ref_logprobs": [[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]],
    "inference_logprobs": [[1.0, -1.0, -1.0], [1.0, -1.0, -1.0]],
    "messages": [[{"role": "user", "content": "a"}], []],
    "generation_params": {"temperature": 0.8},
    "overrides": [{"sft": True}, None],
    "group_overrides": {"group_size": 2},
    "images": ["x"],
    "env_id": 0,
    "distill_token_ids": [[[1, 2], [3, 4], []], [[5], [6], [7]]],
    "distill_logprobs": [[[-1.0, -2.0], [-1.0, -2.0], []], [[-1.0], [-1.0], [-1.0]]],
    "sampling_masks": [[[], [2, 9], [3]], [[], [], [6]]],
    "policy_versions": [[[1, 3, 7]], [[1, 2, None]]],
    "policy": "default",
    "unknown": {"kept": [1]},
}
JUNK = [
    None, True, False, 0, -1, 3.0, 3.5, -0.0, "", "1", "1.5", "text", [], {}, [[]], [None], [1], {"a": 1},
    2**31, 2**63, -(2**63) - 1, 10**40, 1e308,
]  # fmt: skip

NEEDED = {"tokens", "masks", "scores"}
RARE = {"distill_token_ids", "distill_logprobs", "sampling_masks", "unknown"}
"""Fields whose groups take the slower check of each field."""


def places(value):
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in list(children):
        yield value, key
        yield from places(child)


def change(group, changes):
    for place, junk in changes:
        holders = list(places(group))
        holder, key = holders[place % len(holders)]
        holder[key] = copy.deepcopy(junk)
    return json.dumps(group).encode()


def found_by(check, body):
    """Return the result of a check on a body: the stored text and the facts about it, or the error."""
    try:
        checked = check(body)
    except BrokerError as error:
        return type(error), str(error), error.details
    facts = (checked.size, checked.token_count, checked.env_id, checked.oldest_version)
    kept = json.loads(finish_text(checked, 3))
    return facts, list(kept.items())


changes_of = st.lists(st.tuples(st.integers(0, 10_000), st.sampled_from(JUNK)), max_size=2)


@settings(max_examples=EXAMPLES)
@given(changes_of)
def test_a_group_that_was_accepted_can_be_read_by_a_trainer(changes):
    try:
        checked = check_group(decode_fields(change(copy.deepcopy(GROUP), changes)))
    except BrokerError:
        return
    read = msgspec.json.decode(finish_text(checked, 3), type=Group)
    assert read.env_id == checked.env_id
    assert None not in (read.overrides or ())
    assert len(read.tokens) == checked.size


@settings(max_examples=EXAMPLES)
@given(changes_of, st.sets(st.sampled_from(sorted(GROUP))), st.permutations(sorted(GROUP)) | st.just(WIRE_KEYS))
def test_a_small_group_is_judged_and_kept_as_if_each_field_had_been_looked_at(changes, left_out, order):
    """Both checks give the same values, all keys in their order, and the same error."""
    kept = [key for key in order if key in NEEDED or (key in GROUP and key not in {*left_out, *RARE})]
    plain = {key: copy.deepcopy(GROUP[key]) for key in kept}
    body = b" " + change(plain, changes) + b"\n"
    assert found_by(check_body, body) == found_by(lambda text: check_group(decode_fields(text)), body)


def test_a_small_group_with_versions_keeps_its_keys_in_the_order_of_the_wire():
    """Versions come after all other keys, independent of the body's order."""
    versions = {"policy_versions": [[[1, 3, 7]], [[1, 2, None]]]}
    least = {key: GROUP[key] for key in ("tokens", "masks", "scores")}
    whole = {key: GROUP.get(key) for key in WIRE_KEYS if key not in RARE}
    for group in (least | versions, versions | least, {"tokens": GROUP["tokens"]} | versions | least, whole | versions):
        body = json.dumps(group).encode()
        assert found_by(check_body, body) == found_by(lambda text: check_group(decode_fields(text)), body)
