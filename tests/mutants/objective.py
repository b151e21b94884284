"""One-line faults of the objective and what feeds it, most of them seen in other trainers."""

from __future__ import annotations

from .mutant import Mutant

_LOSSES = "example_trainer/objective/losses.py"
_RATIOS = "example_trainer/objective/ratios.py"
_KL = "example_trainer/objective/ratios.py"
_DISTILLATION = "example_trainer/objective/ratios.py"
_ADVANTAGES = "example_trainer/objective/advantages.py"
_LOGPROBS = "example_trainer/modeling/logprobs.py"
_PACKING = "example_trainer/modeling/micro_batches.py"
_ATTENTION = "example_trainer/modeling/attention.py"
_METRICS = "example_trainer/objective/metrics.py"
_OVERLONG = "example_trainer/objective/advantages.py"
_COURSE = "example_trainer/objective/cs336.py"
_DATA = "example_trainer/data.py"
_TRAINING = "example_trainer/training.py"
_SHARES = "example_trainer/distributed/rank_shares.py"
_REFERENCE = "example_trainer/objective/reference_policy.py"
_OBJECTIVE = "example_trainer/objective/objective.py"

_CLIP_TABLE = "unit/trainer/test_losses.py::test_the_clip_stops_gradients_exactly_where_ppo_does"
_TWO_SIDES = "unit/trainer/test_losses.py::test_the_two_sides_of_the_clip_can_differ"
_WEIGHTS = "unit/trainer/test_losses.py::test_token_weights_add_up_to_one_over_the_whole_step"
_TRUNCATED = "unit/trainer/test_losses.py::test_truncated_importance_weights_keep_every_token_learning"
_MASKED = "unit/trainer/test_importance.py::test_masked_importance_weights_silence_what_is_too_far_off"
_GAP = "unit/trainer/test_importance.py::test_the_gap_between_trainer_and_sampler_is_weighed_by_token_or_sequence"
_OFF_POLICY = (
    "unit/trainer/test_importance.py::test_the_off_policy_mask_silences_negative_tokens_of_sequences_that_drifted_away"
)
_AGED = "unit/trainer/test_importance.py::test_a_token_s_gradient_is_weighted_by_the_age_of_its_own_version"
_HEAD = "unit/trainer/test_logprobs.py::test_chunked_logprobs_and_gradients_equal_those_of_full_logits"
_HEAD_ENTROPY = (
    "unit/trainer/test_logprobs.py::test_entropies_and_several_labels_a_token_have_the_gradients_of_full_logits"
)
_ALIGNED = "unit/trainer/test_data.py::test_labels_logprobs_and_positions_belong_to_the_same_token"
_SPLIT = "unit/trainer/test_training.py::test_p2_the_micro_batch_split_and_the_layout_change_no_gradient"
_PACKED = "unit/trainer/test_micro_batches.py"

