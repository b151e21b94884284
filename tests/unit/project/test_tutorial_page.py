"""The tutorial is followed as it is printed: its files saved, its commands read, its environment rehearsed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from environments.sdk.rehearsal import Rehearsal
from environments.sdk.runtime import cli as environment_cli
from example_trainer.commands.main import run as run_atropos
from example_trainer.testing import make_tiny_model
from tests.tutorial import ROOT, TUTORIAL, commands, files

from .programs import NAMED_MODEL, start


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of the page and the project's `configs`."""
    for name, text in files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environment_cli, "run", lambda verb, make_env: 0)
    return tmp_path


def test_the_page_begins_with_the_demo_and_ends_on_a_gpu() -> None:
    first, *_, last = commands()
    assert first == "make demo"
    assert "make demo" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert NAMED_MODEL.search(last)
    assert "stories_env.py" in last


@pytest.mark.parametrize("line", [line for line in commands() if line.startswith("atropos-grpo-run")])
def test_a_command_is_understood(line: str, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(line, model, monkeypatch) == 0
    assert not (folder / "runs").exists()


def test_the_memory_of_the_model_is_printed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = [line for line in commands() if line.startswith("atropos doctor")]
    assert run_atropos(NAMED_MODEL.sub(str(model), line).split()[1:]) == 0
    assert "shared_vllm" in capsys.readouterr().out


def test_the_prompts_are_written_and_the_reward_tells_right_from_wrong(folder: Path) -> None:
    subprocess.run([sys.executable, "make_prompts.py"], check=True, cwd=folder, env={"PYTHONPATH": str(ROOT)})
    lines = (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 400
    scope: dict[str, object] = {}
    exec(compile((folder / "rewards.py").read_text(encoding="utf-8"), "rewards.py", "exec"), scope)
    reward = scope["right"]
    assert callable(reward)
    assert reward(["so #### 7", "#### 8", "7"], result=[7, 7, 7]) == [1.0, 0.0, 0.0]


def test_the_reward_is_validated_as_the_page_says(folder: Path) -> None:
    validated = subprocess.run(
        [sys.executable, "stories_env.py", "validate"],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={"PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert validated.returncode == 0, validated.stderr
    assert "100 of 100 items passed" in validated.stdout


@pytest.mark.anyio
async def test_the_environment_collects_and_evaluates(folder: Path, tmp_path: Path) -> None:
    code = compile((folder / "stories_env.py").read_text(encoding="utf-8"), "stories_env.py", "exec")
    scope: dict[str, object] = {"__name__": "stories_env"}
    exec(code, scope)
    cls = scope["StoriesEnv"]
    async with Rehearsal(cls, [f"#### {number}" for number in range(100)], tmp_path / "groups") as rehearsal:  # type: ignore[arg-type]
        groups = await rehearsal.process(40)
        assert await rehearsal.evaluate()
    assert {score for group in groups for score in group["scores"]} == {0.0, 0.5, 1.0}


def test_every_step_of_the_page_is_linked_to_more() -> None:
    text = TUTORIAL.read_text(encoding="utf-8")
    assert len(re.findall(r"^## \d\. ", text, re.MULTILINE)) == 6
