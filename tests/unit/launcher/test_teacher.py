"""A teacher is passed to the environments that take one, and its server is started if only its model is named."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import yaml

from atropos_api.common.cliconfig import ConfigError
from environments.distill_server import DistillEnv
from environments.gsm8k_server import GSM8kEnv
from environments.sdk.runtime.cli import read_command
from example_trainer.errors import ModelNotFound
from example_trainer.launcher.endpoints import settle_endpoints
from example_trainer.launcher.plan import Plan, make_plan
from example_trainer.launcher.preflight import dry_plan, plan_launch
from example_trainer.launcher.run_dir import plan_run_dir
from example_trainer.launcher.run_file import read_settings
from example_trainer.processes.ports import PortTaken

DISTILL = ("--env", "distill_server.py", "--distill", "forward_kl")
NAMED = ("--teacher.model_name", "some/teacher")


def plan(tmp_path: Path, *argv: str) -> Plan:
    settings = read_settings(["--model-name", "some/model", "--run-dir", str(tmp_path / "run"), *argv])
    run = plan_run_dir(settings.trainer.run_dir, name="x", log_dir=None, resume=False)
    return make_plan(settings, run, settle_endpoints(settings), model="some/model")


def read_as(environment: type[DistillEnv | GSM8kEnv], made: Plan, tmp_path: Path, name: str = "environment"):
    """Read the environment's part of the plan as the environment itself does."""
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(dict(made.settings_of(name))))
    child = made.child(name)
    assert child is not None
    command = list(child.command)
    return read_command(environment, "serve", ["--config", str(path), *command[command.index("--config") + 2 :]])


def test_a_teacher_that_runs_is_told_to_the_environment_and_none_is_started(tmp_path: Path) -> None:
    made = plan(tmp_path, *DISTILL, "--teacher.base_url", "http://teacher/v1", "--teacher.timeout", "9")
    assert [spec.name for spec in made.children] == ["broker", "vllm", "environment", "trainer"]
    (teacher,) = read_as(DistillEnv, made, tmp_path).teachers or []
    assert (teacher.base_url, teacher.timeout, teacher.server_type) == ("http://teacher/v1", 9, "vllm")


def test_a_teacher_of_which_only_the_model_is_named_gets_a_server_of_the_run(tmp_path: Path) -> None:
    made = plan(tmp_path, *DISTILL, *NAMED, "--teacher.gpu", "3", "--teacher.vllm.max-num-seqs", "4")
    assert [spec.name for spec in made.children] == ["broker", "vllm", "teacher", "environment", "trainer"]
    server, child = made.settings_of("teacher")["vllm"], made.child("teacher")
    assert (server["model"], server["port"]) == ("some/teacher", made.endpoints.teacher_port)
    assert server["share_weights"] is False, "VLLM_ENABLE_SHARED_WEIGHTS is meant for the policy's server"
    assert child is not None
    assert child.command[-2:] == ("--max-num-seqs", "4")
    assert child.environment["CUDA_VISIBLE_DEVICES"] == "3"
    assert child.may_restart
    (teacher,) = read_as(DistillEnv, made, tmp_path).teachers or []
    assert teacher.base_url == f"http://127.0.0.1:{made.endpoints.teacher_port}/v1"
    assert (teacher.model_name, teacher.tokenizer_name) == ("some/teacher", "some/teacher")


def test_a_run_file_s_section_says_the_same_as_the_flags_and_flags_override_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    section = "teacher: {model_name: other/teacher, timeout: 9, vllm: {max_num_seqs: 4, dtype: float16}}\n"
    path.write_text("trainer: {distill: reverse_kl}\nenv: {server: distill_server.py}\n" + section)
    made = plan(tmp_path, "--config", str(path), *NAMED, "--teacher.vllm.dtype", "float32")
    server, child = made.settings_of("teacher")["vllm"], made.child("teacher")
    assert (server["model"], server["max_num_seqs"]) == ("some/teacher", 4)
    assert child is not None
    assert child.command[-2:] == ("--dtype", "float32"), "it comes after the file, which it overrides"
    (teacher,) = read_as(DistillEnv, made, tmp_path).teachers or []
    assert teacher.timeout == 9


@pytest.mark.parametrize(
    ("flags", "policy", "teacher"),
    [
        ((), 0.225, 0.225),
        (("--teacher.gpu", "1"), 0.45, 0.45),
        (("--teacher.vllm.gpu_memory_utilization", "0.3"), 0.45, 0.45),
    ],
)
def test_servers_on_one_gpu_divide_its_memory_unless_the_teacher_has_its_own(
    tmp_path: Path, flags: tuple[str, ...], policy: float, teacher: float
) -> None:
    made = plan(tmp_path, *DISTILL, *NAMED, *flags)
    assert made.settings_of("vllm")["vllm"]["gpu_memory_utilization"] == policy
    assert made.settings_of("teacher")["vllm"]["gpu_memory_utilization"] == teacher, "its flag overrides the file"
    restarting = plan(tmp_path, *DISTILL, *NAMED, *flags, "--weight-bridge-mode", "none")
    told = restarting.settings_of("trainer")["trainer"].get("gpu_memory_utilization", 0.45)
    assert told == policy


