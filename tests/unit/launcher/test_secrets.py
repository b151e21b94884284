"""A launch shows its secrets nowhere: in no record, in no `--dry-run`, in no command line of its programs."""

from __future__ import annotations

import json
import os
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from atropos_api.common.cliconfig import ConfigError, load_config
from atropos_api.common.secrets import TokenSource
from atropos_api.config import BrokerConfig
from environments.arithmetic_server import ArithmeticEnv
from environments.sdk.runtime.cli import read_command
from example_trainer.config import TrainingConfig
from example_trainer.launcher.endpoints import broker_token, settle_endpoints
from example_trainer.launcher.launch import Launch
from example_trainer.launcher.plan import Plan, make_plan, resolved
from example_trainer.launcher.preflight import plan_launch
from example_trainer.launcher.run_dir import write_yaml
from example_trainer.launcher.run_file import read_settings, trainer_settings
from example_trainer.launcher.supervisor import Supervisor
from example_trainer.processes.child import ChildSpec
from example_trainer.processes.tree import wait_until
from example_trainer.run import describe
from example_trainer.serving.config import read_config

SECRETS = {
    "broker": "s3cret-broker-token",
    "bridge": "s3cret-bridge-token",
    "api": "s3cret-inference-key",
    "vllm": "s3cret-vllm-key",
    "hub": "s3cret-hub-token",
    "redis": "s3cret-redis-password",
    "prefix": "s3cret-path-token",
}
FLAGS = (
    *("--env.server", "arithmetic_server.py", "--env.use_wandb", "false"),
    *("--atropos-token", SECRETS["broker"], "--bridge-token", SECRETS["bridge"]),
    *("--openai.api_key", SECRETS["api"], "--vllm.api-key", SECRETS["vllm"], f"--vllm.hf-token={SECRETS['hub']}"),
    *("--api.store", f"redis://user:{SECRETS['redis']}@host/0", "--api.keep-batches", "2"),
    *("--env.rollout_server_url", f"http://host/t/{SECRETS['prefix']}", "--env.group_size", "4"),
)


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    argv = ["--model-name", "some/model", "--run-dir", str(tmp_path / "run"), *FLAGS]
    monkeypatch.setattr(sys, "argv", ["atropos-grpo-run", *argv])
    return plan_launch(read_settings(argv))


@pytest.fixture
def plan(launch: Launch) -> Plan:
    return make_plan(launch.settings, launch.run, settle_endpoints(launch.settings), model="some/model")


def leaked(text: str) -> list[str]:
    return [name for name, secret in SECRETS.items() if secret in text]


def test_no_command_line_of_a_child_holds_a_secret(plan: Plan) -> None:
    for child in plan.children:
        assert leaked(" ".join(child.command)) == []


def test_the_records_and_the_dry_run_hold_none_and_are_private(launch: Launch, plan: Plan) -> None:
    launch.run.create()
    for path, content in plan.files.items():
        write_yaml(path, content)
    launch.run.write_record(resolved(launch.settings, plan))
    records = [launch.run.root / "config.json", *launch.run.configs.iterdir()]
    assert len(records) == 5
    for path in records:
        assert leaked(path.read_text()) == [], path
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "--api.keep-batches" in json.loads((launch.run.root / "config.json").read_text())["command"]
    assert leaked(describe(launch)) == []


def test_each_program_reads_its_secrets_from_a_second_file(launch: Launch, plan: Plan, tmp_path: Path) -> None:
    launch.run.create()
    for path, content in plan.files.items():
        write_yaml(path, content)
    argv: dict[str, list[str]] = {}
    for child in plan.children:
        secret = tmp_path / f"{child.name}.yaml"
        write_yaml(secret, child.secret_settings)
        argv[child.name] = [*child.command[child.command.index("--config") :], "--config", str(secret)]
    broker = load_config(BrokerConfig, argv["broker"], prog="p", description="d", section="api")
    assert (broker.store, broker.keep_batches) == (f"redis://user:{SECRETS['redis']}@host/0", 2)
    server, rest = read_config(argv["vllm"])
    assert (server.model_extra, rest) == ({"api_key": SECRETS["vllm"], "hf_token": SECRETS["hub"]}, [])
    environment = read_command(ArithmeticEnv, "serve", argv["environment"])
    assert environment.servers[0].api_key == SECRETS["api"]
    assert environment.env.rollout_server_url.endswith(SECRETS["prefix"])
    assert environment.env.group_size == 4
    settings, _, _ = trainer_settings(argv["trainer"])
    trainer = TrainingConfig(**settings)
    assert (trainer.atropos_token, trainer.bridge_token) == (SECRETS["broker"], SECRETS["bridge"])


