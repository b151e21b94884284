"""Groups are checked, and the stored text is exactly the received text."""

import json

import msgspec
import pytest

from atropos_api.errors import InvalidGroup, InvalidRequest
from atropos_api.testing import make_group
from atropos_api.wire import WIRE_KEYS, Group
from atropos_api.wire.group_json import check_group, decode_fields, decode_submission, finish_text, restore_text
from atropos_api.wire.group_json_small import check_body


def check(**changes):
    fields = {"tokens": [[1, 2], [3]], "masks": [[-100, 2], [3]], "scores": [0.5, 1]} | changes
    return check_group(
        decode_fields(json.dumps({key: value for key, value in fields.items() if value != "-"}).encode())
    )


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("tokens", {"tokens": "-"}),
        ("tokens", {"tokens": [], "masks": [], "scores": []}),
        ("tokens[1]", {"tokens": [[1, 2], []], "masks": [[1, 2], []]}),
        ("tokens[0][1]", {"tokens": [[1, -2], [3]]}),
        ("tokens[0][1]", {"tokens": [[1, 2.5], [3]]}),
        ("tokens[1][0]", {"tokens": [[1, 2], [2**31]]}),
        ("masks", {"masks": [[1, 2]]}),
        ("masks[1]", {"masks": [[1, 2], [3, 4]]}),
        ("scores", {"scores": [1]}),
        ("scores[1]", {"scores": [1, None]}),
        ("advantages[0]", {"advantages": [[1.0], [1.0]]}),
        ("inference_logprobs", {"inference_logprobs": [[1.0, 1.0]]}),
        ("ref_logprobs[1][0]", {"ref_logprobs": [[1.0, 1.0], ["x"]]}),
        ("messages[0]", {"messages": [{"role": "user", "content": "x"}]}),
        ("messages[0][0]", {"messages": [[{"role": "user"}]]}),
        ("generation_params", {"generation_params": [1]}),
        ("overrides", {"overrides": [{}]}),
        ("overrides[1]", {"overrides": [{}, 3]}),
        ("env_id", {"env_id": "x"}),
        ("env_id", {"env_id": 2**64}),
        ("distill_token_ids[1]", {"distill_token_ids": [[[1], [2]], [[3], [4]]]}),
        ("sampling_masks[1]", {"sampling_masks": [[[1], [2]], [[3], [4]]]}),
        ("sampling_masks[0][1][0]", {"sampling_masks": [[[1], [-2]], [[3]]]}),
        ("sampling_masks[0]", {"sampling_masks": [None, [[3]]]}),
        ("sampling_masks", {"sampling_masks": [[[], list(range(256))], [[3]]]}),
        ("distill_token_ids", {"distill_token_ids": [[[1], list(range(1025))], [[3]]]}),
        ("policy_versions", {"policy_versions": [[[0, 1, 2]]]}),
        ("policy_versions[0]", {"policy_versions": [[[0, 3, 2]], []]}),
        ("policy_versions[0]", {"policy_versions": [[[0, 2, 2], [1, 2, 3]], []]}),
        ("policy_versions[1]", {"policy_versions": [[], [[0, 1, -1]]]}),
        ("policy", {"policy": 5}),
        ("policy", {"policy": ""}),
        ("policy", {"policy": "p" * 201}),
    ],
)
def test_what_no_trainer_could_use_is_refused_by_its_place(field, changes):
    with pytest.raises(InvalidGroup) as caught:
        check(**changes)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "changes",
    [
        {"advantages": []},
        {"overrides": [{}, {"set_advantage_to_zero": True}]},
        {"messages": [[{"role": "tool", "content": [{"type": "text"}], "reward": 1}], []]},
        {"distill_token_ids": [[[1, 2], []], [[3]]], "distill_logprobs": [[[0.1, 0.2], []], [[0.3]]]},
        {"sampling_masks": [[[], [2, 7]], [[]]]},
        {"sampling_masks": [[[], list(range(255))], [[]]]},
        {"sampling_masks": None},
        {"env_id": -1},
        {"inference_logprobs": [[-1.5e-07, 1.0], [0]]},
    ],
)
def test_what_the_contract_allows_is_taken(changes):
    stored = json.loads(finish_text(check(**changes), None))
    for key, value in changes.items():
        assert stored[key] == value


def test_the_stored_text_has_all_keys_in_their_order_and_the_senders_digits():
    body = b'{"scores":[1.50, 2e-3],"masks":[[1,2],[3]] ,"mine":{"b":1},"tokens":[[1, 2],[3]]}'
    stored = finish_text(check_group(decode_fields(body), env_id=7), 4)
    assert list(json.loads(stored)) == [*WIRE_KEYS, "mine", "received_version"]
    assert b'"scores":[1.50, 2e-3]' in stored
    assert b'"env_id":7' in stored


def test_what_was_sealed_can_be_compared_again():
    checked = check()
    assert restore_text(finish_text(checked, 12), "json") == (checked.text,)


