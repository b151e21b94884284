"""Known faults of such trainers: each has a test here that is named after the promise it keeps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.promises import asserts_something, source_of

TESTS = Path(__file__).parents[2]

PITFALLS: dict[str, tuple[str, ...]] = {
    "P1 the clip stops gradients where PPO does, for both signs": (
        "test_the_clip_stops_gradients_exactly_where_ppo_does",
    ),
    "P2 micro-batches, packing and ranks change no loss or gradient": (
        "test_p2_neither_micro_batch_split_nor_packing_changes_loss_or_gradient",
        "test_p2_ranks_give_the_loss_gradients_metrics_and_weights_of_one_process",
    ),
    "P3 what is masked leaves numerator and denominator": (
        "test_p3_a_masked_cut_off_answer_keeps_its_place_in_the_baseline_and_leaves_forward_and_denominator",
        "test_groups_without_signal_leave_the_denominator",
        "test_r34_a_batch_without_any_signal_has_no_rows",
        "test_nothing_trained_gives_no_weights_and_no_division_by_zero",
    ),
    "P4 logprobs agree at other temperatures, and under top-p": (
        "test_logprobs_are_those_after_temperature",
        "test_truncated_sampling_is_refused_unless_allowed_and_then_marked",
        "test_p4_tokens_of_truncated_sampling_are_weighed_and_never_clipped",
    ),
    "P5 a sequence's ratio does not grow with its length": (
        "test_p5_a_sequences_weight_does_not_grow_with_its_length",
    ),
    "P6 each loss over the chunked head equals that over full logits": (
        "test_p6_each_loss_over_the_chunked_head_is_that_over_full_logits_in_several_micro_batches",
    ),
    "P7 a packed forward is that of each row": (
        "test_every_layout_and_budget_equals_the_forward_of_each_row_alone",
        "test_every_target_is_predicted_by_the_state_of_exactly_its_own_past",
    ),
    "P8 small steps move bf16 weights": (
        "test_bf16_weights_stepped_at_a_small_rate_go_where_fp32_ones_go",
        "test_updates_far_below_the_spacing_are_kept_on_average_where_nearest_rounding_loses_them",
    ),
    "P9 a cached prefix of the old policy is never read": (
        "test_r37_a_cached_prefix_of_the_old_policy_is_never_read",
        "test_r37_without_clearing_a_prefix_of_the_old_policy_is_read",
    ),
    "P10 an adapter's name is never reused": (
        "test_names_are_not_reused_and_mistakes_are_reported",
        "test_r23_an_adapter_sent_as_tensors_is_the_policy_under_the_models_name_on_every_route",
    ),
    "P11 no adapter is read from a file that may be gone": (
        "test_r5_each_publish_is_served_at_once_and_no_adapter_is_read_from_a_file",
        "test_a_rejected_adapter_leaves_the_old_one_serving",
    ),
    "P12 what the server would ignore of an adapter is refused": (
        "test_p12_an_adapter_on_the_output_head_is_refused",
        "test_modules_the_model_does_not_have_are_refused_with_those_it_has",
    ),
    "P13 adapters are served with compiled graphs on a GPU": ("test_p13_serving_adapters_on_a_gpu_is_not_eager",),
    "P14 a publish that fails is told and ends": (
        "test_waiting_ends_with_the_reason_and_the_flag",
        "test_a_version_that_is_not_new_is_refused_and_the_fence_is_lifted",
        "test_the_proof_stops_a_run_whose_publish_misses_weights",
    ),
    "P15 no request is served between two policies": (
        "test_requests_wait_at_the_admission_gate_while_a_publish_lasts",
        "test_r1_no_token_is_sampled_from_a_mixture",
    ),
    "P16 a sleep that loses buffers is refused": ("test_sleeping_is_refused_without_sleep_mode",),
    "P17 a tied head is one weight on both sides": (
        "test_ties_are_judged_by_memory_and_not_by_config",
        "test_tied_weights_are_one_master_and_stored_once",
    ),
    "P18 a checkpoint that is served is the one just written": (
        "test_a_restart_serves_the_next_version_on_the_same_port",
        "test_a_checkpoint_loads_with_transformers_and_says_what_it_covers",
    ),
    "P19 memory that cannot be shared between processes is refused": (
        "test_an_allocator_that_cannot_be_shared_is_refused",
    ),
    "P20 an adapter over four bits is trained over the values that are served": (
        "test_a_base_in_four_bits_trains_its_adapter_and_gives_the_values_it_computes_with",
    ),
    "P21 training an adapter leaves its base bit for bit": (
        "test_p21_training_an_adapter_leaves_its_base_bit_for_bit",
    ),
    "P22 what was sampled is never tokenised again": (
        "test_what_was_sampled_is_never_tokenised_again",
        "test_every_sampled_token_is_kept_as_it_came",
    ),
    "P23 a resumed run trains the batches that an uninterrupted one trains": (
        "test_r25_a_trainer_killed_at_random_steps_ends_with_the_weights_and_metrics_of_one_left_alone",
        "test_orphaned_groups_are_served_and_counted",
    ),
    "P24 what is too old is counted, and the oldest are trained first": (
        "test_groups_beyond_the_staleness_budget_are_expired_and_counted",
        "test_the_oldest_exact_subset_that_meets_the_minima_is_chosen",
    ),
    "P25 a rollout that failed is no reward of nothing": (
        "test_a_failing_rollout_is_tried_again_and_never_trained_as_nothing",
        "test_an_environment_that_only_fails_ends_with_the_reason",
    ),
    "P26 a group stays whole and is compared with itself alone": (
        "test_p26_a_group_is_centred_by_its_own_prompt_whatever_else_is_in_the_batch",
        "test_a_batch_of_groups_is_the_oldest_ones_whatever_their_sizes",
    ),
    "P27 equal rewards are told through float noise, for whole groups": (
        "test_equal_rewards_are_recognised_by_their_range_and_not_by_a_noisy_std",
        "test_p27_a_group_is_judged_whole_where_the_environment_supplies_advantages",
    ),
    "P28 samples of a group do not share a seed": ("test_p28_parts_of_a_group_do_not_share_a_seed",),
    "P29 mismatch is measured before it is corrected, lengths by masks": (
        "test_p29_mismatch_metrics_are_those_before_any_weight_is_cut",
        "test_ratios_are_reported_before_any_truncation",
        "test_groups_of_equal_rewards_are_dropped_before_the_forward_but_counted_in_the_reward",
    ),
    "P30 a prompt scored again after a publish has the new policy's logprobs": (
        "test_a_prompt_cached_under_the_old_version_gets_the_new_versions_values",
    ),
}


@pytest.fixture(scope="module")
def homes() -> dict[str, Path]:
    """Return the file of every test that the default run collects, by the test's name."""
    paths = [path for path in TESTS.rglob("test_*.py") if "gpu" not in path.relative_to(TESTS).parts]
    found: dict[str, Path] = {}
    for path in paths:
        names = re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        found |= dict.fromkeys(names, path)
    return found


@pytest.mark.parametrize("promise", PITFALLS)
def test_a_known_pitfall_has_a_test_named_after_its_promise_that_asserts_something(
    promise: str, homes: dict[str, Path]
) -> None:
    gone = set(PITFALLS[promise]) - homes.keys()
    assert not gone, f"renamed, removed or for a GPU alone: {', '.join(sorted(gone))}; name what keeps the promise now"
    idle = [test for test in PITFALLS[promise] if not asserts_something(source_of(homes[test], test))]
    assert idle == []


def test_all_thirty_are_there() -> None:
    assert [promise.split()[0] for promise in PITFALLS] == [f"P{number}" for number in range(1, 31)]
