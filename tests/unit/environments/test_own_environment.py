"""Environments of users: the page's example, the one that `env init` writes, those of packages."""

import ast
import importlib
import os
import re
import subprocess
import sys
from html import escape
from pathlib import Path

import pytest

from atropos_api.common.cliconfig import ConfigError
from atropos_api.common.files import FileInTheWay
from environments.commands import load_environment, run_installed
from environments.scaffold import TEMPLATES, write_environment
from environments.sdk.rehearsal import Rehearsal
from environments.sdk.runtime.commands import evaluate_alone
from environments.sdk.session.tokens_and_masks import messages_of

PAGE = Path(__file__).parents[3] / "docs" / "howto" / "your-own-environment.md"


def example_class():
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    assert len(code.splitlines()) < 60
    scope = {"__name__": "my_env"}
    exec(compile(code, "my_env.py", "exec"), scope)
    return scope["StoriesEnv"]


@pytest.mark.anyio
async def test_the_example_of_the_page_collects_and_evaluates(tmp_path):
    answers = [f"#### {number}" for number in range(100)]
    async with Rehearsal(example_class(), answers, tmp_path) as rehearsal:
        groups = await rehearsal.process(30)
        folder = await rehearsal.evaluate()
    assert all(len(group["tokens"]) == 8 for group in groups)
    assert {score for group in groups for score in group["scores"]} == {0.0, 1.0}
    assert groups[0]["policy_versions"][0][0][2] == 1
    assert (folder / "metrics.json").is_file()


@pytest.mark.anyio
async def test_the_page_of_process_has_the_chat_without_its_templates_marks(tmp_path):
    async with Rehearsal(example_class(), ["#### 7"], tmp_path, include_messages=True) as rehearsal:
        (group,) = await rehearsal.process(1)
    assert {message["role"] for message in group["messages"][0]} == {"user", "assistant"}
    assert [chat[-1]["content"] for chat in group["messages"]] == ["#### 7"] * 8
    page = (tmp_path / "groups.html").read_text()
    assert "|user|" not in page
    assert page.count(escape(group["messages"][0][0]["content"])) == 1
    assert page.count('<pre class="turn sampled">#### 7</pre>') == 8


def test_text_without_a_chat_is_cut_where_the_model_began_and_ended(tokenizer):
    parts = [tokenizer.encode(text) for text in ("one ", "two ", "three")]
    tokens = [token for part in parts for token in part]
    mask = [-100] * len(parts[0]) + parts[1] + [-100] * len(parts[2])
    assert messages_of(None, tokens, mask, tokenizer.decode) == [
        {"role": "user", "content": "one "},
        {"role": "assistant", "content": "two "},
        {"role": "user", "content": "three"},
    ]


@pytest.mark.anyio
async def test_results_of_an_evaluation_are_replaced_only_where_that_is_said(tmp_path):
    async with Rehearsal(example_class(), ["#### 1"], tmp_path) as rehearsal:
        folder = await rehearsal.evaluate()
        before = (folder / "metrics.json").read_bytes()
        rehearsal.env.overwrite_results = False
        rehearsal.env.held_out = []  # another evaluation could not even be reported
        with pytest.raises(FileInTheWay, match="or replace them with --overwrite"):
            await evaluate_alone(rehearsal.env)
        assert (folder / "metrics.json").read_bytes() == before
        rehearsal.env.overwrite_results = True
        await rehearsal.evaluate()


def test_what_env_init_writes_passes_its_own_tests(tmp_path):
    folder = write_environment("blue_sky", tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(PAGE.parents[2])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
    validate = [sys.executable, "blue_sky_env.py", "validate"]
    done = subprocess.run(validate, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "2 of 2 items passed"), done.stderr
    with pytest.raises(ConfigError, match="exists already"):
        write_environment("blue_sky", tmp_path)
    with pytest.raises(ConfigError, match="cannot name an environment"):
        write_environment("../x", tmp_path)


def test_the_run_file_that_env_init_writes_starts_all_programs(tmp_path):
    folder = write_environment("blue_sky", tmp_path)
    (words,) = re.findall(r"`atropos-grpo-run (--config run.yaml)`", (folder / "README.md").read_text())
    command = [sys.executable, "-m", "example_trainer.run", *words.split(), "--dry-run"]
    environment = {**os.environ, "PYTHONPATH": str(PAGE.parents[2])}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"{folder / 'blue_sky_env.py'} serve" in done.stdout


def test_an_installed_package_offers_its_environment_by_name(tmp_path, monkeypatch, capsys):
    folder = write_environment("stories_two", tmp_path)
    info = folder / "atropos_env_stories_two-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: atropos-env-stories-two\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[atropos.environments]\nstories_two = stories_two_env:StoriesTwoEnv\n")
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    assert load_environment("stories_two").name == "stories_two"
    with pytest.raises(ConfigError, match="did you mean stories_two"):
        load_environment("storys_two")
    run_installed([])
    assert "stories_two" in capsys.readouterr().out


def test_the_files_it_writes_are_python():
    for source in ("environment.py.txt", "tests.py.txt"):
        path = TEMPLATES / source
        text = path.read_text().replace("${name}", "x").replace("$class_name", "XEnv").replace("$name", "x")
        ast.parse(text)
