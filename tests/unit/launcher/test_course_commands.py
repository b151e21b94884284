"""The course guide's two commands are whole runs with `--preset cs336`; no part of a preset is dropped silently."""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from pathlib import Path

import pytest

from atropos_api.common.cliconfig import ConfigError
from environments.gsm8k_server import GSM8kEnv
from environments.sdk.runtime.cli import read_command
from example_trainer.launcher.preflight import plan_launch
from example_trainer.launcher.run_file import RunSettings, read_settings
from example_trainer.run import run

TEST_RUN = r"""
.venv/bin/python scripts/grpo_train_loop.py \
    --n-grpo-steps 10 \
    --eval-steps 2 \
    --rollout-batch-size 64 \
    --train-batch-size 64 \
    --gradient-accumulation-steps 32 \
    --model-path /data/a5-alignment/models/Qwen2.5-Math-1.5B \
    --wandb-project cs336-grpo \
    --wandb-run-name test-run
"""
FULL_RUN = r"""
.venv/bin/python scripts/grpo_train_loop.py \
    --model-path /data/a5-alignment/models/Qwen2.5-Math-1.5B \
    --wandb-project cs336-grpo \
    --wandb-run-name grpo-baseline
"""
MODEL = "/data/a5-alignment/models/Qwen2.5-Math-1.5B"
COURSE = ("--preset", "cs336")


def options(command: str, model: str = MODEL) -> list[str]:
    """Return a command's options as written, with another model in the place of the course cluster's."""
    return [model if word == MODEL else word for word in shlex.split(command.replace("\\\n", " "))[2:]]


def environment_of(settings: RunSettings) -> dict[str, object]:
    (entry,) = settings.environments
    assert entry.server == "gsm8k_server.py"
    return {**entry.env, **settings.flags["env"].values}


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def with_data(in_a_folder: Path) -> Path:
    (in_a_folder / "data/math").mkdir(parents=True)
    for name in ("train", "test"):
        (in_a_folder / f"data/math/{name}.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    return in_a_folder


@pytest.mark.parametrize("command", [TEST_RUN, FULL_RUN])
@pytest.mark.usefixtures("with_data")
def test_both_commands_plan_a_whole_run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*options(command, "tiny/chain"), *COURSE, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for program in ("broker:", "vllm:", "environment:", "trainer:"):
        assert f"\n{program}\n" in shown
    assert "gsm8k_server.py serve" in shown
    assert "use_wandb: true" in shown
    assert "the questions are ./data/math/train.jsonl, for evaluation ./data/math/test.jsonl" in shown


@pytest.mark.usefixtures("with_data")
def test_the_course_s_choices_are_the_environment_s_unless_a_flag_says_otherwise() -> None:
    chosen = environment_of(read_settings([*options(FULL_RUN), *COURSE]))
    config = read_command(GSM8kEnv, "serve", [f"--env.{name}={value}" for name, value in chosen.items()]).env
    assert (config.group_size, config.steps_per_eval, config.max_token_length) == (8, 5, 1024)
    assert (config.prompt_template, config.eval_temperature) == ("r1_zero", 1.0)
    assert config.ensure_scores_are_not_same is False
    assert (config.data_path, config.val_data_path) == (Path("data/math/train.jsonl"), Path("data/math/test.jsonl"))
    typed = ("--eval-steps", "2", "--group-size", "4", "--data-path", "t.jsonl", "--env.max-token-length", "64")
    asked = environment_of(read_settings([*options(FULL_RUN), *COURSE, *typed]))
    assert (asked["steps_per_eval"], asked["group_size"], asked["max_token_length"]) == ("2", "4", "64")
    assert asked["data_path"] == "t.jsonl"
    assert "val_data_path" not in asked, "the test file belongs to the other training file"


def test_without_the_course_s_files_the_questions_are_gsm8k_s_and_it_is_said(in_a_folder: Path) -> None:
    settings = read_settings([*options(FULL_RUN), *COURSE])
    assert environment_of(settings)["dataset_name"] == "openai/gsm8k:main"
    (remark,) = settings.remarks
    assert "openai/gsm8k:main on the Hugging Face hub, because there is no ./data/math/train.jsonl" in remark
    (in_a_folder / "data/math").mkdir(parents=True)
    (in_a_folder / "data/math/train.jsonl").touch()
    (remark,) = read_settings([*options(FULL_RUN), *COURSE]).remarks
    assert "some are held out" in remark


def test_an_environment_on_this_machine_s_model_may_load_questions_from_the_hub(
    in_a_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = in_a_folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert run([*options(FULL_RUN, str(model)), *COURSE, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    environment, trainer = (lines[lines.index(f"{name}:") + 1] for name in ("environment", "trainer"))
    assert "HF_HUB_OFFLINE" not in environment
    assert "HF_HUB_OFFLINE=1" in trainer


@pytest.mark.usefixtures("in_a_folder")
def test_what_of_a_preset_fits_no_environment_of_the_launch_is_said() -> None:
    alone = ["--model-name", "m", "--atropos-url", "http://broker:8000"]
    course = read_settings([*alone, *COURSE])
    assert course.environments == ()
    (remark,) = course.remarks
    assert "gsm8k_server.py --env.group_size 8 --env.steps_per_eval 5" in remark
    assert "--env.ensure_scores_are_not_same false --env.prompt_template r1_zero" in remark
    (remark,) = read_settings([*alone, "--preset", "trl-note"]).remarks
    assert "give yours these settings: --env.group_size 4" in remark
    other = read_settings(["--model-name", "m", "--env", "arithmetic_server.py", *COURSE])
    assert other.environments[0].env["group_size"] == 8
    assert "prompt_template" not in other.environments[0].env
    (remark,) = other.remarks
    assert "prompt_template, eval_temperature and questions are those of gsm8k_server.py" in remark
    assert read_settings(["--model-name", "m", "--preset", "dapo"]).remarks == ()


@pytest.mark.parametrize(
    ("argv", "refused"),
    [
        ("--rollout-batch-size 60", True),
        ("--rollout-batch-size 64", False),
        ("--group-size 7", True),
        ("--group-size 7 --rollout-batch-size 56", False),
        ("--group-size 7 --atropos-url http://localhost:8000", False),
        ("--group-size 7 --env.group_size_schedule 0:8", False),
        ("--env.group_size_schedule 0:8,50:4", False),
        ("--env.group_size_schedule 0:8,50:6", True),
        ("--env.group_size_schedule 0:8,50:6 --training-steps 50", False),
        ("--env.group_size_schedule 0:6,50:8", True),
        ("--env.group_size_schedule 0:6,50:8 --run-dir never-made --resume auto", False),
        ("--env.group_size_schedule 0:8,50:6 --run-dir never-made --resume auto", True),
        ("--group-size 7 --env.group_size_schedule 50:8", True),
    ],
)
def test_a_batch_that_whole_groups_never_fill_is_refused_before_anything_starts(argv: str, refused: bool) -> None:
    """Such a run waited for its first batch, or the first one after a change of the size, until --batch-timeout."""
    settings = read_settings(
        ["--model-name", "m", "--preset", "cs336", "--env.server", "gsm8k_server.py", *argv.split()]
    )
    with pytest.raises(ConfigError, match="never fill a batch") if refused else nullcontext():
        plan_launch(settings)
