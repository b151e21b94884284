"""The commands of the page *a run by hand* are the demo's settings, so that both learn alike."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from atropos_api.common.cliconfig import load_config
from atropos_api.config import BrokerConfig
from environments.arithmetic_server import ArithmeticEnv
from environments.sdk.runtime.cli import read_command
from example_trainer.config import TrainingConfig
from example_trainer.serving.config import read_config

ROOT = Path(__file__).parents[3]
DEMO: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "configs/demo.yaml").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs/howto/four-terminals.md").read_text(encoding="utf-8")
NAMES = {"name", "model_name"}
"""Settings that name a run and its model, which the page has in another folder."""


def command(program: str) -> list[str]:
    """Return the arguments of `program` on the page, without the variables in front of it."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    words = [shlex.split(block.replace("\\\n", " ")) for block in blocks]
    (found,) = [line[line.index(program) + 1 :] for line in words if program in line]
    return found


def differing(settings: Any, section: str, *, without: set[str]) -> dict[str, tuple[Any, Any]]:
    """Return the settings of the demo's section that differ on the page, with the page's value and the demo's."""
    wanted = {key: value for key, value in DEMO[section].items() if key not in without}
    return {key: (getattr(settings, key), value) for key, value in wanted.items() if getattr(settings, key) != value}


def test_the_trainer_s_flags_are_the_demo_s() -> None:
    config = load_config(TrainingConfig, command("atropos-grpo"), prog="p", description="d")
    # The context is the server's, which the trainer does not start here.
    assert differing(config, "trainer", without=NAMES | {"max_model_len"}) == {}


def test_the_server_s_flags_are_the_demo_s() -> None:
    config, rest = read_config(command("example_trainer.vllm_api_server"))
    assert (config.max_model_len, config.dtype) == (DEMO["trainer"]["max_model_len"], DEMO["trainer"]["dtype"])
    assert differing(config, "vllm", without=set()) == {}
    assert rest == []


def test_the_environment_s_flags_are_the_demo_s() -> None:
    verb, *flags = command("environments/arithmetic_server.py")
    read = read_command(ArithmeticEnv, "serve", flags)
    assert verb == "serve"
    assert differing(read.env, "env", without={"server"}) == {}
    assert differing(read.servers[0], "openai", without=set()) == {}


@pytest.mark.parametrize("program", ["atropos-grpo", "environments/arithmetic_server.py"])
def test_all_terminals_speak_of_one_broker_and_one_server(program: str) -> None:
    broker = load_config(BrokerConfig, command("run-api"), prog="p", description="d")
    server, _ = read_config(command("example_trainer.vllm_api_server"))
    told = " ".join(command(program))
    assert f"http://localhost:{broker.port}" in told
    assert f"--vllm-port {server.port}" in told or f"http://localhost:{server.port}/v1" in told
