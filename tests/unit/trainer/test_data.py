"""From broker groups to training arrays: alignment of labels and logprobs, omissions, and errors."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal
from unittest.mock import Mock

import pytest
import torch

from atropos_api.wire import Batch, Group
from environments.sdk.groups import fill_absent
from example_trainer.config import TrainingConfig
from example_trainer.data import DataSettings, TrainingBatch, prepare_batch, report_logprobs
from example_trainer.errors import BadBatch, MissingLogprobs
from example_trainer.group_sequences import find_places, find_temperature, leave_out_absent
from example_trainer.objective.advantages import AdvantageSettings, OverlongSettings, overlong_penalty
from example_trainer.objective.losses import Targets
from example_trainer.state import Progress
from example_trainer.step.train_step import TrainStep

SETTINGS = DataSettings(max_tokens=16, advantages=AdvantageSettings(norm="none"))


def group(scores: tuple[float, ...] = (1.0, 0.0), **fields: Any) -> Group:
    size = len(scores)
    values: dict[str, Any] = {
        "tokens": [[5, 6, 7, 8 + at] for at in range(size)],
        "masks": [[-100, -100, 7, 8 + at] for at in range(size)],
        "scores": list(scores),
        "inference_logprobs": [[1.0, 1.0, -0.5, -0.25 - at] for at in range(size)],
        "env_id": 3,
    }
    return Group(**(values | fields))


def prepare(*groups: Group, settings: DataSettings = SETTINGS) -> TrainingBatch:
    return prepare_batch(Batch(number=4, run_id="r", groups=list(groups)), settings)


def test_labels_logprobs_and_positions_belong_to_the_same_token() -> None:
    batch = prepare(group())
    assert batch.targets.labels.tolist() == [7, 8, 7, 9]
    assert batch.targets.rollout_logprobs.tolist() == [-0.5, -0.25, -0.5, -1.25]
    assert [row.targets.tolist() for row in batch.rows] == [[2, 3], [2, 3]]
    assert [row.first_target for row in batch.rows] == [0, 2]
    assert batch.targets.sequences.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("norm", ["none", "group", "batch"])
def test_absent_members_change_nothing_but_their_count(norm: Literal["none", "group", "batch"]) -> None:
    """The baseline and the divisor of a group that was closed at three of five are those of the three."""
    settings = replace(SETTINGS, advantages=AdvantageSettings(norm=norm))
    three = group((1.0, 0.0, 0.5))
    closed = group((1.0, 0.0, 0.5), overrides=[None, {}, None])
    assert fill_absent(closed, 5) == 2
    batch, absent = leave_out_absent(Batch(number=4, run_id="r", groups=[closed, group()]))
    seen = prepare_batch(batch, settings, absent=absent)
    wanted = prepare(three, group(), settings=settings)
    assert torch.equal(seen.targets.advantages, wanted.targets.advantages)
    assert (seen.rewards, seen.response_lengths, seen.advantages) == (
        wanted.rewards,
        wanted.response_lengths,
        wanted.advantages,
    )
    assert seen.counts == wanted.counts | {"absent": 2}


def test_each_token_of_a_sequence_carries_its_advantage() -> None:
    assert prepare(group()).targets.advantages.tolist() == [0.5, 0.5, -0.5, -0.5]


def test_a_first_token_that_is_trained_is_left_out_since_nothing_predicts_it() -> None:
    batch = prepare(group(masks=[[5, 6, 7, 8], [-100, 6, 7, 9]], inference_logprobs=[[-1.0] * 4, [-1.0] * 4]))
    assert [row.targets.tolist() for row in batch.rows] == [[1, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize(
    "logprobs",
    [None, [[1.0, 1.0, 1.0, -0.2]] * 2, [[-0.5, -0.2]] * 2, [[1.0, 1.0, float("nan"), -0.2]] * 2],
    ids=["none", "placeholder at a trained token", "too short", "not a number"],
)
def test_a_trained_token_without_logprob_stops_the_run_and_names_environment_and_sequence(logprobs: Any) -> None:
    with pytest.raises(MissingLogprobs, match="GRPO requires inference_logprobs for importance sampling") as caught:
        prepare(group(inference_logprobs=logprobs))
    assert "environment 3, sequence 0" in str(caught.value)
    assert "--openai.server_type vllm" in str(caught.value)


def test_one_sequence_without_logprobs_among_many_is_found() -> None:
    with pytest.raises(MissingLogprobs, match="sequence 1"):
        prepare(group(inference_logprobs=[[1.0, 1.0, -0.5, -0.25], [1.0, 1.0, 1.0, 1.0]]))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 1.0),
        ({"group_overrides": {"temperature": 0.5}}, 0.5),
        ({"group_overrides": {"temperature": 0.5}, "generation_params": {"temperature": 0.7}}, 0.7),
        ({"generation_params": {"temperature": 0.7}, "overrides": [{"temperature": 0.9}, None]}, 0.9),
        ({"generation_params": {"temperature": 0.7}, "overrides": [{}, {}]}, 0.7),
        ({"generation_params": {"temperature": 0.7}, "overrides": [None, None]}, 0.7),
    ],
)
def test_temperatures_come_from_override_then_generation_then_group_then_one(
    fields: dict[str, Any], expected: float
) -> None:
    assert find_temperature(group(**fields), 0) == expected
    assert prepare(group(**fields)).targets.temperatures[0].item() == pytest.approx(expected)


def test_r24_a_group_sampled_from_a_truncated_distribution_marks_its_tokens() -> None:
    """Such tokens get importance weights, also in losses that give others none."""
    marked = group(generation_params={"temperature": 1.0, "top_p": 0.9, "truncated_sampling": True})
    targets = prepare(group(), marked).targets
    assert targets.truncated_sampling is not None
    assert targets.truncated_sampling.tolist() == [False] * 4 + [True] * 4
    assert prepare(group()).targets.truncated_sampling is None


def test_greedy_rollouts_are_refused_because_they_have_no_distribution() -> None:
    with pytest.raises(BadBatch, match="temperature 0"):
        prepare(group(generation_params={"temperature": 0.0}))


def test_groups_of_equal_rewards_are_dropped_before_the_forward_but_counted_in_the_reward() -> None:
    batch = prepare(group((1.0, 1.0)), group((0.0, 1.0)))
    assert len(batch.rows) == 2
    assert batch.counts["no_signal"] == 2
    assert batch.rewards == [1.0, 1.0, 0.0, 1.0]
    assert batch.response_lengths == [2, 2, 2, 2]


def test_r34_a_batch_without_any_signal_has_no_rows() -> None:
    batch = prepare(group((1.0, 1.0)), group((0.0,)))
    assert batch.rows == []
    assert len(batch.targets) == 0


def test_r38_a_zeroed_sequence_stays_in_the_baseline_and_leaves_the_forward() -> None:
    batch = prepare(group((3.0, 0.0, 0.0), overrides=[{"set_advantage_to_zero": True}, None, {}]))
    assert batch.targets.advantages.tolist() == [-1.0] * 4
    assert batch.counts["zeroed"] == 1


def test_r38_an_all_masked_sequence_stays_in_the_baseline_and_leaves_the_forward() -> None:
    masks = [[-100] * 4, [-100, -100, 7, 9]]
    batch = prepare(group((1.0, 0.0), masks=masks))
    assert batch.targets.advantages.tolist() == [-0.5, -0.5]
    assert batch.counts["no_trained_token"] == 1


def test_a_sequence_beyond_the_limit_keeps_its_place_in_the_baseline_and_is_counted() -> None:
    long = list(range(20))
    batch = prepare(
        group(
            (1.0, 0.0),
            tokens=[long, [5, 6, 7, 8]],
            masks=[[-100, *long[1:]], [-100, -100, 7, 8]],
            inference_logprobs=[[-1.0] * 20, [-1.0] * 4],
        )
    )
    assert batch.counts["overlong"] == 1
    assert batch.targets.advantages.tolist() == [-0.5, -0.5]


def test_a_sequence_beyond_the_limit_is_trained_as_far_as_that_where_it_is_masked() -> None:
    long = list(range(20))
    batch = prepare(
        group(
            (1.0, 0.0),
            tokens=[long, [*range(19), 3]],
            masks=[[-100, *long[1:]], [-100] * 19 + [3]],
            inference_logprobs=[[-0.1 * place for place in range(20)], [-1.0] * 20],
        ),
        settings=replace(SETTINGS, max_tokens=5, cuts_overlong=True),
    )
    assert (batch.counts["overlong"], batch.counts["no_trained_token"]) == (1, 1)
    (row,) = batch.rows
    assert (row.tokens.tolist(), row.targets.tolist()) == ([0, 1, 2, 3, 4], [1, 2, 3, 4])
    assert batch.targets.labels.tolist() == [1, 2, 3, 4]
    assert batch.targets.rollout_logprobs.tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4])
    assert batch.response_lengths == [19, 1]


def test_a_sequence_of_which_a_cut_leaves_nothing_to_train_is_counted_once() -> None:
    """`--stop-on left_out` adds both causes up: a share of 0.3 that counted twice ended a run at the limit of 0.5."""
    long = group(
        (1.0, 0.0), tokens=[list(range(20))] * 2, masks=[[-100] * 19 + [19]] * 2, inference_logprobs=[[-1.0] * 20] * 2
    )
    batch = prepare(long, settings=replace(SETTINGS, max_tokens=5, cuts_overlong=True))
    assert sum(batch.counts.values()) == len(batch.rewards) == 2


@pytest.mark.parametrize("value", ["hot", float("nan"), float("inf"), -1.0])
def test_a_temperature_that_is_none_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(BadBatch, match=r"environment 3, sequence 1 .* temperature"):
        prepare(group(overrides=[None, {"temperature": value}]))


def test_each_token_carries_the_temperature_of_its_own_sequence() -> None:
    batch = prepare(group(generation_params={"temperature": 0.7}, overrides=[{"temperature": 0.9}, None]))
    assert batch.targets.temperatures.tolist() == pytest.approx([0.9, 0.9, 0.7, 0.7])


OVERLONG = OverlongSettings(limit=4, buffer=2, penalty=1.0)


@pytest.mark.parametrize(("length", "penalty"), [(1, 0.0), (2, 0.0), (3, -0.5), (4, -1.0), (9, -1.0)])
def test_the_penalty_for_length_grows_over_the_buffer_before_the_limit(length: int, penalty: float) -> None:
    assert overlong_penalty(length, OVERLONG) == penalty


def answers(*lengths: int, scores: tuple[float, ...]) -> Group:
    rows = [[5, *range(10, 10 + length)] for length in lengths]
    return group(
        scores,
        tokens=rows,
        masks=[[-100, *row[1:]] for row in rows],
        inference_logprobs=[[1.0] + [-0.5] * length for length in lengths],
    )


def test_the_penalty_changes_advantages_and_not_the_rewards_that_are_logged() -> None:
    settings = DataSettings(max_tokens=16, advantages=AdvantageSettings(norm="none"), overlong=OVERLONG)
    batch = prepare(answers(1, 4, scores=(1.0, 1.0)), settings=settings)
    assert batch.targets.advantages.tolist() == [0.5, -0.5, -0.5, -0.5, -0.5]
    assert batch.rewards == [1.0, 1.0]
    assert batch.overlong_penalty == -0.5


def test_p3_a_masked_cut_off_answer_keeps_its_place_in_the_baseline_and_leaves_forward_and_denominator() -> None:
    settings = DataSettings(
        max_tokens=16, advantages=AdvantageSettings(norm="none"), overlong=OverlongSettings(limit=4, mask=True)
    )
    batch = prepare(answers(1, 4, 2, scores=(3.0, 0.0, 0.0)), settings=settings)
    assert batch.counts["truncated"] == 1
    assert batch.targets.advantages.tolist() == [2.0, -1.0, -1.0]
    assert len(batch.rows) == 2


def test_a_cut_off_answer_that_is_masked_is_not_trained_where_longer_sequences_are_cut() -> None:
    settings = DataSettings(
        max_tokens=4,
        cuts_overlong=True,
        advantages=AdvantageSettings(norm="none"),
        overlong=OverlongSettings(limit=4, mask=True),
    )
    batch = prepare(answers(1, 4, scores=(1.0, 0.0)), settings=settings)
    assert (batch.counts["truncated"], batch.counts["overlong"]) == (1, 0)
    assert batch.targets.advantages.tolist() == [0.5]


def test_reference_logprobs_of_the_environment_are_taken_where_it_sends_them() -> None:
    given = [[0.0, 0.0, -1.5, -2.5], []]
    targets = prepare(group(ref_logprobs=given)).targets
    assert targets.reference_logprobs is not None
    assert targets.reference_logprobs[:2].tolist() == [-1.5, -2.5]
    assert targets.reference_logprobs[2:].isnan().all()
    assert prepare(group()).targets.reference_logprobs is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ref_logprobs": [[-1.0], [-1.0] * 4]}, "ref_logprobs: 1 values for 4 tokens"),
        ({"ref_logprobs": [[-1.0, -1.0, float("nan"), -1.0], [-1.0] * 4]}, "nan at trained position 2"),
        ({"advantages": [[1.0, 2.0], [1.0]]}, "advantages: 2 values for 4 tokens"),
        ({"distill_token_ids": [[[1]] * 3] * 2, "distill_logprobs": [[[-1.0]] * 3] * 2}, "3 distill_token_ids"),
        (
            {"distill_token_ids": [[[1]] * 4] * 2, "distill_logprobs": [[[-1.0, -2.0]] * 4] * 2},
            "1 distill_token_ids but 2 distill_logprobs",
        ),
        ({"sampling_masks": [[[7]] * 3] * 2}, "3 sampling_masks for 4 tokens"),
        (
            {"sampling_masks": [[[], [], [6], []]] * 2},
            "at position 2 has the token 7 that was drawn there 0 times",
        ),
        ({"sampling_masks": [[[], [], [7, 3, 7], []]] * 2}, "has the token 7 that was drawn there 2 times"),
        (
            {"sampling_masks": [[[], [], [7, 3], [8, 3, 5, 3]]] * 2},
            "mask at position 3 has the token 3 more than once",
        ),
        ({"tokens": [[5, 6, 7, 8], [99, 6, 7, 9]]}, "tokens has the id 99, and the policy has 40 tokens"),
        ({"sampling_masks": [[[], [], [7, 40], []]] * 2}, "sampling_masks has the id 40"),
        (
            {"distill_token_ids": [[[41]] * 4] * 2, "distill_logprobs": [[[-1.0]] * 4] * 2},
            "distill_token_ids has the id 41",
        ),
    ],
)
def test_what_an_environment_supplies_must_fit_its_tokens(fields: dict[str, Any], words: str) -> None:
    settings = DataSettings(max_tokens=16, advantages=AdvantageSettings(), teacher=True, vocabulary=40)
    with pytest.raises(BadBatch, match=words):
        prepare(group(**fields), settings=settings)


@pytest.mark.parametrize("others", [0, 1])
def test_the_run_goes_on_without_groups_that_cannot_be_trained_if_it_is_asked_to(
    others: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a resume would get the very batch again that has ended the run."""
    bare, foreign, good = group(inference_logprobs=None), group(tokens=[[5, 6, 7, 8], [99, 6, 7, 9]]), group()
    settings = replace(SETTINGS, vocabulary=40)
    with pytest.raises(MissingLogprobs, match="or go on without such groups by --unusable-groups leave_out"):
        prepare(bare, settings=settings)
    batch = prepare(bare, *[good] * others, foreign, settings=replace(settings, leaves_out_unusable=True))
    assert (batch.counts["unusable"], len(batch.rows)) == (4, 2 * others)
    assert [row.group for row in batch.rows] == [1, 1][: 2 * others]
    assert batch.rewards == [1.0, 0.0] * (2 + others), "their rewards are reported all the same"
    assert batch.response_lengths == prepare(good).response_lengths * (2 + others), "and so are their lengths"
    assert batch.advantages == [[0.0, 0.0], *[[0.5, -0.5]] * others, [0.0, 0.0]]
    assert "a group is left out: environment 3, sequence 1 of its group: tokens has the id 99" in caplog.text
    if others:
        assert torch.equal(batch.targets.advantages, prepare(good).targets.advantages)


