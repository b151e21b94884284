"""The course script's options have the same meaning here, and go to the program that owns them."""

from __future__ import annotations

import math
import os
import shlex
from pathlib import Path

import pytest
from pydantic import ValidationError

from atropos_api.common.cliconfig import ConfigError, load_config
from example_trainer.cli import run
from example_trainer.config import TrainingConfig, settings_from
from example_trainer.launcher.run_file import read_settings

ROOT = Path(__file__).parents[3]
DEMO = ("--config", str(ROOT / "configs/demo.yaml"))
TEST_RUN = shlex.split(
    "--n-grpo-steps 10 --eval-steps 2 --rollout-batch-size 64 --train-batch-size 64 --gradient-accumulation-steps 32 "
    "--model-path tiny/chain --wandb-project cs336-grpo --wandb-run-name test-run"
)


def parse(*argv: str) -> TrainingConfig:
    return load_config(TrainingConfig, ["--model-path", "m", *argv], prog="p", description="d")


def test_a_rollout_is_trained_in_steps_of_the_training_batch() -> None:
    config = parse("--rollout-batch-size", "256", "--train-batch-size", "64", "--gradient-accumulation-steps", "16")
    assert config.sequences_per_batch == 256
    assert config.optimizer_steps_per_batch == 4
    assert config.batch_size == 4  # 64 sequences in 16 micro-batches


def test_one_size_alone_is_both() -> None:
    for flag in ("--rollout-batch-size", "--train-batch-size"):
        config = parse(flag, "48")
        assert (config.sequences_per_batch, config.optimizer_steps_per_batch) == (48, 1)


def test_several_passes_over_a_rollout_in_one_training_batch_are_one_step() -> None:
    """The course's off-policy example has 4 epochs: 1024 trained sequences of 256."""
    spelt = "--rollout-batch-size 256 --epochs-per-rollout-batch 4 --train-batch-size 1024 --loss-type grpo_clip"
    config = parse(*spelt.split(), "--cliprange", "0.2", "--gradient-accumulation-steps", "128")
    assert (config.sequences_per_batch, config.optimizer_steps_per_batch) == (256, 1)
    assert (config.loss_type, config.clip_eps) == ("grpo", 0.2)


