"""One-line faults of the objective and its inputs, most of them seen in other trainers."""

from __future__ import annotations

from .mutant import Mutant

_LOSSES = "example_trainer/objective/losses.py"
_RATIOS = "example_trainer/objective/ratios.py"
_SURROGATES = "example_trainer/objective/surrogates.py"
_KL = "example_trainer/objective/kl_divergence.py"
_DISTILLATION = "example_trainer/objective/kl_divergence.py"
_TRAINING = "example_trainer/training.py"
_CLIP_TABLE = "unit/objective/test_losses.py::test_the_clip_stops_gradients_exactly_where_ppo_does"
_TWO_SIDES = "unit/objective/test_losses.py::test_the_two_sides_of_the_clip_can_differ"
_WEIGHTS = "unit/objective/test_losses.py::test_token_weights_add_up_to_one_over_the_whole_step"
_TRUNCATED = "unit/objective/test_losses.py::test_truncated_importance_weights_keep_every_token_learning"
_MASKED = "unit/objective/test_importance.py::test_masked_importance_weights_silence_what_is_too_far_off"
_GAP = "unit/objective/test_importance.py::test_the_gap_between_trainer_and_sampler_is_weighed_by_token_or_sequence"
_OFF_POLICY = (
    "unit/objective/test_importance.py::"
    "test_the_off_policy_mask_silences_negative_tokens_of_sequences_that_drifted_away"
)
_AGED = "unit/objective/test_importance.py::test_a_token_s_gradient_is_weighted_by_the_age_of_its_own_version"
_SAMPLING_MASKS = "example_trainer/objective/sampling_masks.py"
_OVER_MASKS = "unit/trainer/test_sampling_masks.py::test_"
_SPLIT = "unit/trainer/test_training.py::test_p2_the_micro_batch_split_and_the_layout_change_no_gradient"