def test_a_teachers_tokens_lie_at_the_tokens_they_are_about() -> None:
    ids = [[[1, 2], [1, 2], [7, 3], [8]], [[], [], [7], [9]]]
    logprobs = [[[-1.0, -2.0], [-1.0, -2.0], [-0.1, -3.0], [-0.2]], [[], [], [-0.3], [-0.4]]]
    settings = DataSettings(max_tokens=16, advantages=AdvantageSettings(norm="none"), teacher=True)
    targets = prepare(group(distill_token_ids=ids, distill_logprobs=logprobs), settings=settings).targets
    assert targets.teacher_ids is not None
    assert targets.teacher_logprobs is not None
    assert targets.teacher_ids.tolist() == [[7, 3], [8, 0], [7, 0], [9, 0]]
    nothing = float("-inf")
    expected = [[-0.1, -3.0], [-0.2, nothing], [-0.3, nothing], [-0.4, nothing]]
    torch.testing.assert_close(targets.teacher_logprobs, torch.tensor(expected))
    assert prepare(group(distill_token_ids=ids, distill_logprobs=logprobs)).targets.teacher_ids is None


def masks_of(targets: Targets) -> list[list[int]]:
    assert targets.mask_ids is not None
    assert targets.mask_bounds is not None
    ids, bounds = targets.mask_ids.tolist(), targets.mask_bounds.tolist()
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(ids), len(targets) + 1)
    return [ids[begin:end] for begin, end in pairwise(bounds)]


