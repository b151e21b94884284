"""Groups before they are sent: aligned, complete, and rejected only for a reason."""

import json

import msgspec
import numpy as np
import pytest

from atropos_api.client.calls import Calls
from atropos_api.wire.columns import unpack_body
from atropos_api.wire.columns_groups import decode_group, encode_submission
from environments.sdk.config import BaseEnvConfig
from environments.sdk.groups import GroupRules, as_groups, fill_absent, group_items, to_wire
from environments.sdk.reporting import EQUAL_SCORES, Rejection
from environments.sdk.session.tokens_and_masks import SampleLog, SequenceNode

RULES = GroupRules(group_size=2, max_token_length=16, ensure_scores_are_not_same=True)


def raw(scores=(0.0, 1.0), length=3, **more):
    return {"tokens": [[5] * length] * 2, "masks": [[5] * length] * 2, "scores": list(scores), **more}


def convert(**more):
    return to_wire(raw(**more), SampleLog("train"))


def test_a_usable_group_is_not_rejected():
    assert RULES.rejection(convert()) is None


def test_equal_scores_are_rejected_only_where_asked():
    assert RULES.rejection(convert(scores=(1.0, 1.0))) == Rejection(EQUAL_SCORES, "every score is 1")
    lenient = GroupRules(group_size=2, max_token_length=16, ensure_scores_are_not_same=False)
    assert lenient.rejection(convert(scores=(1.0, 1.0))) is None


def test_a_sequence_as_long_as_the_trainers_limit_is_rejected():
    assert RULES.rejection(convert(length=15)) is None
    assert "16 tokens" in RULES.rejection(convert(length=16)).why
    anything = GroupRules(group_size=2, max_token_length=0, ensure_scores_are_not_same=True)
    assert anything.rejection(convert(length=99)) is None


def test_group_overrides_change_the_size_expected():
    """R38: a group may name another size."""
    three = {"tokens": [[5]] * 3, "masks": [[5]] * 3, "scores": [0, 1, 2]}
    assert "3 rollouts where 2 were expected" in RULES.rejection(to_wire(three, SampleLog("train"))).why
    told = to_wire({**three, "group_overrides": {"group_size": 3}}, SampleLog("train"))
    assert RULES.rejection(told) is None


def test_none_as_group_overrides_is_not_an_error():
    assert RULES.rejection(convert(group_overrides=None)) is None


def test_empty_lists_mean_nothing_was_given():
    group = convert(advantages=[], messages=[], overrides=[], ref_logprobs=[])
    assert (group.advantages, group.messages, group.overrides, group.ref_logprobs) == (None, None, None, None)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"overrides": [{}]}, "2 rollouts but 1 entries of overrides"),
        ({"inference_logprobs": [[-1.0] * 3, [-1.0]]}, "rollout 1 has 3 tokens but 1 entries of inference_logprobs"),
        ({"scores": [1.0]}, "1 scores"),
        ({"overrides": ({},)}, "2 rollouts but 1 entries of overrides"),
    ],
)
def test_a_misaligned_group_is_reported_with_the_rollout(broken, words):
    with pytest.raises(ValueError, match=words):
        to_wire({**raw(), **broken}, SampleLog("train"))


def test_what_was_left_out_comes_from_the_rollouts_own_samples():
    nodes = [
        SequenceNode(
            full_text="",
            tokens=[5, token],
            masked_tokens=[-100, token],
            logprobs=[1.0, -0.5],
            policy_versions=[(1, 2, 9)],
            metadata={"generation_params": {"temperature": 0.7}},
        )
        for token in (6, 7)
    ]
    group = to_wire(
        {"tokens": [[5, 6], [5, 7]], "masks": [[-100, 6], [-100, 7]], "scores": [0, 1]}, SampleLog("train", nodes)
    )
    assert group.policy_versions == [[(1, 2, 9)], [(1, 2, 9)]]
    assert group.inference_logprobs == [[1.0, -0.5]] * 2
    assert group.generation_params == {"temperature": 0.7}


def test_single_rollouts_keep_everything_they_carry():
    items = [
        {
            "tokens": [5],
            "masks": [5],
            "scores": float(n),
            "inference_logprobs": [-0.1],
            "policy_versions": [(0, 1, n)],
            "generation_params": {"temperature": 1.0},
            "group_overrides": {"group_size": 2},
            "overrides": {"set_advantage_to_zero": True} if n else None,
        }
        for n in range(2)
    ]
    group = group_items(items)
    assert group["inference_logprobs"] == [[-0.1], [-0.1]]
    assert group["policy_versions"] == [[(0, 1, 0)], [(0, 1, 1)]]
    assert group["overrides"] == [None, {"set_advantage_to_zero": True}]
    assert group["group_overrides"] == {"group_size": 2}
    assert group["generation_params"] == {"temperature": 1.0}
    assert "advantages" not in group


def test_a_schedule_of_group_sizes_holds_from_its_steps_on():
    config = BaseEnvConfig(group_size=6, group_size_schedule="100:4,10:8")
    assert [config.group_size_at(step, 6) for step in (0, 9, 10, 99, 100, 5000)] == [6, 6, 8, 8, 4, 4]
    assert BaseEnvConfig(group_size=6).group_size_at(3, 4) == 6, "without a schedule the size is the environment's own"


def test_groups_of_the_size_before_the_schedule_are_sent_when_the_schedule_has_replaced_it():
    config = BaseEnvConfig(group_size=8, group_size_schedule="10:8")
    rules = GroupRules.from_config(config, first_size=6, max_token_length=0)
    groups = [
        to_wire({"tokens": [[5]] * n, "masks": [[5]] * n, "scores": [0] * n}, SampleLog("train")) for n in (6, 7, 8)
    ]
    assert [rules.full_size(group) for group in groups] == [6, None, 8]


