"""One-line faults of a training step around the loss: advantages, data, packing, the head, the step."""

from __future__ import annotations

from .mutant import Mutant

_ADVANTAGES = "example_trainer/objective/advantages.py"
_LOGPROBS = "example_trainer/modeling/logprobs.py"
_PACKING = "example_trainer/modeling/micro_batches.py"
_ATTENTION = "example_trainer/modeling/attention.py"
_METRICS = "example_trainer/objective/metrics.py"
_OVERLONG = "example_trainer/objective/advantages.py"
_COURSE = "example_trainer/objective/cs336.py"
_DATA = "example_trainer/data.py"
_SEQUENCES = "example_trainer/group_sequences.py"
_TRAINING = "example_trainer/training.py"
_REFERENCE = "example_trainer/objective/reference_policy.py"
_OBJECTIVE = "example_trainer/objective/objective.py"
_HEAD = "unit/modeling/test_logprobs.py::test_chunked_logprobs_and_gradients_equal_those_of_full_logits"
_HEAD_ENTROPY = (
    "unit/modeling/test_logprobs.py::test_entropies_and_several_labels_a_token_have_the_gradients_of_full_logits"
)
_ALIGNED = "unit/trainer/test_data.py::test_labels_logprobs_and_positions_belong_to_the_same_token"
_PACKED = "unit/modeling/test_micro_batches.py"