def test_one_bridge_token_for_the_trainer_and_its_servers(launch: Launch, plan: Plan) -> None:
    """A trainer's token does not work at a server that has another."""
    assert {child.environment["ATROPOS_BRIDGE_TOKEN"] for child in plan.children} == {SECRETS["bridge"]}


def test_an_inherited_bridge_token_stays_that_of_servers_which_run_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATROPOS_BRIDGE_TOKEN", SECRETS["bridge"])
    elsewhere = ("--num-inference-nodes", "1", "--inference-urls", "http://gpu-host:9001")
    made = planned(tmp_path, *elsewhere)
    assert {child.environment["ATROPOS_BRIDGE_TOKEN"] for child in made.children} == {SECRETS["bridge"]}


def test_a_token_file_is_named_to_every_program_and_contradicted_by_no_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    path.write_text(SECRETS["broker"])
    monkeypatch.setenv("ATROPOS_TOKEN", "inherited-token")
    monkeypatch.chdir(tmp_path)
    made = planned(tmp_path, "--atropos-token-file", "token")
    for child in made.children:
        environment = {**os.environ, **child.environment}
        assert TokenSource.settle(None, None, environment).value == SECRETS["broker"]
        assert leaked(repr(child)) == []


@pytest.mark.parametrize(
    ("flags", "token"),
    [
        (("--atropos-token", "for-all-of-them"), "for-all-of-them"),
        (("--api.token", "of-our-own-broker"), "of-our-own-broker"),
        ((), "inherited-token"),
    ],
)
def test_the_launcher_watches_the_broker_with_the_token_of_its_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], token: str
) -> None:
    monkeypatch.setenv("ATROPOS_TOKEN", "inherited-token")
    argv = ["--model-name", "some/model", "--env.server", __file__, *flags]
    assert broker_token(read_settings(argv)).value == token
    made = planned(tmp_path, *flags)
    assert {child.environment["ATROPOS_TOKEN"] for child in made.children} == {token}


def test_a_key_typed_for_one_of_several_servers_of_a_file_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("env: {server: arithmetic_server.py}\nopenai: [{timeout: 1}, {timeout: 2}]\n")
    with pytest.raises(ConfigError, match=r"--openai\.api_key: openai is a list of 2") as caught:
        planned(tmp_path, "--config", str(path), "--openai.api_key", SECRETS["api"])
    assert leaked(str(caught.value)) == []


def test_a_secret_reaches_a_program_in_a_private_file_that_goes_with_the_run(tmp_path: Path) -> None:
    copy = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(pathlib.Path(sys.argv[-1]).read_text())"
    wait = "; import time; time.sleep(600)"
    command = (sys.executable, "-c", copy + wait, str(tmp_path / "copy"))
    spec = ChildSpec(name="broker", command=command, secret_settings={"api": {"token": SECRETS["broker"]}})
    with Supervisor(tmp_path) as supervisor:
        child = supervisor.start(replace(spec))
        assert wait_until(lambda: (tmp_path / "copy").is_file() and bool((tmp_path / "copy").read_text()), 10)
        shown = child.handle.cmdline()
        path = Path(shown[-1])
        assert shown[-2] == "--config"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(child.log_path.stat().st_mode) == 0o600
    assert yaml.safe_load((tmp_path / "copy").read_text()) == {"api": {"token": SECRETS["broker"]}}
    assert leaked(" ".join(shown)) == []
    assert not path.exists()


def planned(tmp_path: Path, *flags: str) -> Plan:
    argv = ["--model-name", "some/model", "--run-dir", str(tmp_path / "run"), "--env.server", __file__, *flags]
    launched = plan_launch(read_settings(argv))
    return make_plan(launched.settings, launched.run, settle_endpoints(launched.settings), model="some/model")
