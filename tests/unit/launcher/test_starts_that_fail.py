"""An impossible launch ends with one line that names flag and remedy: for paths, ports, variables, models."""

from __future__ import annotations

import contextlib
import errno
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from atropos_api.common.cliconfig import ConfigError, run_cli
from example_trainer import run as launcher_command
from example_trainer.cli import prepare_directories
from example_trainer.config import TrainingConfig, settings_from
from example_trainer.distributed.ranks import joined_ranks
from example_trainer.errors import ModelNotFound, RanksFailed
from example_trainer.launcher.base_model import require_model, require_on_hub
from example_trainer.launcher.environment_check import EnvironmentCheck
from example_trainer.launcher.preflight import dry_plan, plan_launch
from example_trainer.launcher.programs import Programs
from example_trainer.launcher.run_dir import DirectoryUnusable, RunDirectoryInUse, plan_run_dir
from example_trainer.launcher.run_file import read_settings
from example_trainer.launcher.run_lock import locked
from example_trainer.processes.ports import NoPort, PortTaken
from example_trainer.run import describe


@pytest.fixture
def occupied(tmp_path: Path) -> Path:
    """A file at the place of a directory."""
    path = tmp_path / "a-file"
    path.write_text("")
    return path


@pytest.mark.parametrize("below", ["", "deep/below"])
@pytest.mark.parametrize("flag", ["run_dir", "save_path", "log_dir"])
def test_the_trainer_names_the_directory_that_it_cannot_write(
    flag: str, below: str, occupied: Path, tmp_path: Path
) -> None:
    places = {"run_dir": tmp_path / "run", flag: occupied / below}
    config = TrainingConfig.model_validate({"model_name": "m", **places})
    with pytest.raises(DirectoryUnusable, match=rf"--{flag.replace('_', '-')} {occupied / below}: cannot be written"):
        prepare_directories(config)


