"""Facts about an environment: its source and settings tell about its rollouts, without a start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from environments.facts import Facts, find_facts

FOLDER = Path(__file__).parents[3] / "environments"
CHATS = {
    "arithmetic_server": True,
    "dataset_server": False,  # it chats if there is a template
    "distill_server": True,
    "gsm8k_server": True,
    "judge_server": True,
    "math_server_zero": False,
    "reasoning_gym_server": True,
    "tool_server": True,
    "verifiers_server": False,  # the environment that it wraps decides
}


@pytest.fixture(autouse=True)
def _own_process_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["facts"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


def facts_of(name: str, *flags: str) -> Facts:
    found = find_facts(str(FOLDER / f"{name}.py"), flags)
    assert found is not None
    return found


def test_every_shipped_environment_is_in_the_table() -> None:
    names = {path.stem for path in FOLDER.glob("*.py") if "cli()" in path.read_text(encoding="utf-8")}
    assert names == set(CHATS)


@pytest.mark.parametrize("name", CHATS)
def test_every_shipped_environment_samples_what_the_trainer_recomputes(name: str) -> None:
    facts = facts_of(name)
    assert facts.error is None
    assert facts.chats == CHATS[name]
    assert facts.truncating == []
    assert {one.value for one in facts.temperatures} == {1.0}, "a judge's or an evaluation's are not the rollouts'"
    assert facts.servers[0]["server_type"] == "vllm"


def test_a_setting_that_chooses_between_chat_and_text_is_followed() -> None:
    assert facts_of("dataset_server", "--env.prompt_form", "chat").chats
    assert not facts_of("gsm8k_server", "--env.prompt_template", "r1_zero").chats
    assert "</answer>" in facts_of("gsm8k_server").stops


def test_settings_are_read_as_the_environment_reads_them(tmp_path: Path) -> None:
    run_file = tmp_path / "run.yaml"
    run_file.write_text("trainer: {}\nenv: {group_size: 3}\nopenai: {server_type: sglang}\n")
    facts = facts_of("arithmetic_server", "--config", str(run_file), "--env.task", "add")
    assert (facts.env["group_size"], facts.env["task"], facts.servers[0]["server_type"]) == (3, "add", "sglang")
    assert "did you mean --env.group-size?" in str(facts_of("arithmetic_server", "--env.group_sise", "3").error)


def test_data_that_a_start_would_not_find_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.jsonl").touch()
    for found in ("here.jsonl", "~/here.jsonl", str(tmp_path)):
        assert facts_of("gsm8k_server", "--env.data_path", found).unusable_here is None
    assert facts_of("gsm8k_server", "--env.dataset_name", "org/not-here").unusable_here is None
    told = facts_of("gsm8k_server", "--env.data_path", "here.jsonl", "--env.val_data_path", "~/gone").unusable_here
    assert told == f"--env.val_data_path {tmp_path}/gone: there is no such file or folder; correct the path"
    never = ("--env.steps_per_eval", "0", "--env.eval_at_start", "false", "--env.eval_at_end", "false")
    named = ("--env.data_path", "here.jsonl", "--env.val_data_path", "~/gone")
    assert facts_of("gsm8k_server", *named, *never).unusable_here is None, "it opens no data to evaluate on"


def test_data_of_an_environment_that_may_make_them_are_no_reason_against_a_start(tmp_path: Path) -> None:
    path = tmp_path / "own_env.py"
    path.write_text(
        "from environments.sdk.base_env import BaseEnv\nfrom environments.sdk.config import BaseEnvConfig\n\n"
        "class OwnConfig(BaseEnvConfig):\n    data_path: str = 'made-in-setup.jsonl'\n\n"
        "class OwnEnv(BaseEnv):\n    name = 'own'\n    env_config_cls = OwnConfig\n"
    )
    found = find_facts(str(path), [])
    assert found is not None
    assert (found.missing_files, found.unusable_here) == (["data_path made-in-setup.jsonl"], None)


def test_an_import_that_a_module_does_without_is_not_a_missing_package(tmp_path: Path) -> None:
    path = tmp_path / "own_env.py"
    shipped = (FOLDER / "arithmetic_server.py").read_text(encoding="utf-8")
    optional = "\ntry:\n    import no_such_thing\nexcept ImportError:\n    no_such_thing = None\n"
    path.write_text(shipped + optional)
    found = find_facts(str(path), [])
    assert found is not None
    assert (found.error, found.missing_packages) == (None, [])
    path.write_text(shipped + "\nimport no_such_thing\n")
    found = find_facts(str(path), [])
    assert found is not None
    assert found.missing_packages == ["no_such_thing"]


def test_the_answer_is_json_whatever_the_module_prints(tmp_path: Path) -> None:
    path = tmp_path / "own_env.py"
    path.write_text((FOLDER / "arithmetic_server.py").read_text(encoding="utf-8") + "\nprint('hello')\n")
    command = [sys.executable, "-m", "environments.facts", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=FOLDER.parent)
    assert json.loads(done.stdout)["chats"] is True
    assert "hello" in done.stderr