TRAINING: tuple[Mutant, ...] = (
    # The head
    Mutant("temperature ignored", _LOGPROBS, "logits.div_(temperatures[:, None])", "logits", _HEAD),
    Mutant(
        "temperature left out of the gradient",
        _LOGPROBS,
        "return gradient[part] / (own if gradient.ndim == 1 else own[:, None])",
        "return gradient[part]",
        _HEAD,
    ),
    Mutant(
        "entropy's gradient with the wrong sign",
        _LOGPROBS,
        "gradient.addcmul_(terms, entropy_gradient[:, None], value=-1.0)",
        "gradient.addcmul_(terms, entropy_gradient[:, None], value=1.0)",
        _HEAD_ENTROPY,
    ),
    Mutant(
        "one temperature for all",
        _LOGPROBS,
        "_logits(hidden[index[part]].to(compute), head, bias, temperatures[part])",
        "_logits(hidden[index[part]].to(compute), head, bias, temperatures[:1].expand(len(index[part])))",
        "unit/modeling/test_logprobs.py::test_each_token_is_judged_at_its_own_temperature",
    ),
    # Advantages
    Mutant(
        "population std under the name of the sample's",
        _ADVANTAGES,
        "population.std(correction=1) + SAMPLE_STD_EPS",
        "population.std(correction=0) + SAMPLE_STD_EPS",
        "unit/objective/test_advantages.py::test_sample_std_is_the_form_with_n_minus_one_and_an_added_epsilon",
    ),
    Mutant(
        "sample std under the name of the population's",
        _ADVANTAGES,
        "population.std(correction=0).clamp(min=POPULATION_STD_FLOOR)",
        "population.std(correction=1).clamp(min=POPULATION_STD_FLOOR)",
        "unit/objective/test_advantages.py::test_population_std_is_the_form_with_n_and_a_floor",
    ),
    Mutant(
        "median for mean",
        _ADVANTAGES,
        "return rewards - rewards.mean()",
        "return rewards - rewards.median()",
        "unit/objective/test_advantages.py::test_the_baseline_is_the_groups_own_mean",
    ),
    Mutant(
        "equal rewards told by ==",
        _ADVANTAGES,
        "max(rewards) - min(rewards) <= EQUAL_REWARDS_TOLERANCE",
        "max(rewards) - min(rewards) == 0.0",
        "unit/objective/test_advantages.py::test_equal_rewards_are_recognised_by_their_range_and_not_by_a_noisy_std",
    ),
    Mutant(
        "batch std of centred rewards under TRL's name",
        _ADVANTAGES,
        '_tensors(whole) if settings.std == "sample" else _centre_all(whole, settings)',
        "_centre_all(whole, settings)",
        "unit/objective/test_advantages.py::test_batch_std_in_trls_form_is_that_of_the_raw_rewards_of_the_batch",
    ),
    # Data
    Mutant(
        "labels shifted by one",
        _DATA,
        "labels=_join([candidate.tokens[candidate.targets] for",
        "labels=_join([candidate.tokens[candidate.targets - 1] for",
        _ALIGNED,
    ),
    Mutant(
        "sampler's logprobs shifted by one",
        _SEQUENCES,
        "chosen = values[targets]",
        "chosen = values[targets - 1]",
        _ALIGNED,
    ),
    Mutant(
        "skipped mask",
        _SEQUENCES,
        "positions = np.flatnonzero(mask != MASKED)",
        "positions = np.arange(len(mask))",
        _ALIGNED,
    ),
    Mutant(
        "placeholders taken for logprobs",
        _SEQUENCES,
        "np.flatnonzero((chosen == PLACEHOLDER_LOGPROB) | ~np.isfinite(chosen))",
        "np.flatnonzero(~np.isfinite(chosen))",
        "unit/trainer/test_data.py::test_one_sequence_without_logprobs_among_many_is_found",
    ),
    Mutant(
        "temperature of the group before that of the sequence",
        _SEQUENCES,
        "for source in (override_of(group, index), group.generation_params, group.group_overrides):",
        "for source in (group.group_overrides, group.generation_params, override_of(group, index)):",
        "unit/trainer/test_data.py::test_temperatures_come_from_override_then_generation_then_group_then_one",
    ),
    Mutant(
        "set_advantage_to_zero ignored",
        _DATA,
        '(_is_zeroed(group, index), "zeroed"),',
        '(False, "zeroed"),',
        "unit/trainer/test_data.py::test_r38_a_zeroed_sequence_stays_in_the_baseline_and_leaves_the_forward",
    ),
    Mutant(
        "groups without signal trained",
        _DATA,
        '(not signal, "no_signal"),',
        '(False, "no_signal"),',
        "unit/trainer/test_data.py::test_groups_of_equal_rewards_are_dropped_before_the_forward_but_counted_in_the_reward",
    ),
    Mutant(
        "supplied advantages ignored",
        _DATA,
        "if candidate.advantages is None else candidate.advantages",
        "if candidate.advantages is None else np.full(count, candidate.advantage)",
        "unit/trainer/test_data.py::test_advantages_from_the_environment_win_over_scores",
    ),
    Mutant(
        "cut-off answers trained",
        _DATA,
        'settings.overlong.mask and is_truncated(len(candidate.targets), settings.overlong), "truncated"',
        'False, "truncated"',
        "unit/trainer/test_data.py"
        "::test_p3_a_masked_cut_off_answer_keeps_its_place_in_the_baseline_and_leaves_forward_and_denominator",
    ),
    Mutant(
        "length rewarded",
        _OVERLONG,
        "return -settings.penalty * share",
        "return settings.penalty * share",
        "unit/trainer/test_data.py::test_the_penalty_for_length_grows_over_the_buffer_before_the_limit",
    ),
    # Packing
    Mutant(
        "state of the token itself",
        _PACKING,
        "predicting = row.targets - 1",
        "predicting = row.targets",
        _PACKED,
    ),
    Mutant(
        "positions that run on",
        _PACKING,
        "np.arange(first_position, first_position + len(tokens))",
        "np.arange(end, end + len(tokens))",
        _PACKED,
    ),
    Mutant("a look ahead", _ATTENTION, "mask = column <= own", "mask = column <= own + 1", _PACKED),
    Mutant(
        "padding looked at",
        _ATTENTION,
        "return mask[None] & (column[None] >= self.key_start[:, None, None])",
        "return mask[None].expand(len(self.key_start), -1, -1)",
        _PACKED,
    ),
    # The step
    Mutant(
        "ratios measured after truncation",
        _METRICS,
        "names.MEAN_RATIO: _mean(ratios),",
        "names.MEAN_RATIO: _mean(ratios.clamp(max=settings.tis_cap)),",
        "unit/objective/test_metrics.py::test_ratios_are_reported_before_any_truncation",
    ),
    Mutant(
        "a step without finite gradient taken",
        _TRAINING,
        "if not gradients.is_finite:",
        "if False:",
        "unit/trainer/test_training.py::test_a_step_without_finite_gradient_is_skipped_counted_and_stops_after_a_few",
    ),
    Mutant(
        "a step on a gradient of 0 taken",
        _TRAINING,
        "if gradients.norm == 0.0:",
        "if False:",
        "unit/trainer/test_training.py::"
        "test_a_mini_batch_whose_tokens_are_all_too_old_is_left_out_and_the_others_are_trained",
    ),
    Mutant(
        "reference that follows the policy",
        _REFERENCE,
        "with self._in_place(), torch.no_grad():",
        "with torch.no_grad():",
        "unit/trainer/test_objective_in_training.py::test_the_divergence_is_zero_at_the_start_and_grows_as_the_policy_leaves_it",
    ),
    Mutant(
        "reference that is never swapped",
        _REFERENCE,
        "if self._interval and step % self._interval == 0:",
        "if False:",
        "unit/trainer/test_objective_in_training.py::test_the_reference_is_the_policy_at_the_start_until_it_is_swapped",
    ),
    Mutant(
        "old logprobs scored anew before each update",
        _OBJECTIVE,
        "if self._scores_proximal:",
        "if False:",
        "unit/trainer/test_objective_in_training.py::test_with_several_updates_old_logprobs_are_those_the_batch_began_with",
    ),
    Mutant(
        "groups read across prompts",
        _COURSE,
        "advantages = groups - groups.mean(1, keepdim=True)",
        "advantages = groups - groups.mean()",
        "unit/objective/test_cs336.py::test_group_rewards_are_centred_and_scaled_within_consecutive_groups",
    ),
)
