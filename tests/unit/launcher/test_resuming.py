"""A trainer that is started again goes on from the checkpoint that it wrote last, never from another run's."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path

import pytest

from example_trainer.launcher.launch import Launch
from example_trainer.launcher.preflight import plan_launch
from example_trainer.launcher.restarts import Resumption
from example_trainer.launcher.run_file import read_settings
from example_trainer.launcher.stop_request import Interrupted
from example_trainer.launcher.totals import read_launches
from example_trainer.processes.child import ChildFailed, ChildSpec
from example_trainer.run import carry_out, places_of, resume_command

TRAINER = ChildSpec(name="trainer", command=("python", "-m", "example_trainer.grpo", "--config", "trainer.yaml"))
LAUNCHED_AT = 1_000.0


@pytest.fixture(autouse=True)
def _programs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the shell find the programs by their names."""
    folder = tmp_path_factory.mktemp("bin")
    write_programs(folder)
    monkeypatch.setenv("PATH", str(folder))


def write_programs(folder: Path) -> None:
    for name in ("atropos", "atropos-grpo-run"):
        (folder / name).touch(mode=0o755)


def settings_of(*flags: str):
    return read_settings(["--model-name", "some/model", "--atropos-url", "http://broker:8000", *flags])


def write_checkpoint(root: Path, step: int, *, at: float) -> Path:
    checkpoint = root / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    (root / "latest").unlink(missing_ok=True)
    (root / "latest").symlink_to(checkpoint.name)
    os.utime(root / "latest", (at, at), follow_symlinks=False)
    return checkpoint


def test_a_trainer_is_started_again_from_the_newest_checkpoint(tmp_path: Path) -> None:
    resumption = Resumption(settings_of().trainer, tmp_path)
    again = resumption.resuming(TRAINER)
    assert again.command == (*TRAINER.command, "--resume", "auto")
    assert resumption.resuming(again) == again, "the flag is there once, however often it restarts"


@pytest.mark.parametrize("ahead_seconds", [0.0, 3600.0, -3600.0], ids=["right", "ahead", "behind"])
def test_a_run_that_went_back_to_a_checkpoint_never_jumps_to_a_newer_one_of_before_whatever_clock_the_files_have(
    tmp_path: Path, ahead_seconds: float
) -> None:
    config = settings_of("--resume", str(tmp_path / "checkpoint-6")).trainer
    write_checkpoint(tmp_path, 9, at=time.time() + ahead_seconds - 5)
    resumption = Resumption(config, tmp_path)
    assert resumption.resuming(TRAINER) == TRAINER
    written = write_checkpoint(tmp_path, 8, at=time.time() + ahead_seconds + 5)
    again = resumption.resuming(TRAINER)
    assert again.command == (*TRAINER.command, "--resume", str(written))


def test_a_run_that_went_back_to_another_folder_s_checkpoint_goes_on_from_the_first_of_its_own(tmp_path: Path) -> None:
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "run"
    config = settings_of("--resume", str(elsewhere / "checkpoint-6")).trainer
    resumption = Resumption(config, root)
    assert resumption.resuming(TRAINER) == TRAINER
    written = write_checkpoint(root, 7, at=LAUNCHED_AT)
    assert resumption.resuming(TRAINER).command == (*TRAINER.command, "--resume", str(written))


def test_another_program_is_started_again_by_the_same_command(tmp_path: Path) -> None:
    broker = ChildSpec(name="broker", command=("run-api",))
    assert Resumption(settings_of().trainer, tmp_path).resuming(broker) == broker


@pytest.mark.parametrize(
    "given",
    [
        ["--config", "configs/demo.yaml", "--run-dir", "elsewhere", "--resume", "auto"],
        ["--config", "configs/demo.yaml", "--run_dir=elsewhere", "--resume=auto"],
        ["--config", "configs/demo.yaml", "--output-dir", "elsewhere"],
        ["--config", "configs/demo.yaml"],
    ],
)
def test_the_command_that_goes_on_names_the_run_directory_once(tmp_path: Path, given: list[str]) -> None:
    launch = plan_launch(settings_of("--run-dir", str(tmp_path / "a run")))
    command = shlex.split(resume_command(given, launch))
    wanted = ["--config", "configs/demo.yaml", "--run-dir", str(tmp_path / "a run"), "--resume", "auto"]
    assert command == ["atropos-grpo-run", *wanted]


