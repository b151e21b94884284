"""One run works in a directory at a time; launches of one moment get directories and logs of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from example_trainer import cli
from example_trainer.cli import own_directories, record_config
from example_trainer.config import TrainingConfig
from example_trainer.distributed.ranks import Ranks
from example_trainer.launcher import run_lock
from example_trainer.launcher.run_dir import DirectoryUnusable, RunDirectoryInUse, plan_run_dir
from example_trainer.launcher.run_lock import locked
from example_trainer.processes.tree import MARK_VARIABLE, python_path

HOLDS = """
import pathlib, sys, time
from example_trainer.launcher.run_lock import locked
with locked({"--run-dir": pathlib.Path(sys.argv[1])}):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_directory_is_refused_while_a_launcher_has_it_and_free_once_that_one_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    variables = {**os.environ, "PYTHONPATH": python_path()}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(RunDirectoryInUse, match=rf"--run-dir {tmp_path}: .*\(pid {holder.pid} on "),
            locked({"--run-dir": tmp_path}),
        ):
            raise AssertionError("two launchers have the directory")
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with locked({"--run-dir": tmp_path}):
        assert f"pid {os.getpid()} " in (tmp_path / run_lock.LOCK_NAME).read_text()


def test_a_file_system_without_locks_refuses_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(run_lock.fcntl, "flock", unsupported)
    with locked({"--run-dir": tmp_path}):
        assert (tmp_path / run_lock.LOCK_NAME).exists()


def test_one_directory_under_two_flags_is_no_other_run_and_both_directories_are_held(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with locked({"--run-dir": tmp_path, "--save-path": tmp_path / "link"}):
        pass
    with (
        locked({"--run-dir": tmp_path / "a", "--save-path": tmp_path / "saved"}),
        pytest.raises(RunDirectoryInUse, match=r"--save-path \S+/saved: another run works there"),
        locked({"--run-dir": tmp_path / "b", "--save-path": tmp_path / "saved"}),
    ):
        raise AssertionError("two runs write their checkpoints there")


def test_a_trainer_started_by_hand_is_refused_beside_another_run_and_one_of_a_launcher_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainingConfig.model_validate({"model_name": "m", "run_dir": tmp_path})
    with locked({"--run-dir": tmp_path}):
        with pytest.raises(RunDirectoryInUse, match="another run works there"), own_directories(config, Ranks()):
            raise AssertionError("two trainers write there")
        monkeypatch.setenv(MARK_VARIABLE, "the launcher's")
        with own_directories(config, Ranks()):
            pass
    monkeypatch.delenv(MARK_VARIABLE)
    with (
        own_directories(config, Ranks()),
        pytest.raises(RunDirectoryInUse, match="another run works there"),
        locked({"--run-dir": tmp_path}),
    ):
        raise AssertionError("a launcher works beside a trainer")


def test_launches_of_one_second_without_a_name_get_directories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "20261126-120000")
    planned = [plan_run_dir(None, name="demo", log_dir=None, resume=False) for _ in range(3)]
    reserved = [run.reserve() for run in planned]
    assert [run.root.name for run in reserved] == [f"demo-20261126-120000{end}" for end in ("", "-2", "-3")]
    assert all(run.log_root == run.root / "logs" for run in reserved)
    later = plan_run_dir(None, name="demo", log_dir=None, resume=False)
    assert later.root.name == "demo-20261126-120000-4"


def test_runs_that_share_a_log_directory_get_attempts_of_their_own(tmp_path: Path) -> None:
    roots = [tmp_path / name for name in ("a", "b")]
    planned = [plan_run_dir(root, name="demo", log_dir=tmp_path / "logs", resume=False) for root in roots]
    created = [run.create() for run in planned]
    assert [run.logs.name for run in created] == ["attempt_1", "attempt_2"]


def test_metrics_that_another_launch_wrote_after_the_plan_are_not_mixed_with_new_ones(tmp_path: Path) -> None:
    run = plan_run_dir(tmp_path, name="demo", log_dir=None, resume=False)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(RunDirectoryInUse, match="already holds the metrics of a run"):
        run.create()


def test_a_disk_that_is_full_when_a_trainer_writes_its_record_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty file can be made on a full disk, so the check of the directory finds nothing."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cli, "write_json", full)
    with pytest.raises(DirectoryUnusable, match=rf"--run-dir {tmp_path}: cannot be written \(No space left"):
        record_config(TrainingConfig(model_name="m", run_dir=tmp_path))