def test_sampling_masks_lie_at_their_tokens_and_what_has_one_is_not_marked_as_truncated() -> None:
    masks = [[[], [], [7, 3, 2], []], [[], [], [7], [9, 1]]]
    truncated = {"temperature": 1.0, "top_p": 0.9, "truncated_sampling": True}
    targets = prepare(group(sampling_masks=masks, generation_params=truncated), group()).targets
    assert masks_of(targets) == [[7, 3, 2], [], [7], [9, 1], *[[]] * 4]
    assert targets.truncated_sampling is not None
    assert targets.truncated_sampling.tolist() == [False, True, False, False, *[False] * 4]
    assert prepare(group(sampling_masks=[[[]] * 4] * 2)).targets.mask_ids is None


def test_a_sequence_that_is_cut_keeps_the_masks_of_what_is_left() -> None:
    settings = replace(SETTINGS, max_tokens=3, cuts_overlong=True)
    targets = prepare(group(sampling_masks=[[[], [], [7, 3], [8]], [[], [], [7], [9]]]), settings=settings).targets
    assert masks_of(targets) == [[7, 3], [7]]


def test_p27_a_group_is_judged_whole_where_the_environment_supplies_advantages() -> None:
    """A sequence with advantage 0 counts in the average of a group with other advantages; a group of zeros does not."""
    mixed = prepare(group((1.0, 1.0), advantages=[[0.0], [2.0]]))
    assert (len(mixed.rows), mixed.counts["no_signal"]) == (2, 0)
    assert prepare(group((1.0, 0.0), advantages=[[0.0], [0.0]])).counts["no_signal"] == 2