def test_printed_commands_work_as_printed_where_the_environment_is_not_activated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = plan_launch(settings_of("--run-dir", str(tmp_path / "run")))
    assert f"next: atropos report {tmp_path / 'run'} shows this again" in places_of(launch)
    folder = tmp_path / "an environment"
    folder.mkdir()
    write_programs(folder)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    printed = [shlex.split(line) for line in places_of(launch) if line.startswith("next: ")]
    assert [words[1] for words in printed] == [str(folder / "atropos")] * 3
    assert shlex.split(resume_command([], launch))[0] == str(folder / "atropos-grpo-run")


def test_the_command_that_goes_on_shows_no_secret(tmp_path: Path) -> None:
    launch = plan_launch(settings_of("--run-dir", str(tmp_path)))
    assert "hunter2" not in resume_command(["--api.token", "hunter2"], launch)


def test_the_end_of_a_failed_program_s_log_is_shown_without_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Launch) -> None:
        raise ChildFailed("environment exited with code 1\n  ConnectError: http://me:hunter2@proxy:3128", exit_code=1)

    monkeypatch.setattr(Launch, "go", fail)
    assert carry_out(plan_launch(settings_of("--run-dir", str(tmp_path))), []) == 1
    told = capsys.readouterr().err
    assert told.endswith("\n  ConnectError: http://me:***@proxy:3128\n")


def test_a_full_disk_ends_the_launch_with_one_line_and_the_command_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: Launch) -> None:
        (tmp_path / "metrics.jsonl").touch()
        write_checkpoint(tmp_path, 1, at=LAUNCHED_AT)
        raise OSError(28, "No space left on device", "timeline.json")

    monkeypatch.setattr(Launch, "go", full)
    launch = plan_launch(settings_of("--run-dir", str(tmp_path)))
    assert carry_out(launch, []) == 1
    told, way = capsys.readouterr().err.splitlines()
    assert told.endswith(f"No space left on device: 'timeline.json'; the run directory is {tmp_path}")
    assert way.endswith(f"atropos-grpo-run --run-dir {tmp_path} --resume auto")


@pytest.mark.parametrize(
    ("error", "flags", "told"),
    [
        (ChildFailed("it raised", exit_code=1), (), "correct the cause, then start again with the same command"),
        (
            ChildFailed("it raised", exit_code=1),
            ("--run-dir", "RUN"),
            "correct the cause, then start again with the same command and another --run-dir",
        ),
        (
            ChildFailed("it raised", exit_code=1),
            ("--run-dir", "RUN", "--resume", "auto"),
            "correct the cause, then start again with the same command",
        ),
        (Interrupted(2), (), "start again with the same command"),
    ],
    ids=["failed", "in a named directory", "resumed", "stopped"],
)
def test_a_run_that_ends_before_its_first_checkpoint_is_started_again_and_never_resumed(
    error: Exception,
    flags: tuple[str, ...],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(launch: Launch) -> None:
        launch.run.root.mkdir(parents=True, exist_ok=True)
        launch.run.metrics.touch()
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Launch, "go", fail)
    carry_out(plan_launch(settings_of(*flags)), [])
    *_, way = capsys.readouterr().err.splitlines()
    assert way == f"atropos-grpo-run: there is no checkpoint yet to go on from; {told}"


def test_a_launch_that_was_stopped_leaves_its_hours_in_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise Interrupted(2)

    monkeypatch.setattr(Launch, "_run", stop)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    root = tmp_path / "run"
    flags = ["--model-name", str(tmp_path / "model"), "--atropos-url", "http://broker:8000", "--run-dir", str(root)]
    launch = plan_launch(read_settings(flags))
    with pytest.raises(Interrupted):
        launch.go()
    (recorded,) = read_launches(root)
    assert recorded["start"] == launch.started_at
    assert recorded["end"] > launch.started_at
    assert recorded["cpu_seconds"] > 0