@pytest.mark.parametrize(
    ("argv", "steps"), [("--epochs-per-rollout-batch 4 --train-batch-size 1024", 1), ("--train-batch-size 64", 4)]
)
def test_the_course_s_rollout_of_256_answers_stays_if_the_training_batch_alone_is_given(argv: str, steps: int) -> None:
    config = parse("--preset", "cs336", *argv.split())
    assert (config.sequences_per_batch, config.optimizer_steps_per_batch) == (256, steps)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--rollout-batch-size 100 --train-batch-size 64", "--train-batch-size 64"),
        ("--train-batch-size 64 --gradient-accumulation-steps 48", "--gradient-accumulation-steps 48"),
        ("--rollout-batch-size many", "--rollout-batch-size many"),
        ("--use-std-normalization maybe", "--use-std-normalization maybe"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_in_one_line(argv: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*argv.split())
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("own", ["--batch-size", "--mini-batches"])
def test_a_size_that_follows_from_the_courses_is_not_given_as_well(own: str) -> None:
    for command in (run, read_settings):
        with pytest.raises(ConfigError, match=f"{own} follows from --rollout-batch-size"):
            command(["--model-name", "m", "--rollout-batch-size", "8", own, "4", "--dry-run"])


def test_std_normalization_is_the_groups_or_none() -> None:
    assert parse("--use-std-normalization", "true").advantage_norm == "group"
    assert parse("--no-use-std-normalization").advantage_norm == "none"
    assert parse().advantage_norm == "group"


def test_single_settings_go_by_the_courses_names() -> None:
    spelt = "--learning-rate 2e-5 --save-dir out --wandb-run-name r --cliprange 0.1 --loss-type no_baseline"
    config = parse(*spelt.split())
    assert math.isclose(config.lr, 2e-5)
    assert (config.save_path, config.wandb_run_name, config.clip_eps) == (Path("out"), "r", 0.1)
    assert config.loss_type == "no_baseline"
    assert parse("--lr", "2e-5").lr == config.lr


def test_a_resolved_configuration_is_accepted_again() -> None:
    config = parse("--rollout-batch-size", "256", "--train-batch-size", "64", "--use-std-normalization", "false")
    assert TrainingConfig.model_validate(config.model_dump()) == config


def test_the_launcher_hands_the_environments_options_on() -> None:
    settings = read_settings(
        [*DEMO, *TEST_RUN, "--group-size=4", "--data-path", "t.jsonl", "--val-data-path", "v.jsonl"]
    )
    assert settings.trainer.training_steps == 10
    assert settings.trainer.sequences_per_batch == 64
    assert settings.section("env") | {} == settings.sections["env"] | {
        "steps_per_eval": "2",
        "group_size": "4",
        "data_path": "t.jsonl",
        "val_data_path": "v.jsonl",
    }


def test_the_environments_options_need_an_environment() -> None:
    with pytest.raises(ConfigError, match=r"env\.server"):
        read_settings(["--model-path", "m", "--eval-steps", "2"])


def test_the_trainer_alone_says_whose_option_it_is() -> None:
    with pytest.raises(ConfigError, match=r"--group-size is an option of the environment: pass --env\.group_size"):
        run(["--model-path", "m", "--group-size", "4"])


def test_what_accelerate_and_torchrun_say_lies_under_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_from({}) == {}
    assert settings_from({"ACCELERATE_MIXED_PRECISION": "no", "WORLD_SIZE": "1", "RANK": "0"}) == {}
    assert settings_from({"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_CPU": "true"}) == {
        "dtype": "bfloat16",
        "device": "cpu",
    }
    assert settings_from({"WORLD_SIZE": "4", "RANK": "2", "LOCAL_RANK": "1"}) == {
        "world_size": 4,
        "trainer_rank": 2,
    }
    with pytest.raises(ConfigError, match="'fp8', in which nothing is trained here"):
        settings_from({"ACCELERATE_MIXED_PRECISION": "fp8"})
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert settings_from(os.environ)["dtype"] == "float16"
    with pytest.raises(ConfigError, match="--dtype float16 with --master-weights none"):
        run(["--model-path", "m", "--master-weights", "none", "--dry-run"])
    assert run(["--model-path", "m", "--master-weights", "none", "--dtype", "bfloat16", "--dry-run"]) == 0


def test_numbers_below_one_are_refused() -> None:
    with pytest.raises(ValidationError, match="--train-batch-size 0"):
        TrainingConfig.model_validate({"model_name": "m", "train_batch_size": 0})


def test_sizes_of_a_rollout_are_kept_whatever_they_are() -> None:
    """7 sequences in 2 micro-batches were 6, when an optimizer step spans several passes."""
    for rollout in range(1, 20):
        for passes in (1, 2, 3):
            spelt = f"--rollout-batch-size {rollout} --train-batch-size {rollout * passes} --epochs-per-batch {passes}"
            for accumulation in (one for one in (1, 2, 3, 4) if rollout * passes % one == 0):
                config = parse(*spelt.split(), "--gradient-accumulation-steps", str(accumulation))
                assert (config.sequences_per_batch, config.optimizer_steps_per_batch) == (rollout, 1)


@pytest.mark.parametrize("flag", ["--gradient-accumulation-steps", "--epochs-per-batch"])
@pytest.mark.parametrize("value", ["0", "-2", "some"])
def test_a_count_of_nothing_is_refused_in_one_line(flag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"^[^\n]*{flag} {value}: a whole number of at least 1 is needed$"):
        parse("--train-batch-size", "8", flag, value)
