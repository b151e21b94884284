"""Presets lie under files and flags; each is a whole configuration that the trainer accepts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest

from atropos_api.common.cliconfig import ConfigError, load_config
from example_trainer.checkpointing import STATE_FILE, link_as_course
from example_trainer.cli import run
from example_trainer.config import TrainingConfig
from example_trainer.errors import CheckpointError
from example_trainer.launcher.run_file import read_settings
from example_trainer.options.presets import PRESETS, PresetName

ROOT = Path(__file__).parents[3]


def parse(*argv: str) -> TrainingConfig:
    return load_config(TrainingConfig, ["--model-name", "m", *argv], prog="p", description="d")


def test_every_preset_has_a_name_that_the_flag_takes() -> None:
    assert set(PRESETS) == set(get_args(PresetName))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_s_dry_run_shows_what_it_sets(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--model-name", "m", "--preset", name, "--dry-run"]) == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert {key: shown[key] for key in PRESETS[name].settings} == dict(PRESETS[name].settings)
    assert shown["preset"] == name
    config = parse("--preset", name)
    assert TrainingConfig.model_validate(config.model_dump()) == config, "the resolved settings resolve to themselves"


def test_a_dry_run_says_which_settings_have_no_effect_and_keeps_its_output_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["--model-name", "m", "--weight-bridge-mode", "none", "--in-flight", "finish", "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["in_flight"] == "finish"
    assert shown.err.startswith("--in-flight finish has no effect in mode none")


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("mode", ["shared_vllm", "lora_restart"])
def test_a_preset_works_in_other_modes_too(name: str, mode: str) -> None:
    if mode == "shared_vllm" or name != "seed":
        assert parse("--preset", name, "--weight-bridge-mode", mode).preset == name


def test_flags_and_files_win_over_a_preset(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("trainer: {preset: dapo, dual_clip: 4.0}\n")
    argv = ["--model-name", "m", "--config", str(tmp_path / "run.yaml"), "--clip-eps-high", "0.21"]
    config = load_config(TrainingConfig, argv, prog="p", description="d", section="trainer")
    assert (config.loss_type, config.dual_clip, config.clip_eps_high) == ("dapo", 4.0, 0.21)
    assert parse("--preset", "recommended", "--learning-rate", "2e-6").lr == 2e-6


def test_a_loss_brings_its_paper_s_form_under_a_preset_as_well() -> None:
    assert (parse("--preset", "gspo").clip_eps, parse("--preset", "gspo").loss_aggregation) == (3e-4, "sequence")
    assert parse("--preset", "dr_grpo").loss_aggregation == "constant"
    assert parse("--preset", "dapo").clip_eps_high == 0.28


@pytest.mark.parametrize("loss", [("--loss-type", "gspo"), ("--importance-sampling-level", "sequence")])
def test_a_loss_that_is_given_brings_its_paper_s_form_over_that_of_a_preset_for_another(loss: tuple[str, str]) -> None:
    """The preset's upper clip of 0.28 stood beside GSPO's lower one of 3e-4."""
    config = parse("--preset", "recommended", *loss)
    assert (config.loss_type, config.clip_eps, config.clip_eps_high) == ("gspo", 3e-4, 4e-4)
    assert (config.loss_aggregation, config.advantage_norm, config.lr) == ("sequence", "none", 1e-6)
    config = parse("--preset", "recommended", *loss, "--clip-eps-high", "0.3", "--loss-aggregation", "token")
    assert (config.clip_eps, config.clip_eps_high, config.loss_aggregation) == (3e-4, 0.3, "token")


def test_r19_the_seed_s_preset_switches_what_its_tables_leave_open_and_nothing_else() -> None:
    plain, seed = parse().model_dump(), parse("--preset", "seed").model_dump()
    changed = {name for name, value in seed.items() if value != plain[name]}
    assert changed == {
        "preset",
        "loss_aggregation",
        "advantage_std",
        "dual_clip",
        "master_weights",
        "gradient_checkpointing",
        "pad_to",
    }


def test_the_recommended_rate_for_adapters_is_ten_times_that_for_full_weights() -> None:
    full, adapters = (
        parse("--preset", "recommended"),
        parse("--preset", "recommended", "--weight-bridge-mode", "lora_only"),
    )
    assert adapters.lr == pytest.approx(10 * full.lr)
    assert (adapters.lora_dropout, adapters.lora_target_modules) == (0.0, ["all-linear"])


def test_the_course_s_preset_takes_256_answers_a_step_or_what_the_course_s_flags_say() -> None:
    course = parse("--preset", "cs336")
    assert (course.training_steps, course.sequences_per_batch, course.gradient_accumulation_steps) == (200, 256, 128)
    assert (course.optimizer_steps_per_batch, course.checkpoint_interval) == (1, 10)
    short = parse("--preset", "cs336", "--rollout-batch-size", "64", "--n-grpo-steps", "10")
    assert (short.training_steps, short.sequences_per_batch) == (10, 64)


def test_the_course_s_accumulation_divides_its_batch_and_does_not_resize_it() -> None:
    """In the course's script a smaller number of micro-batches makes larger ones; here it made a batch of 64."""
    course = parse("--preset", "cs336", "--gradient-accumulation-steps", "32")
    assert (course.sequences_per_batch, course.batch_size, course.optimizer_steps_per_batch) == (256, 8, 1)
    assert TrainingConfig.model_validate(course.model_dump(exclude_unset=True)) == course
    sized = parse("--preset", "cs336", "--gradient-accumulation-steps", "32", "--batch-size", "2")
    assert sized.sequences_per_batch == 64, "a size in this trainer's own terms"