@pytest.mark.parametrize("text", ["8", "0-8", "0:0", "x:8"])
def test_an_invalid_schedule_is_refused_with_the_valid_form(text):
    with pytest.raises(ValueError, match=r"0:8,100:4|sizes at 1"):
        BaseEnvConfig(group_size_schedule=text)


def test_a_schedule_that_gives_a_step_two_sizes_is_refused():
    """The larger one was taken, in whichever order they stood."""
    with pytest.raises(ValueError, match="one step two sizes"):
        BaseEnvConfig(group_size_schedule="0:8,0:4")


def of_size(size):
    return to_wire({"tokens": [[5]] * size, "masks": [[5]] * size, "scores": [0] * size}, SampleLog("train"))


def test_groups_of_any_scheduled_size_may_be_sent_and_of_no_other():
    rules = GroupRules(
        group_size=2, max_token_length=0, ensure_scores_are_not_same=False, scheduled_sizes=frozenset({2, 3})
    )
    refused = [size for size in (1, 2, 3, 4) if rules.rejection(of_size(size))]
    assert refused == [1, 4]


def test_one_advantage_for_a_rollout_stands_for_all_its_tokens():
    assert convert(advantages=[1, 0.5]).advantages == [[1.0] * 3, [0.5] * 3]
    assert convert(advantages=np.array([1, 0.5], np.float32)).advantages == [[1.0] * 3, [0.5] * 3]
    assert convert(advantages=[[1.0, 2.0, 3.0]] * 2).advantages == [[1.0, 2.0, 3.0]] * 2


def test_a_tuple_has_rows_for_absent_rollouts_like_a_list():
    """It kept two rows in a group of three, which the broker refuses."""
    group = convert(policy_versions=([(0, 3, 1)], [(0, 3, 1)]), messages=([], []))
    assert fill_absent(group, 3) == 1
    assert (len(group.policy_versions), len(group.messages), len(group.tokens)) == (3, 3, 3)


def test_rows_that_are_not_rows_are_left_for_the_broker_to_refuse():
    """A mistake in one group must not end the task that submits all groups."""
    group = convert()
    group.ref_logprobs = [1, 2]
    body = encode_submission(1, [group])
    assert b'"ref_logprobs":[1,2]' in body


@pytest.mark.parametrize("form", ["columns", "json"])
def test_numbers_of_numpy_are_sent_as_numbers(form):
    """Groups with them were refused, though arrays of the same numbers are not."""
    logprobs = [[1.0, np.float32(-0.1), np.float64(-0.1)]] * 2
    group = convert(inference_logprobs=logprobs, group_overrides={"group_size": np.int64(2)})
    (sent,) = submitted(group, form)
    assert sent["group_overrides"] == {"group_size": 2}
    assert sent["inference_logprobs"] == [[1.0, float(np.float32(-0.1)), -0.1]] * 2


def submitted(group, form):
    """Return the groups of a submission as JSON holds them."""
    body = Calls(form=form).submit(1, [group], idempotency_key="key").content
    if form == "json":
        return json.loads(body)["groups"]
    _, _, records = unpack_body(body)
    return [msgspec.to_builtins(decode_group(record)) for record in records]


def test_arrays_are_taken_as_lists():
    arrays = {"tokens": np.array([[5, 6], [5, 7]]), "masks": [np.array([-100, 6]), np.array([-100, 7])]}
    logprobs = np.array([[1.0, -0.5], [1.0, -0.25]])
    group = to_wire({**arrays, "scores": np.array([0.0, 1.0]), "inference_logprobs": logprobs}, SampleLog("train"))
    assert (group.tokens, group.masks) == ([[5, 6], [5, 7]], [[-100, 6], [-100, 7]])
    assert (group.scores, group.inference_logprobs) == ([0.0, 1.0], [[1.0, -0.5], [1.0, -0.25]])
    optional = {"ref_logprobs": logprobs, "distill_token_ids": np.zeros((2, 2, 3), int), "distill_logprobs": logprobs}
    assert msgspec.json.encode(to_wire({**arrays, "scores": [0, 1], **optional}, SampleLog("train")))


@pytest.mark.parametrize(
    ("no_group", "words"),
    [
        ({"scores": [1.0]}, "this one has no tokens and no masks"),
        ({"tokens": [[5]], "masks": [[5]], "scores": [None]}, r"scores\[0\] is None, which is not a number"),
        ({"tokens": [[5]], "masks": [[5]], "scores": {3: 0.5}}, r"scores is a dict, \{3: 0.5\}; give a list"),
        ({"tokens": [[5]], "masks": [[5]], "scores": {1.0}}, "scores is a set"),
        ({"tokens": ["a"], "masks": "a", "scores": [1.0]}, "masks is a str"),
        (
            {"tokens": [[5]], "masks": [[5]], "scores": [1.0], "overrides": [1]},
            r"overrides\[0\] is 1; give a dictionary",
        ),
        ({"tokens": [[5]], "masks": [[5]], "scores": [1.0], "group_overrides": [1]}, r"group_overrides is \[1\]; give"),
        (
            {"tokens": [[5]], "masks": [[5]], "scores": [1.0], "generation_params": "t"},
            "generation_params is 't'; give",
        ),
        (5, "not 5"),
        ("text", "not 'text'"),
    ],
)
def test_what_is_no_group_is_named(no_group, words):
    with pytest.raises((TypeError, ValueError), match=words):
        [to_wire(one, SampleLog("train")) for one in as_groups(no_group)]
