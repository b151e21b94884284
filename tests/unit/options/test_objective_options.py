"""Options of the objective: published forms, contradictions, and the names of older guides."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from atropos_api.common.cliconfig import ConfigError, load_config
from example_trainer.config import TrainingConfig
from example_trainer.data import data_settings
from example_trainer.objective.losses import LossSettings
from example_trainer.objective.objective import loss_settings
from example_trainer.options.objective import ObjectiveOptions


def make(**settings: Any) -> TrainingConfig:
    return TrainingConfig.model_validate({"model_name": "m", **settings})


def from_flags(*argv: str) -> TrainingConfig:
    return load_config(TrainingConfig, ["--model", "m", *argv], prog="p", description="d")


@pytest.mark.parametrize(
    ("loss_type", "aggregation", "norm", "clip"),
    [
        ("grpo", "token", "group", (0.2, 0.2)),
        ("dr_grpo", "constant", "none", (0.2, 0.2)),
        ("dapo", "token", "group", (0.2, 0.28)),
        ("gspo", "sequence", "group", (3e-4, 4e-4)),
        ("cispo", "token", "group", (0.2, 0.2)),
        ("luspo", "constant", "group", (2e-3, 2.5e-3)),
        ("gmpo", "sequence", "group", (0.4, 0.4)),
        ("sapo", "sequence", "group", (0.2, 0.2)),
        ("vespo", "token", "group", (0.2, 0.2)),
        ("gpg", "token", "none", (0.2, 0.2)),
        ("dppo", "token", "group", (0.15, 0.15)),
        ("m2po", "token", "group", (0.2, 0.2)),
    ],
)
def test_a_loss_by_name_brings_the_form_of_its_paper(
    loss_type: str, aggregation: str, norm: str, clip: tuple[float, float]
) -> None:
    config = make(loss_type=loss_type)
    loss = loss_settings(config)
    assert config.loss_aggregation == aggregation
    assert data_settings(config).advantages.norm == norm
    assert (loss.loss_type, loss.clip_eps_low, loss.clip_eps_high) == (loss_type, *clip)


def test_the_library_s_settings_of_a_loss_have_the_options_defaults() -> None:
    assert loss_settings(ObjectiveOptions()) == LossSettings()


def test_what_is_said_wins_over_the_form_of_a_paper() -> None:
    config = from_flags("--loss-type", "dapo", "--clip-eps-high", "0.5", "--loss-aggregation", "sequence")
    assert (config.clip_eps_high, config.loss_aggregation) == (0.5, "sequence")
    assert TrainingConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize("loss_type", ["gspo", "luspo", "gmpo", "dppo"])
def test_a_clip_that_is_given_alone_holds_for_both_sides_where_the_paper_sets_both(loss_type: str) -> None:
    """DPPO masked rising tokens at 0.15 whatever --clip-eps said, and GSPO with TRL's 0.2 clipped them at 1.0004."""
    loss = loss_settings(from_flags("--loss-type", loss_type, "--clip-eps", "0.2"))
    assert (loss.clip_eps_low, loss.clip_eps_high) == (0.2, 0.2)
    loss = loss_settings(from_flags("--loss-type", loss_type, "--clip-eps", "0.2", "--clip-eps-high", "0.3"))
    assert (loss.clip_eps_low, loss.clip_eps_high) == (0.2, 0.3)
    assert loss_settings(from_flags("--loss-type", "dapo", "--clip-eps", "0.1")).clip_eps_high == 0.28


def test_dr_grpos_constant_is_the_longest_answer_where_that_is_known() -> None:
    assert make(loss_type="dr_grpo", seq_len=100).aggregation_length == 100
    assert make(loss_type="dr_grpo", seq_len=100, max_response_tokens=40).aggregation_length == 40


def test_no_baseline_trains_on_raw_rewards() -> None:
    advantages = data_settings(make(loss_type="no_baseline")).advantages
    assert (advantages.baseline, advantages.norm) == ("none", "none")


EFFECTS = [
    ("--importance-sampling masked", "importance_sampling", "masked"),
    ("--clip-eps 0.1", "clip_eps_low", 0.1),
    ("--epsilon-low 0.1", "clip_eps_low", 0.1),
    ("--epsilon-high 0.3", "clip_eps_high", 0.3),
    ("--dual-clip None", "dual_clip", None),
    ("--loss-type cispo --cispo-cap 4", "cispo_cap", 4.0),
    ("--loss-type sapo --sapo-temperature-pos 2", "sapo_temperature_pos", 2.0),
    ("--loss-type sapo --sapo-temperature-neg 2", "sapo_temperature_neg", 2.0),
    ("--loss-type vespo --vespo-k-pos 1", "vespo_k_pos", 1.0),
    ("--loss-type vespo --vespo-lambda-pos 1", "vespo_lambda_pos", 1.0),
    ("--loss-type vespo --vespo-k-neg 1", "vespo_k_neg", 1.0),
    ("--loss-type vespo --vespo-lambda-neg 1", "vespo_lambda_neg", 1.0),
    ("--tis-cap 1.5", "tis_cap", 1.5),
    ("--importance-sampling truncated --tis-floor 0.5", "tis_floor", 0.5),
    ("--log-ratio-clamp 5", "log_ratio_clamp", 5.0),
    ("--old-logprobs recomputed", "old_logprobs", "recomputed"),
    ("--old-logprobs recomputed --mismatch-correction sequence_mask", "mismatch_correction", "sequence_mask"),
    ("--off-policy-mask 0.1", "off_policy_threshold", 0.1),
    ("--kl-coef 0.001", "kl_coef", 1e-3),
    ("--beta 0.05", "kl_coef", 0.05),
    ("--beta 0.05 --kl-estimator k1", "kl_estimator", "k1"),
    ("--entropy-coef 0.01", "entropy_coef", 0.01),
    ("--distill reverse_kl", "distill", "reverse_kl"),
    ("--distill forward_kl --distill-coef 0.3", "distill_coef", 0.3),
    ("--distill forward_kl --distill-temperature 2", "distill_temperature", 2.0),
]