def test_the_trl_guide_s_preset_is_its_configuration() -> None:
    config = parse("--preset", "trl-note")
    assert (config.sequences_per_batch, config.batch_size, config.mini_batches) == (128, 4, 8)
    assert (config.kl_coef, config.target_kl, config.lr) == (0.05, 0.1, 5e-6)


@pytest.mark.parametrize("preset", ["cs336", "trl-note"])
def test_the_guides_clip_has_no_second_bound_for_negative_advantages(preset: str) -> None:
    assert parse("--preset", preset, "--loss-type", "grpo_clip").dual_clip is None
    assert parse("--preset", preset, "--loss-type", "grpo_clip", "--delta", "4").dual_clip == 4.0


def test_the_launcher_hands_the_environment_its_part_of_a_preset() -> None:
    demo = ["--config", str(ROOT / "configs/demo.yaml"), "--preset", "trl-note"]
    (given,) = read_settings(demo).environments
    assert given.env["group_size"] == 8, "the file says so"
    (left_open,) = read_settings(
        ["--model", "m", "--env.server", "gsm8k_server.py", "--preset", "trl-note"]
    ).environments
    assert left_open.env["group_size"] == 4


def test_without_a_baseline_groups_of_equal_rewards_are_sent_since_they_teach() -> None:
    """By an environment's own default, those whose answers are all right would be dropped and never reinforced."""
    argv = ["--model", "m", "--env.server", "gsm8k_server.py", "--preset"]
    (raw,) = read_settings([*argv, "no_baseline"]).environments
    assert raw.env["ensure_scores_are_not_same"] is False
    (centred,) = read_settings([*argv, "reinforce_with_baseline"]).environments
    assert "ensure_scores_are_not_same" not in centred.env


def test_an_unknown_preset_is_one_line_that_names_them() -> None:
    with pytest.raises(ConfigError, match=r"--preset: .*'recommended'.*got \"grppo\"") as caught:
        parse("--preset", "grppo")
    assert "\n" not in str(caught.value)


def test_checkpoints_are_linked_by_the_course_s_names_and_links_go_with_what_they_point_to(tmp_path: Path) -> None:
    for step in (10, 20):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / STATE_FILE).write_text("{}")
    link_as_course(tmp_path, final="checkpoint-20")
    assert (tmp_path / "checkpoint_step_10").resolve() == tmp_path / "checkpoint-10"
    assert (tmp_path / "final_model").resolve() == tmp_path / "checkpoint-20"
    shutil.rmtree(tmp_path / "checkpoint-10")
    link_as_course(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("checkpoint_step_*")) == ["checkpoint_step_20"]


@pytest.mark.parametrize("name", ["checkpoint_step_10", "final_model"])
def test_a_copied_run_whose_course_links_became_directories_says_what_to_remove(tmp_path: Path, name: str) -> None:
    """The trainer ended with a traceback after its first checkpoint."""
    for folder in ("checkpoint-10", name):
        (tmp_path / folder).mkdir()
    with pytest.raises(CheckpointError, match=f"Is a directory.*{name}.*remove a directory"):
        link_as_course(tmp_path, final="checkpoint-10")
