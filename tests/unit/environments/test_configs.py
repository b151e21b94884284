"""With every file of `configs/` the launcher plans a run, and its environment serves alone."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import yaml

from environments.sdk import BaseEnv
from environments.sdk.runtime.cli import read_command
from example_trainer.run import run

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def environment_class(file_name: str) -> type[BaseEnv]:
    module = importlib.import_module(f"environments.{Path(file_name).stem}")
    own = [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]
    (found,) = [value for value in own if isinstance(value, type) and issubclass(value, BaseEnv)]
    return found


def test_the_files_that_the_guides_name_are_there() -> None:
    assert {"demo.yaml", "gsm8k.yaml", "math_zero_shared.yaml", "math_zero_lora.yaml"} <= {p.name for p in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_dry_run_shows_what_would_run(path, capsys, tmp_path) -> None:
    content = yaml.safe_load(path.read_text())
    assert run(["--config", str(path), "--dry-run", "--run-dir", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert content["env"]["server"] in shown
    assert f"weight_bridge_mode: {content['trainer']['weight_bridge_mode']}" in shown
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_an_environment_serves_alone_with_the_same_file(path) -> None:
    """R30: a run file's `env:` and `openai:` sections are the environment's own; none of its keys is unknown to it."""
    content = yaml.safe_load(path.read_text())
    command = read_command(environment_class(content["env"]["server"]), "serve", ["--config", str(path)])
    assert command.env.group_size == content["env"]["group_size"]
    assert command.servers[0].server_type == "vllm"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_longest_rollout_fits_server_and_trainer_and_a_batch_holds_whole_groups(path) -> None:
    content = yaml.safe_load(path.read_text())
    trainer, env = content["trainer"], content["env"]
    assert env["max_token_length"] <= trainer["max_model_len"]
    assert env["max_token_length"] < trainer["seq_len"] <= trainer["max_model_len"]
    assert trainer["batch_size"] * trainer["gradient_accumulation_steps"] % env["group_size"] == 0