def test_a_teacher_has_something_to_teach_where_rewards_are_alike() -> None:
    fields = {"distill_token_ids": [[[7]] * 4] * 2, "distill_logprobs": [[[-1.0]] * 4] * 2}
    settings = DataSettings(max_tokens=16, advantages=AdvantageSettings(), teacher=True)
    batch = prepare(group((1.0, 1.0), **fields), settings=settings)
    assert len(batch.rows) == 2
    assert batch.targets.advantages.tolist() == [0.0] * 4


def test_advantages_from_the_environment_win_over_scores() -> None:
    batch = prepare(group((1.0, 1.0), advantages=[[0.0, 0.0, 2.0, 3.0], [-4.0]]))
    assert batch.targets.advantages.tolist() == [2.0, 3.0, -4.0, -4.0]


def test_an_empty_advantage_list_means_none_are_supplied() -> None:
    assert prepare(group(advantages=[[], []])).targets.advantages.tolist() == [0.5, 0.5, -0.5, -0.5]


def test_versions_cover_the_tokens_of_their_spans_and_unknown_ones_fall_back_to_the_arrival() -> None:
    spans = [[(2, 3, 8), (3, 4, 9)], [(2, 4, None)]]
    batch = prepare(group(policy_versions=spans, received_version=10))
    assert batch.targets.versions.tolist() == [8, 9, -1, -1]
    assert batch.targets.version_bounds.tolist() == [8, 9, 10, 10]