def test_of_several_environments_those_with_a_teacher_key_get_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "teacher: {base_url: http://common/v1}\n"
        "environments:\n"
        "- {file: gsm8k_server.py}\n"
        "- {file: distill_server.py, teacher: {timeout: 9}}\n"
    )
    made = plan(tmp_path, "--config", str(path), "--distill", "forward_kl")
    assert read_as(GSM8kEnv, made, tmp_path, "environment-1").teachers is None
    (teacher,) = read_as(DistillEnv, made, tmp_path, "environment-2").teachers or []
    assert (teacher.base_url, teacher.timeout) == ("http://common/v1", 9)


def test_an_environment_without_a_teacher_refuses_one_instead_of_ignoring_it(tmp_path: Path) -> None:
    made = plan(tmp_path, *DISTILL, *NAMED)
    with pytest.raises(ConfigError, match=r"unknown option --teacher\.base_url"):
        read_as(GSM8kEnv, made, tmp_path)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("--env", "distill_server.py", *NAMED), r"add --distill forward_kl"),
        (("--distill", "forward_kl", *NAMED), r"name one with --env distill_server\.py"),
        ((*DISTILL, "--teacher.modl_name", "m"), r"\(teacher\.modl_name, did you mean model_name\?\); name one with"),
        ((*DISTILL, "--teacher.timeout", "9"), r"--teacher\.base_url, or the model of a new one with --teacher\.model"),
        (
            (*DISTILL, "--teacher.base_url", "http://t/v1", "--teacher.gpu", "1"),
            r"teacher\.gpu: the launcher starts no",
        ),
        ((*DISTILL, "--teacher.base_url", "http://t/v1", "--teacher.vllm.seed", "1"), r"teacher\.vllm\.seed: the"),
        ((*DISTILL, *NAMED, "--teacher.vllm", "fast"), r"teacher\.vllm takes settings of the .* server, got \"fast\""),
    ],
)
def test_a_teacher_that_would_be_of_no_use_is_refused_in_one_line(argv: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        read_settings(["--model-name", "some/model", *argv])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("teacher", "told"),
    [
        ("{timeout: 3}", "teacher: it has no server; name one"),
        ("", "teacher: it has no server; name one"),
        ("{model_nam: t}", r"no server \(teacher\.model_nam, did you mean model_name\?\)"),
    ],
)
def test_a_teacher_of_one_of_several_environments_needs_a_server_too(tmp_path: Path, teacher: str, told: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"environments: [{{file: distill_server.py, teacher: {teacher}}}, {{file: gsm8k_server.py}}]")
    flags = ["--model-name", "some/model", "--distill", "forward_kl", "--config", str(path)]
    with pytest.raises(ConfigError, match=told):
        read_settings(flags)
    assert read_settings([*flags, *NAMED]).environments[0].teacher is not None


@pytest.mark.parametrize("own", ["model_name: other/teacher", "gpu: 1", "vllm: {max_num_seqs: 2}"])
def test_a_second_teacher_is_refused_since_one_server_is_started_for_all(tmp_path: Path, own: str) -> None:
    """Its model was the first one's, without a word."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "teacher: {model_name: some/teacher}\n"
        f"environments: [{{file: distill_server.py, teacher: {{{own}}}}}, {{file: distill_server.py, teacher: }}]\n"
    )
    flags = ["--model-name", "some/model", "--distill", "forward_kl", "--config", str(path)]
    with pytest.raises(ConfigError, match=r"environments: teacher\.\w+ .*the launcher starts one teacher"):
        read_settings(flags)
    path.write_text(path.read_text().replace(own, "timeout: 9"))
    assert read_settings([*flags, *NAMED]).environments[0].teacher["timeout"] == 9


def test_an_address_with_a_password_is_in_no_record_and_no_command_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    url = "http://me:hush-hush@t/v1"
    path.write_text(f"env: {{server: distill_server.py}}\nteacher: {{base_url: '{url}'}}")
    for made in (
        plan(tmp_path, "--config", str(path), "--distill", "forward_kl"),
        plan(tmp_path, *DISTILL, "--teacher.base_url", url),
    ):
        child = made.child("environment")
        assert child is not None
        assert "hush-hush" not in " ".join(child.command) + repr(made.files)
        assert child.secret_settings["teacher"]["base_url"] == url


def test_a_teacher_without_a_model_directory_or_a_free_port_is_reported_with_its_flag(tmp_path: Path) -> None:
    argv = ["--model-name", "some/model", "--run-dir", str(tmp_path), *DISTILL]
    with pytest.raises(ModelNotFound, match=r"--teacher\.model_name /nowhere: no such directory"):
        dry_plan(plan_launch(read_settings([*argv, "--teacher.model_name", "/nowhere"])))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(PortTaken, match=r"--teacher\.vllm\.port"):
            plan(tmp_path, *DISTILL, *NAMED, "--teacher.vllm.port", port)


def test_a_teacher_s_key_is_in_no_record_and_no_command_line(tmp_path: Path) -> None:
    made = plan(tmp_path, *DISTILL, "--teacher.base_url", "http://t/v1", "--teacher.api_key", "hush-hush")
    child = made.child("environment")
    assert child is not None
    assert "hush-hush" not in " ".join(child.command) + repr(made.files)
    assert child.secret_settings["teacher"]["api_key"] == "hush-hush"