OBJECTIVE: tuple[Mutant, ...] = (
    # Sampling masks
    Mutant(
        "logprobs are not over the masks",
        _SAMPLING_MASKS,
        "return logprobs[:, 0] - torch.where(known, allowed.logsumexp(1), 0.0)",
        "return logprobs[:, 0] - 0.0 * torch.where(known, allowed.logsumexp(1), 0.0)",
        f"{_OVER_MASKS}the_trainer_computes_the_samplers_logprobs_over_the_masks",
    ),
    Mutant(
        "the masks' sum has no gradient",
        _SAMPLING_MASKS,
        "torch.where(known, allowed.logsumexp(1), 0.0)",
        "torch.where(known, allowed.logsumexp(1), 0.0).detach()",
        f"{_OVER_MASKS}the_gradient_is_that_of_the_truncated_distribution",
    ),
    Mutant(
        "padding counts as a token of the mask",
        _SAMPLING_MASKS,
        ".masked_fill(~masked, -torch.inf)",
        "",
        f"{_OVER_MASKS}logprobs_over_a_mask_have_finite_gradients_at_any_row",
    ),
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
        "unit/objective/test_losses.py::test_tokens_counted_as_clipped_are_those_without_gradient",
    ),
    Mutant(
        "reinforce without its minus",
        _SURROGATES,
        "return -advantages * logprobs",
        "return advantages * logprobs",
        "unit/objective/test_losses.py::test_reinforce_is_minus_advantage_times_logprob",
    ),
    Mutant(
        "gradient through the weight of CISPO",
        _SURROGATES,
        "-ratios.detach().clamp(max=cap)",
        "-ratios.clamp(max=cap)",
        "unit/objective/test_losses.py::test_cispo_cuts_the_weight_and_keeps_the_token",
    ),
    Mutant(
        "GSPO with the ratio of the token",
        _LOSSES,
        "if settings.loss_type in SEQUENCE_RATIO_LOSSES else logs",
        "if settings.loss_type == 'none' else logs",
        "unit/objective/test_losses.py::test_gspo_clips_a_sequence_by_its_mean_ratio_and_shares_the_gradient_among_its_tokens",
    ),
    Mutant(
        "SAPO with one temperature for both signs of the advantage",
        _SURROGATES,
        "torch.where(advantages > 0, positive, negative)",
        "torch.where(advantages > 0, positive, positive)",
        "unit/objective/test_surrogates.py::test_sapo_s_gate_falls_smoothly_on_both_sides_of_ratio_one",
    ),
    Mutant(
        "GMPO clips both sides whatever the advantage",
        _SURROGATES,
        "torch.where(advantages > 0, logs.clamp(max=high), logs.clamp(min=-low))",
        "logs.clamp(min=-low, max=high)",
        "unit/objective/test_surrogates.py::test_gmpo_bounds_each_token_before_the_sequence_s_geometric_mean",
    ),
    Mutant(
        "M2PO masks what comes back to the sampler",
        _SURROGATES,
        "(advantages * logs) > 0",
        "(advantages * logs) < 0",
        "unit/objective/test_surrogates.py::"
        "test_m2po_leaves_out_the_largest_steps_away_from_the_sampler_until_the_second_moment_is_small_enough",
    ),
    Mutant(
        "gradient through the weight of VESPO",
        _SURROGATES,
        "sequence_sums(logs.detach(), sequences)",
        "sequence_sums(logs, sequences)",
        "unit/objective/test_surrogates.py::test_vespo_weighs_a_sequence_by_its_whole_ratio_and_stops_its_gradient",
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
        "unit/objective/test_losses.py::test_a_sequence_ratio_does_not_depend_on_the_length",
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
        "unit/objective/test_importance.py::test_recomputed_old_logprobs_put_the_ratio_at_one_and_leave_the_gap_to_the_weight",
    ),
    Mutant(
        "recomputed old logprobs that are the sampler's",
        _LOSSES,
        "return inputs.logprobs.detach() if inputs.proximal_logprobs is None else inputs.proximal_logprobs",
        "return inputs.rollout_logprobs",
        "unit/objective/test_importance.py::test_after_the_first_update_the_clip_is_against_the_weights_the_batch_began_with",
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
        "unit/objective/test_losses.py::test_log_ratios_are_clamped_so_that_exp_stays_finite",
    ),
    # Further terms
    Mutant(
        "divergence with the wrong sign inside",
        _KL,
        "difference = reference_logprobs.float() - logprobs.float()",
        "difference = logprobs.float() - reference_logprobs.float()",
        "unit/objective/test_loss_terms.py::test_k3_is_exp_d_less_d_less_one_and_never_negative",
    ),
    Mutant(
        "divergence without a pull on what the reference finds impossible",
        _KL,
        "bounded = difference.clamp(max=clamp)",
        "bounded = difference.clamp(-clamp, clamp)",
        "unit/objective/test_loss_terms.py::test_a_token_that_the_reference_finds_all_but_impossible_is_pulled_back",
    ),
    Mutant(
        "divergence rewarded",
        _LOSSES,
        'terms["kl"] = settings.kl_coef * divergence',
        'terms["kl"] = -settings.kl_coef * divergence',
        "unit/objective/test_loss_terms.py::test_the_divergence_is_added_with_its_coefficient_and_pulls_towards_the_reference",
    ),
    Mutant(
        "k1 by its own gradient",
        _KL,
        "return half_square - half_square.detach() - difference.detach()",
        "return -difference",
        "unit/objective/test_loss_terms.py::test_the_gradient_of_k1_averages_to_that_of_the_divergence",
    ),
    Mutant(
        "coefficient that falls above its target",
        _KL,
        "divergence / self.target - 1.0",
        "1.0 - divergence / self.target",
        "unit/objective/test_loss_terms.py::test_the_coefficient_rises_above_the_target_and_falls_below_it_in_bounded_steps",
    ),
    Mutant(
        "entropy punished",
        _LOSSES,
        "-settings.entropy_coef * inputs.entropies.float()",
        "settings.entropy_coef * inputs.entropies.float()",
        "unit/objective/test_loss_terms.py::test_an_entropy_bonus_rewards_entropy",
    ),
    Mutant(
        "teacher not renormalised",
        _DISTILLATION,
        "logs = scaled.log_softmax(-1)",
        "logs = scaled",
        "unit/objective/test_loss_terms.py::test_the_teachers_distribution_is_renormalised_over_its_tokens_at_its_temperature",
    ),
    Mutant(
        "credit for what the teacher likes less",
        _DISTILLATION,
        "torch.where(known.any(-1), own - rollout_logprobs.float(), 0.0)",
        "torch.where(known.any(-1), rollout_logprobs.float() - own, 0.0)",
        "unit/objective/test_loss_terms.py::test_credits_are_what_the_teacher_thinks_of_the_sampled_token_more_than_its_sampler",
    ),
)