@pytest.mark.parametrize(("argv", "field", "value"), EFFECTS)
def test_a_flag_reaches_the_loss(argv: str, field: str, value: object) -> None:
    assert getattr(loss_settings(from_flags(*argv.split())), field) == value


REFUSED = [
    ({"loss_type": "ppo"}, "ppo is not a loss type; use one of grpo"),
    ({"loss_type": "not a path:loss"}, "package.module:function"),
    ({"loss_type": "losses.py:mine"}, "losses.py:mine names a file; write losses:mine, and start in the file's folder"),
    ({"optimizer": "own/optimizers.py:mine"}, "own/optimizers.py:mine names a file; write optimizers:mine"),
    ({"loss_type": "cispo", "importance_sampling": "truncated"}, "--cispo-cap"),
    ({"loss_type": "gmpo", "importance_sampling": "masked"}, "set --clip-eps and leave"),
    ({"loss_type": "sapo", "importance_sampling": "truncated"}, "--sapo-temperature-pos"),
    ({"loss_type": "dppo", "importance_sampling": "truncated"}, "--clip-eps and --cispo-cap"),
    ({"loss_type": "m2po", "importance_sampling": "masked"}, "--m2-threshold"),
    ({"loss_type": "bnpo"}, "bnpo is not a loss type here; use dapo, or grpo"),
    ({"loss_type": "geo_mean"}, "use gmpo"),
    ({"loss_type": "vespo", "importance_sampling": "truncated"}, "--vespo-k-pos"),
    (
        {"loss_type": "vespo", "old_logprobs": "recomputed", "mismatch_correction": "token_mask"},
        "by its whole ratio to the sampler",
    ),
    ({"loss_type": "pkg.losses:mine", "importance_sampling": "masked"}, "weighs its own ratios"),
    ({"old_logprobs": "recomputed", "importance_sampling": "truncated"}, "--mismatch-correction"),
    ({"mismatch_correction": "token_truncate"}, "--old-logprobs recomputed"),
    ({"tis_floor": 0.5}, "there are none"),
    ({"importance_sampling": "masked", "tis_floor": 2.0}, "must be below --tis-cap 2"),
    ({"target_kl": 0.1}, "--target-kl 0.1 needs a divergence"),
    ({"ref_update_interval": 10}, "--ref-update-interval 10"),
    ({"ref_model": "somewhere"}, "--ref-model somewhere"),
    ({"ref_model": "m", "kl_coef": 0.1, "weight_bridge_mode": "lora_restart"}, "the base with the adapter off"),
    ({"overlong_penalty": 1.0}, "--max-response-tokens"),
    ({"mask_overlong": True}, "--max-response-tokens"),
    ({"max_response_tokens": 8, "overlong_buffer": 9}, "--overlong-buffer 9"),
    ({"max_response_tokens": 4096, "seq_len": 2048}, "longer than --seq-len 2048"),
    ({"world_size": 2, "optimizer": "adamw", "shuffle_advantages": True}, "within each rank's share only"),
]


@pytest.mark.parametrize(("settings", "words"), REFUSED)
def test_r31_settings_that_contradict_each_other_are_refused_with_the_reason(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        make(**settings)
    assert words in str(caught.value)


def test_the_names_of_the_older_guides_are_understood() -> None:
    config = from_flags("--beta", "0.05", "--target-kl", "0.1", "--entropy-coeff", "0.01", "--cliprange", "0.1")
    assert (config.kl_coef, config.target_kl, config.entropy_coef, config.clip_eps) == (0.05, 0.1, 0.01, 0.1)


def test_trl_s_level_of_the_ratio_chooses_the_loss_that_has_it() -> None:
    config = from_flags("--importance-sampling-level", "sequence")
    assert (config.loss_type, config.clip_eps, config.loss_aggregation) == ("gspo", 3e-4, "sequence")
    assert from_flags("--importance-sampling-level", "sequence", "--loss-type", "luspo").loss_type == "luspo"
    assert from_flags("--importance-sampling-level", "token", "--loss-type", "dapo").loss_type == "dapo"
    with pytest.raises(ConfigError, match="--loss-type dapo has a ratio a token; use gspo"):
        from_flags("--importance-sampling-level", "sequence", "--loss-type", "dapo")


def test_trl_s_names_of_flags_are_aliases() -> None:
    argv = "--max-steps 7 --num-iterations 2 --epsilon 0.1 --delta 2 --scale-rewards none --lr-scheduler-type linear"
    config = from_flags(*argv.split(), "--output-dir", "o", "--save-steps", "4", "--save-total-limit", "2")
    assert (config.training_steps, config.epochs_per_batch, config.clip_eps, config.dual_clip) == (7, 2, 0.1, 2.0)
    assert (config.advantage_norm, config.lr_schedule) == ("none", "linear")
    assert (str(config.run_dir), config.checkpoint_interval, config.keep_last) == ("o", 4, 2)


@pytest.mark.parametrize(("switch", "norm"), [("True", "group"), ("false", "none"), ("batch", "batch")])
def test_trl_s_switch_for_the_scale_of_rewards_is_understood(switch: str, norm: str) -> None:
    """TRL writes `scale_rewards=False` for Dr. GRPO's advantages; it was refused here."""
    assert from_flags("--scale-rewards", switch).advantage_norm == norm
    assert make(advantage_norm=False).advantage_norm == "none"
