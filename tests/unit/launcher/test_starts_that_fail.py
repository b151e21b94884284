"""An impossible launch ends with one line that names flag and remedy: for paths, ports, variables, models."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from atropos_api.common.cliconfig import ConfigError, run_cli
from example_trainer import run as launcher_command
from example_trainer.cli import prepare_directories
from example_trainer.config import TrainingConfig, settings_from
from example_trainer.distributed.ranks import joined_ranks
from example_trainer.errors import ModelNotFound, RanksFailed
from example_trainer.launcher.base_model import require_model, require_on_hub
from example_trainer.launcher.launch import dry_plan, plan_launch
from example_trainer.launcher.run_dir import DirectoryUnusable, plan_run_dir
from example_trainer.launcher.run_file import read_settings
from example_trainer.processes.ports import NoPort


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


@pytest.mark.parametrize("place", ["config.json", "logs/latest", "configs"])
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


def test_a_home_directory_of_an_unknown_user_is_a_missing_model() -> None:
    with pytest.raises(ModelNotFound, match="--model-name ~nobody-of-that-name/model: no such directory"):
        require_model("~nobody-of-that-name/model")