def test_a_mask_that_is_neither_hidden_nor_the_token_is_refused() -> None:
    with pytest.raises(BadBatch, match="position 2 is 1"):
        prepare(group(masks=[[-100, -100, 1, 1], [-100, -100, 7, 9]]))


def test_shuffled_advantages_are_the_same_values_at_other_sequences_each_batch_anew() -> None:
    groups = [group((float(at), float(at * at), 5.0)) for at in range(8)]
    plain = prepare(*groups)
    shuffled = prepare(
        *groups, settings=DataSettings(max_tokens=16, advantages=AdvantageSettings(), shuffle_advantages=True)
    )
    again = prepare(
        *groups, settings=DataSettings(max_tokens=16, advantages=AdvantageSettings(), shuffle_advantages=True)
    )
    normal = prepare(*groups, settings=DataSettings(max_tokens=16, advantages=AdvantageSettings()))
    assert torch.equal(shuffled.targets.advantages, again.targets.advantages)
    assert not torch.equal(shuffled.targets.advantages, normal.targets.advantages)
    torch.testing.assert_close(shuffled.targets.advantages.sort().values, normal.targets.advantages.sort().values)
    assert torch.equal(shuffled.targets.labels, plain.targets.labels)


def test_the_first_batch_says_that_logprobs_are_there(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        report_logprobs(Batch(number=1, run_id="r", groups=[group()]))
    assert "inference_logprobs found in batch (sample len: 4)" in caplog.text


def test_a_rank_s_groups_are_found_in_the_whole_batch_and_equal_ones_each_have_a_place() -> None:
    other = group(tokens=[[1, 2, 3, 4], [1, 2, 3, 5]])
    whole = [group(), other, group((1.0, 0.0, 0.5)), group()]
    assert find_places([other, group((1.0, 0.0, 0.5))], whole) == [1, 2]
    assert find_places([group(), group()], whole) == [0, 3]
    lost = group(tokens=[[9, 9, 9, 9], [9, 9, 9, 8]])
    assert find_places([lost, other], whole) == [4, 1]


def test_a_prepared_share_of_a_batch_knows_the_places_of_its_groups() -> None:
    groups = [group(tokens=[[5 + n, 6, 7, 8], [5 + n, 6, 7, 9]]) for n in range(4)]
    whole = Batch(number=4, run_id="r", groups=groups)
    config = TrainingConfig(model_name="m", advantage_norm="none")
    learner = Mock()
    learner.policy.hf_config.get_text_config.return_value.vocab_size = 40
    step = TrainStep(config=config, progress=Progress(), learner=learner, alignment=Mock())
    assert list(step.prepare(whole).places) == [0, 1, 2, 3]
    assert list(step.prepare(Batch(number=4, run_id="r", groups=[groups[1], groups[3]]), whole).places) == [1, 3]