def test_a_directory_without_permission_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everywhere, so the test takes a system directory that refuses all."""
    config = TrainingConfig.model_validate({"model_name": "m", "run_dir": "/proc/run"})
    with pytest.raises(
        DirectoryUnusable, match=r"--run-dir /proc/run: cannot be written \(.*\); name another directory"
    ):
        prepare_directories(config)


@pytest.mark.parametrize("place", ["config.json", "configs"])
def test_the_launcher_names_what_stands_in_its_way_in_the_run_directory(tmp_path: Path, place: str) -> None:
    root = tmp_path / "run"
    (root / place).mkdir(parents=True)
    if place == "configs":
        (root / place).rmdir()
        (root / place).write_text("")
    run = plan_run_dir(root, name="x", log_dir=None, resume=False)

    def begin() -> None:
        run.create()
        run.write_record({})

    with pytest.raises(DirectoryUnusable, match=rf"--run-dir {root}: cannot be written \(.* at .*{place}\)"):
        begin()


def test_the_launcher_names_the_log_directory_that_it_cannot_write(occupied: Path, tmp_path: Path) -> None:
    run = plan_run_dir(tmp_path / "run", name="x", log_dir=occupied / "logs", resume=False)
    with pytest.raises(DirectoryUnusable, match="--log-dir"):
        run.create()


def test_a_new_run_among_the_checkpoints_of_another_is_refused(tmp_path: Path) -> None:
    (tmp_path / "saved" / "checkpoint-500").mkdir(parents=True)
    argv = ["--model-name", "org/model", "--run-dir", str(tmp_path / "run"), "--save-path", str(tmp_path / "saved")]
    with pytest.raises(RunDirectoryInUse, match=r"--save-path \S+/saved already holds checkpoint-500 of a run"):
        plan_launch(read_settings(argv))
    plan_launch(read_settings([*argv, "--resume", "auto"]))


@pytest.mark.parametrize("flags", [(), ("--resume", "auto")])
def test_the_directory_of_a_model_is_not_taken_for_a_run_s(flags: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    argv = ["--model-name", "org/model", "--run-dir", str(tmp_path), *flags]
    with pytest.raises(RunDirectoryInUse, match=rf"--run-dir {tmp_path} holds a config\.json, but no run") as refused:
        plan_launch(read_settings(argv))
    assert "\n" not in str(refused.value)


def test_a_run_directory_may_hold_files_of_a_batch_script_and_what_a_failed_launch_left(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for name in ("broker", "data"):
        (root / name).mkdir(parents=True)
    for name in ("launcher.pid", "launch.log", "run.yaml"):
        (root / name).touch()
    launch = partial(plan_launch, read_settings(["--model-name", "org/model", "--run-dir", str(root)]))
    with locked({"--run-dir": launch().run.root}):
        launch().run.create().write_record({})
        (root / "wandb").mkdir()
    launch()


def test_a_tiny_model_that_there_is_not_is_reported_with_the_nearest(tmp_path: Path) -> None:
    told = r"--model-name tiny/chian: .* did you mean chain\? there are tiny/chain and tiny/add"
    with pytest.raises(ModelNotFound, match=told):
        plan_launch(read_settings(["--model-name", "tiny/chian", "--run-dir", str(tmp_path / "run")]))


def test_a_run_directory_that_is_a_file_or_no_text_and_a_resume_of_no_run_are_reported(occupied: Path) -> None:
    with pytest.raises(DirectoryUnusable, match=rf"--run-dir {occupied}: cannot be written \(File exists\)"):
        plan_launch(read_settings(["--model-name", "org/model", "--run-dir", str(occupied)]))
    for flag in ("--run-dir", "--save-path", "--log-dir", "--resume"):  # as a shell writes a variable that is not set
        with pytest.raises(ConfigError, match=rf"{flag}: an empty text is not a path"):
            read_settings(["--model-name", "org/model", flag, ""])
    with pytest.raises(ConfigError, match=r"--resume auto: .* name that of the run with --run-dir"):
        plan_launch(read_settings(["--model-name", "org/model", "--resume", "auto"]))


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--vllm.port", "abc"), "--vllm.port abc: not a port"),
        (("--api.port", "99999"), "--api.port 99999: not a port"),
        (("--api.port", "0"), "--api.port 0: not a port"),
        (("--num-inference-nodes", "2", "--vllm.port", "65535"), "--vllm.port 65536: not a port"),
    ],
)
def test_a_value_that_is_not_a_port_is_reported(tmp_path: Path, flags: tuple[str, ...], told: str) -> None:
    argv = ["--model-name", "org/model", "--run-dir", str(tmp_path / "run"), "--env.server", __file__, *flags]
    with pytest.raises(NoPort, match=told):
        dry_plan(plan_launch(read_settings(argv)))


@pytest.mark.parametrize(
    ("flags", "port"),
    [
        (("--vllm.port", "28417", "--api.port", "28417"), 28417),
        (("--vllm.port", "28417", "--num-inference-nodes", "2", "--api.port", "28418"), 28418),
    ],
)
def test_a_port_that_two_programs_are_given_is_reported(tmp_path: Path, flags: tuple[str, ...], port: int) -> None:
    """The second program ended with an error that named the first one, once its model was loaded."""
    argv = ["--model-name", "org/model", "--run-dir", str(tmp_path / "run"), "--env.server", __file__, *flags]
    with pytest.raises(PortTaken, match=f"port {port} is asked for by two programs"):
        dry_plan(plan_launch(read_settings(argv)))


@pytest.mark.parametrize(
    ("section", "flags", "told"),
    [
        ("{}", ("--api.prot", "8002"), r"unknown option --api\.prot, did you mean --api\.port\?"),
        ("{}", ("--api.lease", "0"), r"--api\.lease: Input should be greater than or equal to 0\.5, got \"0\""),
        ("{fsync: sometimes}", (), r"--api\.fsync: Input should be 'always', 'interval' or 'never', got \"sometimes\""),
        ("{fsync: sometimes}", ("--api.fsync", "never"), ""),
        ("{}", ("--api.prot", "8002", "--atropos-url", "http://broker:8000"), ""),
    ],
)
def test_what_the_broker_would_refuse_is_refused_before_it_is_started(
    tmp_path: Path, section: str, flags: tuple[str, ...], told: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"trainer: {{model_name: org/model}}\napi: {section}\n")
    refused = pytest.raises(ConfigError, match=told) if told else contextlib.nullcontext()
    with refused:
        plan_launch(read_settings(["--config", str(path), "--run-dir", str(tmp_path / "run"), *flags]))


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"trainer: [", b"a: b: c"])
def test_a_run_file_that_is_not_text_or_not_yaml_is_reported(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"run\.yaml: cannot be read as YAML: "):
        read_settings(["--config", str(path)])


@pytest.mark.parametrize(
    ("variables", "told"),
    [({"WORLD_SIZE": "abc"}, r"\$WORLD_SIZE is 'abc'"), ({"WORLD_SIZE": "2", "RANK": "-1"}, r"\$RANK is '-1'")],
)
def test_a_variable_of_a_starter_that_is_not_a_number_is_reported(variables: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        settings_from(variables)


@pytest.mark.parametrize(
    ("init_method", "told"),
    [
        ("env://", r"\$MASTER_PORT abc names no port"),
        ("tcp://127.0.0.1:99999", "names no port"),
        ("file:///nowhere/meeting", "there is no directory /nowhere"),
        ("tcp://no-such-host.invalid:29500", "could not connect to the others"),
    ],
)
def test_an_invalid_meeting_point_is_reported(init_method: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "abc")
    with (
        pytest.raises(RanksFailed, match=told),
        joined_ranks(0, 2, init_method, device="cpu", timeout_seconds=5.0),
    ):
        pass


def test_a_hub_that_does_not_answer_is_reported_whatever_its_client_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    class SomeHttpError(Exception):
        """An error like those of the HTTP library that newer hub clients use."""

    def fail(*_: object, **__: object) -> None:
        raise SomeHttpError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", fail)
    with pytest.raises(ModelNotFound, match=r"huggingface.co does not answer \(Name or service not known\)"):
        require_on_hub("nobody/nothing")


def test_the_command_ends_with_one_line_and_exit_code_2(
    occupied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = occupied.with_name("model")
    model.mkdir()
    (model / "config.json").write_text("{}")
    monkeypatch.setattr(
        sys,
        "argv",
        ["atropos-grpo-run", "--model-name", str(model), "--env", "arithmetic_server.py", "--run-dir", str(occupied)],
    )
    with pytest.raises(SystemExit) as ended:
        run_cli(launcher_command.run)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert (
        told
        == f"atropos-grpo-run: error: --run-dir {occupied}: cannot be written (File exists); name another directory\n"
    )


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--env.grup_size", "4"), "unknown option --env.grup_size, did you mean --env.group-size?"),
        (("--env.group_size", "x"), "--env.group-size: Input should be a valid integer"),
        (("--config", "{file}"), "env: unknown key 'grup_size', did you mean group_size?"),
    ],
)
def test_a_setting_that_the_environment_refuses_is_told_before_any_program_is_started(
    tmp_path: Path, flags: tuple[str, ...], told: str
) -> None:
    model, file, started = tmp_path / "model", tmp_path / "run.yaml", tmp_path / "started"
    model.mkdir()
    (model / "config.json").write_text("{}")
    file.write_text("env: {server: arithmetic_server.py, grup_size: 4}\n")
    program = ("-c", f"open({str(started)!r}, 'w').close()")
    given = [word.format(file=file) for word in ("--env", "arithmetic_server.py", *flags)]
    argv = ["--model-name", str(model), "--run-dir", str(tmp_path / "run"), *given]
    launch = plan_launch(read_settings(argv))
    launch.programs = Programs(broker=program, vllm=program, trainer=program)
    for begin in (launch.go, partial(describe, launch)):
        with pytest.raises(ConfigError) as refused:
            begin()
        assert str(refused.value).startswith("environment (arithmetic_server.py): ")
        assert told in str(refused.value)
    assert not started.exists()


@pytest.mark.parametrize(
    ("server", "flags", "told"),
    [
        ("gsm8k_server.py", ("--env.data_path", "qestions.jsonl"), "--env.data_path qestions.jsonl: there is no such"),
        ("dataset_server.py", ("--env.dataset_name", "org/data", "--env.reward", "formt"), "no reward 'formt'"),
    ],
)
def test_a_file_or_name_that_is_not_there_is_told_before_any_program_is_started(
    tmp_path: Path, server: str, flags: tuple[str, ...], told: str
) -> None:
    model, started = tmp_path / "model", tmp_path / "started"
    model.mkdir()
    (model / "config.json").write_text("{}")
    program = ("-c", f"open({str(started)!r}, 'w').close()")
    argv = ["--model-name", str(model), "--run-dir", str(tmp_path / "run"), "--env", server, *flags]
    launch = plan_launch(read_settings(argv))
    launch.programs = Programs(broker=program, vllm=program, trainer=program)
    with pytest.raises(ConfigError) as refused:
        launch.go()
    assert str(refused.value).startswith(f"environment ({server}): {told}")
    assert not started.exists()


def test_an_environment_that_imports_atroposlib_is_told_how_to_start_before_any_program_is_started(
    tmp_path: Path,
) -> None:
    written, model, started = tmp_path / "their_env.py", tmp_path / "model", tmp_path / "started"
    written.write_text("from atroposlib.envs.base import BaseEnv\n")
    model.mkdir()
    (model / "config.json").write_text("{}")
    program = ("-c", f"open({str(started)!r}, 'w').close()")
    argv = ["--model-name", str(model), "--run-dir", str(tmp_path / "run"), "--env", str(written)]
    launch = plan_launch(read_settings(argv))
    launch.programs = Programs(broker=program, vllm=program, trainer=program)
    with pytest.raises(ConfigError, match=r"needs atroposlib.*atropos-compat FILE serve"):
        launch.go()
    assert not started.exists()


def test_an_environment_of_which_nothing_is_known_is_not_refused(tmp_path: Path) -> None:
    silent = tmp_path / "silent_env.py"
    silent.write_text("import time; time.sleep(600)")
    argv = ["--model-name", "org/model", "--run-dir", str(tmp_path / "run")]
    for server in (silent, tmp_path / "broken_env.py"):
        server.touch()
        launch = plan_launch(read_settings([*argv, "--env", str(server)]))
        with EnvironmentCheck(launch.settings, dry_plan(launch)) as check:
            check.refuse_unusable()
            check.refuse_unusable(limit_seconds=1.0)


def test_an_environment_that_was_asked_is_ended_although_the_next_one_could_not_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, file = tmp_path / "silent_env.py", tmp_path / "run.yaml"
    silent.write_text("import time; time.sleep(600)")
    file.write_text(f"environments: [{{file: {silent}}}, {{file: {silent}}}]\n")
    argv = ["--config", str(file), "--model-name", "org/model", "--run-dir", str(tmp_path / "run")]
    launch = plan_launch(read_settings(argv))
    plan, started = dry_plan(launch), list[subprocess.Popen[bytes]]()

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            if started:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    with EnvironmentCheck(launch.settings, plan):
        (asked,) = started
        assert asked.poll() is None
    assert asked.returncode is not None


def test_the_settings_that_another_environment_ignores_are_named_once_it_has_answered(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("env: {server: arithmetic_server.py, task: chain, group-size: 4}\n")
    argv = ["--config", str(file), "--model-name", "tiny/chain", "--run-dir", str(tmp_path / "run")]
    launch = plan_launch(read_settings([*argv, "--env", "dataset_server.py"]))
    with EnvironmentCheck(launch.settings, dry_plan(launch)) as check:
        (unanswered,) = check.remarks(tmp_path)
        check.refuse_unusable(limit_seconds=60.0)
        (told,) = check.remarks(tmp_path)
    used = "dataset_server.py used settings written for arithmetic_server.py; "
    assert unanswered == f"{used}{tmp_path}/environment.log names those that it ignored"
    assert told == f"{used}ignored: task"
    launch = plan_launch(read_settings(argv))
    with EnvironmentCheck(launch.settings, dry_plan(launch)) as check:
        assert check.remarks(tmp_path) == []


def test_a_home_directory_of_nobody_is_a_model_that_is_not_there() -> None:
    with pytest.raises(ModelNotFound, match="--model-name ~nobody-of-that-name/model: no such directory"):
        require_model("~nobody-of-that-name/model")