def test_a_senders_own_received_version_is_not_believed():
    assert json.loads(finish_text(check(received_version=99), 3))["received_version"] == 3


def test_the_age_of_a_group_is_that_of_its_oldest_token_if_all_are_known():
    assert check(policy_versions=[[[0, 1, 7], [1, 2, 5]], [[0, 1, 9]]]).oldest_version == 5
    assert check(policy_versions=[[[0, 1, 7], [1, 2, None]], []]).oldest_version is None
    assert check().oldest_version is None


def test_a_group_names_its_policy_or_none():
    assert check(policy="student").policy == "student"
    assert json.loads(finish_text(check(policy="student"), 3))["policy"] == "student"
    assert check(policy=None).policy is None
    assert check().policy is None
    assert "policy" not in json.loads(finish_text(check(), 3)), "so that Atropos' own clients see nothing new"


def test_groups_survive_the_way_through_types():
    group = make_group(3, 5, version=2, overrides=[None, {}, {"a": 1}], generation_params={"temperature": 0.8})
    stored = finish_text(check_group(decode_fields(msgspec.json.encode(group)), env_id=1), 6)
    back = msgspec.json.decode(stored, type=Group)
    group.env_id, group.received_version, group.overrides = 1, 6, [{}, {}, {"a": 1}]
    assert back == group


def test_r38a_a_null_among_overrides_is_kept_as_an_empty_object_and_its_neighbours_as_they_were_written():
    text = b'{"tokens":[[1],[2]],"masks":[[1],[2]],"scores":[0,1],"overrides":[ null , {"a": [null, 1.50]}]}'
    for checked in (check_group(decode_fields(text)), check_body(text)):
        assert b'"overrides":[{},{"a": [null, 1.50]}]' in finish_text(checked, None)


@pytest.mark.parametrize("body", [b"", b"[", b"[]", b'{"environment_id": "x", "groups": []}', b"\xff", b"[" * 100_000])
def test_bodies_of_another_shape_are_the_callers_fault(body):
    with pytest.raises(InvalidRequest):
        decode_submission(body)


@pytest.mark.parametrize("count", [2, 4000])
@pytest.mark.parametrize("number", ["3.4028236e38", "-1e39", "1e300", "1" + "0" * 39, "4" + "0" * 38 + ".5", "1" * 60])
@pytest.mark.parametrize("key", ["advantages", "ref_logprobs", "inference_logprobs", "scores"])
def test_a_number_that_is_infinite_for_every_trainer_is_refused(key, number, count):
    """Trainers compute in 32 bits: such a group would end a run, and again each time that it is resumed."""
    place = "scores[0]" if key == "scores" else f"{key}[0][0]"
    values = "[0.0]" if key == "scores" else json.dumps([[0.0] + [-0.5] * (count - 1)])
    group = {"tokens": [[1] * count], "masks": [[1] * count], "scores": [0.5], key: "-"}
    body = json.dumps(group).replace('"-"', values.replace("0.0", number, 1)).encode()
    for check_one in (check_body, lambda text: check_group(decode_fields(text))):
        with pytest.raises(InvalidGroup) as refused:
            check_one(body)
        assert (refused.value.field, refused.value.reason) == (place, "a number that is finite in 32 bits is needed")


@pytest.mark.parametrize("count", [2, 4000])
@pytest.mark.parametrize("number", ["3.4028235e38", "-3.4028234663852886e+38", "3" + "0" * 38, "1e-300", "1" * 38])
def test_the_largest_number_of_32_bits_is_accepted(number, count):
    values = json.dumps([[0.0] + [-0.5] * (count - 1)]).replace("0.0", number, 1)
    group = {"tokens": [[1] * count], "masks": [[1] * count], "scores": [0.5], "advantages": "-"}
    checked = check_body(json.dumps(group).replace('"-"', values).encode())
    assert number.encode() in checked.text


def nested(levels, field="images"):
    fields = {"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [0.5], field: "-"}
    return json.dumps(fields).replace('"-"', "[" * levels + "]" * levels).encode()


@pytest.mark.parametrize("field", ["images", "an own key"])
@pytest.mark.parametrize("check_one", [check_body, lambda body: check_group(decode_fields(body))])
def test_a_group_that_is_nested_too_deep_for_a_trainer_is_refused(check_one, field):
    """A decoder reads fewer levels the deeper in its program it is called, also in the broker."""
    with pytest.raises(InvalidGroup) as refused:
        check_one(nested(257, field))
    assert refused.value.field == field


@pytest.mark.parametrize("check_one", [check_body, lambda body: check_group(decode_fields(body))])
def test_the_deepest_group_can_be_read_deep_in_a_program(check_one):
    text = b'{"batch":[%b]}' % finish_text(check_one(nested(256)), None)

    def read(frames, decode):
        return read(frames - 1, decode) if frames else decode(text)["batch"][0]["scores"]

    assert read(400, msgspec.json.decode) == read(400, json.loads) == [0.5]


def test_brackets_in_a_text_are_no_levels():
    assert check(images="[" * 9999).size == 2