OBJECTIVE: tuple[Mutant, ...] = (
    # The clip
    Mutant(
        "clip inverted for negative advantages",
        _LOSSES,
        "objective = torch.minimum(ratios * advantages, bounded * advantages)",
        "objective = torch.where(advantages < 0, torch.maximum(ratios * advantages, bounded * advantages), "
        "torch.minimum(ratios * advantages, bounded * advantages))",
        _CLIP_TABLE,
    ),
    Mutant("maximum for minimum", _LOSSES, "objective = torch.minimum(", "objective = torch.maximum(", _CLIP_TABLE),
    Mutant("loss without its minus", _LOSSES, "return -objective", "return objective", _CLIP_TABLE),
    Mutant(
        "one epsilon for both sides",
        _LOSSES,
        "bounded = ratios.clamp(1.0 - settings.clip_eps_low, 1.0 + settings.clip_eps_high)",
        "bounded = ratios.clamp(1.0 - settings.clip_eps_low, 1.0 + settings.clip_eps_low)",
        _TWO_SIDES,
    ),
    Mutant(
        "dual clip for positive advantages",
        _LOSSES,
        "torch.where(advantages < 0, torch.maximum(objective, floor), objective)",
        "torch.where(advantages > 0, torch.minimum(objective, floor), objective)",
        _CLIP_TABLE,
    ),
    Mutant(
        "no dual clip",
        _LOSSES,
        "if settings.dual_clip is not None:",
        "if settings.dual_clip is None:",
        _CLIP_TABLE + "[-1.0-3.01-False]",
    ),
    Mutant(
        "clipped tokens of negative advantage not counted",
        _LOSSES,
        "return above | below | beyond",
        "return above",
        "unit/trainer/test_losses.py::test_tokens_counted_as_clipped_are_those_without_gradient",
    ),
    Mutant(
        "reinforce without its minus",
        _LOSSES,
        "return -advantages * logprobs",
        "return advantages * logprobs",
        "unit/trainer/test_losses.py::test_reinforce_is_minus_advantage_times_logprob",
    ),
    Mutant(
        "gradient through the weight of CISPO",
        _LOSSES,
        "-ratios.detach().clamp(max=cap)",
        "-ratios.clamp(max=cap)",
        "unit/trainer/test_losses.py::test_cispo_cuts_the_weight_and_keeps_the_token",
    ),
    Mutant(
        "GSPO with the ratio of the token",
        _LOSSES,
        'if settings.loss_type == "gspo" else logs',
        'if settings.loss_type == "none" else logs',
        "unit/trainer/test_losses.py::test_gspo_clips_a_sequence_by_its_mean_ratio_and_shares_the_gradient_among_its_tokens",
    ),
    Mutant(
        "tokens of the oldest age allowed are masked",
        _RATIOS,
        "torch.where(ages > mask_above, 0.0, weights)",
        "torch.where(ages >= mask_above, 0.0, weights)",
        _AGED,
    ),
    Mutant("no weight by age", _LOSSES, "losses if weights is None else losses * weights", "losses", _AGED),
    # Denominators
    Mutant(
        "local denominator",
        _LOSSES,
        "1.0 / max(float(per_sequence.sum()), 1.0)",
        "1.0 / max(float(per_sequence.max()), 1.0)",
        _WEIGHTS,
    ),
    Mutant(
        "sequence means that are added up",
        _LOSSES,
        "(per_sequence.clamp(min=1.0) * max(len(per_sequence), 1))",
        "per_sequence.clamp(min=1.0)",
        _WEIGHTS,
    ),
    Mutant(
        "constant length without the number of sequences",
        _LOSSES,
        "1.0 / (constant_length * max(len(per_sequence), 1))",
        "1.0 / constant_length",
        _WEIGHTS,
    ),
    Mutant(
        "means over micro-batches",
        _TRAINING,
        "name: (losses * weights[at]).sum()",
        "name: losses.mean()",
        _SPLIT,
    ),
    # Importance corrections
    Mutant("no cap on importance weights", _RATIOS, "ratios.detach().clamp(floor, cap)", "ratios.detach()", _TRUNCATED),
    Mutant(
        "gradient through an importance weight",
        _RATIOS,
        "return ratios.detach().clamp(floor, cap)",
        "return ratios.clamp(floor, cap)",
        _TRUNCATED,
    ),
    Mutant(
        "a mask that truncates",
        _RATIOS,
        "weights.masked_fill((weights < floor) | (weights > cap), 0.0)",
        "weights.clamp(floor, cap)",
        _MASKED,
    ),
    Mutant(
        "sequence ratio that grows with the length",
        _RATIOS,
        "means: Tensor = sums / counts",
        "means: Tensor = sums",
        "unit/trainer/test_losses.py::test_a_sequence_ratio_does_not_depend_on_the_length",
    ),
    Mutant(
        "mismatch upside down",
        _RATIOS,
        "log_ratios(proximal_logprobs.detach(), rollout_logprobs, clamp)",
        "log_ratios(rollout_logprobs, proximal_logprobs.detach(), clamp)",
        _GAP,
    ),
    Mutant(
        "mismatch of tokens where sequences are asked for",
        _RATIOS,
        'if correction.startswith("sequence"):',
        'if correction.startswith("token"):',
        _GAP,
    ),
    Mutant(
        "mismatch measured and not applied",
        _LOSSES,
        "losses = losses * mismatch_of(inputs, settings)",
        "losses = losses * 1.0",
        "unit/trainer/test_importance.py::test_recomputed_old_logprobs_put_the_ratio_at_one_and_leave_the_gap_to_the_weight",
    ),
    Mutant(
        "recomputed old logprobs that are the sampler's",
        _LOSSES,
        "return inputs.logprobs.detach() if inputs.proximal_logprobs is None else inputs.proximal_logprobs",
        "return inputs.rollout_logprobs",
        "unit/trainer/test_importance.py::test_after_the_first_update_the_clip_is_against_the_weights_the_batch_began_with",
    ),
    Mutant(
        "off-policy drift with the wrong sign",
        _RATIOS,
        "rollout_logprobs.float() - logprobs.detach().float()",
        "logprobs.detach().float() - rollout_logprobs.float()",
        _OFF_POLICY,
    ),
    Mutant(
        "off-policy mask on positive advantages",
        _RATIOS,
        "(advantages >= 0) | (drift <= threshold)",
        "(advantages <= 0) | (drift <= threshold)",
        _OFF_POLICY,
    ),
    Mutant(
        "log-ratios without a bound",
        _RATIOS,
        "(logprobs.float() - other_logprobs.float()).clamp(-clamp, clamp)",
        "(logprobs.float() - other_logprobs.float())",
        "unit/trainer/test_losses.py::test_log_ratios_are_clamped_so_that_exp_stays_finite",
    ),
    # Further terms
    Mutant(
        "divergence with the wrong sign inside",
        _KL,
        "(reference_logprobs.float() - logprobs.float())",
        "(logprobs.float() - reference_logprobs.float())",
        "unit/trainer/test_loss_terms.py::test_k3_is_exp_d_less_d_less_one_and_never_negative",
    ),
    Mutant(
        "divergence rewarded",
        _LOSSES,
        'terms["kl"] = settings.kl_coef * divergence',
        'terms["kl"] = -settings.kl_coef * divergence',
        "unit/trainer/test_loss_terms.py::test_the_divergence_is_added_with_its_coefficient_and_pulls_towards_the_reference",
    ),
    Mutant(
        "k1 by its own gradient",
        _KL,
        "return half_square - half_square.detach() - difference.detach()",
        "return -difference",
        "unit/trainer/test_loss_terms.py::test_the_gradient_of_k1_averages_to_that_of_the_divergence",
    ),
    Mutant(
        "coefficient that falls above its target",
        _KL,
        "divergence / self.target - 1.0",
        "1.0 - divergence / self.target",
        "unit/trainer/test_loss_terms.py::test_the_coefficient_rises_above_the_target_and_falls_below_it_in_bounded_steps",
    ),
    Mutant(
        "entropy punished",
        _LOSSES,
        "-settings.entropy_coef * inputs.entropies.float()",
        "settings.entropy_coef * inputs.entropies.float()",
        "unit/trainer/test_loss_terms.py::test_an_entropy_bonus_rewards_entropy",
    ),
    Mutant(
        "teacher not renormalised",
        _DISTILLATION,
        "logs = scaled.log_softmax(-1)",
        "logs = scaled",
        "unit/trainer/test_loss_terms.py::test_the_teachers_distribution_is_renormalised_over_its_tokens_at_its_temperature",
    ),
    Mutant(
        "credit for what the teacher likes less",
        _DISTILLATION,
        "torch.where(named.any(-1), found - rollout_logprobs.float(), 0.0)",
        "torch.where(named.any(-1), rollout_logprobs.float() - found, 0.0)",
        "unit/trainer/test_loss_terms.py::test_credits_are_what_the_teacher_thinks_of_the_sampled_token_more_than_its_sampler",
    ),
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
        "unit/trainer/test_logprobs.py::test_each_token_is_judged_at_its_own_temperature",
    ),
    # Advantages
    Mutant(
        "population std under the name of the sample's",
        _ADVANTAGES,
        "population.std(correction=1) + SAMPLE_STD_EPS",
        "population.std(correction=0) + SAMPLE_STD_EPS",
        "unit/trainer/test_advantages.py::test_sample_std_is_the_form_with_n_minus_one_and_an_added_epsilon",
    ),
    Mutant(
        "sample std under the name of the population's",
        _ADVANTAGES,
        "population.std(correction=0).clamp(min=POPULATION_STD_FLOOR)",
        "population.std(correction=1).clamp(min=POPULATION_STD_FLOOR)",
        "unit/trainer/test_advantages.py::test_population_std_is_the_form_with_n_and_a_floor",
    ),
    Mutant(
        "median for mean",
        _ADVANTAGES,
        "return rewards - rewards.mean()",
        "return rewards - rewards.median()",
        "unit/trainer/test_advantages.py::test_the_baseline_is_the_groups_own_mean",
    ),
    Mutant(
        "equal rewards told by ==",
        _ADVANTAGES,
        "max(rewards) - min(rewards) <= EQUAL_REWARDS_TOLERANCE",
        "max(rewards) - min(rewards) == 0.0",
        "unit/trainer/test_advantages.py::test_equal_rewards_are_told_by_their_range_and_not_by_a_noisy_std",
    ),
    Mutant(
        "batch std of centred rewards under TRL's name",
        _ADVANTAGES,
        '_tensors(whole) if settings.std == "sample" else _centre_all(whole, settings)',
        "_centre_all(whole, settings)",
        "unit/trainer/test_advantages.py::test_batch_std_in_trls_form_is_that_of_the_raw_rewards_of_the_batch",
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
        "sampler's logprobs shifted by one", _DATA, "chosen = values[targets]", "chosen = values[targets - 1]", _ALIGNED
    ),
    Mutant(
        "skipped mask",
        _DATA,
        "positions = np.flatnonzero(mask != MASKED)",
        "positions = np.arange(len(mask))",
        _ALIGNED,
    ),
    Mutant(
        "placeholders taken for logprobs",
        _DATA,
        "np.flatnonzero((chosen == PLACEHOLDER_LOGPROB) | ~np.isfinite(chosen))",
        "np.flatnonzero(~np.isfinite(chosen))",
        "unit/trainer/test_data.py::test_one_sequence_without_logprobs_among_many_is_found",
    ),
    Mutant(
        "temperature of the group before that of the sequence",
        _DATA,
        "for source in (*overrides, group.generation_params, group.group_overrides):",
        "for source in (group.group_overrides, group.generation_params, *overrides):",
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
        "unit/trainer/test_metrics.py::test_ratios_are_reported_before_any_truncation",
    ),
    Mutant(
        "a step without finite gradient taken",
        _TRAINING,
        "if not (math.isfinite(gradients.norm) and math.isfinite(gradients.loss)):",
        "if False:",
        "unit/trainer/test_training.py::test_a_step_without_finite_gradient_is_skipped_counted_and_stops_after_a_few",
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
        "unit/trainer/test_cs336.py::test_group_rewards_are_centred_and_scaled_within_consecutive_groups",
    ),
)
