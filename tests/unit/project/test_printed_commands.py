"""Each command that the published guides print is understood by its program as written, with a tiny local model in the
place of the named one; one that is not is refused in one line with the flag that works.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from atropos_api.common.cliconfig import ConfigError, load_config
from environments.sdk.runtime import cli as environment_cli
from example_trainer.config import TrainingConfig
from example_trainer.serving.config import read_config
from example_trainer.serving.generate import RequestParser
from example_trainer.testing import make_tiny_model

from .programs import NAMED_MODEL, shell_words, split_block, start
from .seed_commands import (
    COMMANDS,
    COURSE_COMMANDS,
    COURSE_FRAGMENTS,
    GENERATE_BODY,
    INSTALLS,
    LAYER_QUERY,
    TRAINER_FRAGMENTS,
    Printed,
)

ROOT = Path(__file__).parents[3]
ADAPTER_MODE = ["--weight-bridge-mode", "lora_restart"]
VARIABLES = re.compile(r"(?:[A-Z_]+=\S+\s+)*")
OURS = (
    "run-api",
    "atropos-grpo",
    "atropos-sft",
    "python environments/",
    *(f"python -m example_trainer.{name}" for name in ("grpo", "run", "vllm")),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the course's data; environments stop there once their settings are read."""
    monkeypatch.chdir(tmp_path)
    for name in ("train", "test"):
        path = tmp_path / "data/math" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"question": "2 + 2?", "answer": "4"}) + "\n")
    monkeypatch.setattr(environment_cli, "run", lambda verb, make_env: 0)
    return tmp_path


def name_of(printed: Printed) -> str:
    return f"{printed.guide} {' '.join(printed.text.split())[:60]}"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("printed", COMMANDS, ids=name_of)
def test_a_printed_command_is_understood_as_written(
    printed: Printed, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(printed.text, model, monkeypatch) == 0
    shown = capsys.readouterr().out
    if printed in COURSE_COMMANDS and "--help" not in printed.text:
        assert "gsm8k_server.py" in shown or "dataset_server.py" in shown, "no environment would be started"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("fragment", TRAINER_FRAGMENTS, ids=range(len(TRAINER_FRAGMENTS)))
@pytest.mark.parametrize("mode", ["none", "lora_restart"])
def test_printed_flags_may_be_added_to_the_trainers_command(
    fragment: str, mode: str, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"python -m example_trainer.grpo --model-name {model} --weight-bridge-mode {mode}"
    added = shell_words(fragment)
    if added[0].startswith("--lora") and mode == "none":
        with pytest.raises(ConfigError, match=r"adapters are for --weight-bridge-mode lora_only") as caught:
            start(command, model, monkeypatch, more=added)
        assert "\n" not in str(caught.value)
        return
    assert start(command, model, monkeypatch, more=added) == 0
    assert set(flag_values(added).items()) <= set(flag_values_shown(capsys.readouterr().out).items())


def flag_values(words: Sequence[str]) -> dict[str, str]:
    """Return the settings that the words of a fragment name, each with its value as text."""
    config = load_config(TrainingConfig, ["--model-name", "m", *ADAPTER_MODE, *words], prog="p", description="d")
    names = {word[2:].replace("-", "_") for word in words if word.startswith("--")}
    return {name: str(getattr(config, name)) for name in names}


def flag_values_shown(text: str) -> dict[str, str]:
    return {name: str(value) for name, value in json.loads(text).items()}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("fragment", COURSE_FRAGMENTS, ids=range(len(COURSE_FRAGMENTS)))
def test_printed_flags_may_be_added_to_the_courses_command(
    fragment: str, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(COURSE_COMMANDS[1].text, model, monkeypatch, more=shell_words(fragment)) == 0
    shown = capsys.readouterr().out
    assert "gsm8k_server.py" in shown or "dataset_server.py" in shown, "no environment would be started"


@pytest.mark.usefixtures("folder")
def test_the_server_type_that_the_guide_warns_of_is_refused_with_the_one_that_works(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """003 prints `--openai.server_type openai` as the wrong form, and `vllm` as the right one."""
    serve = "python environments/gsm8k_server.py serve"
    assert start(serve, model, monkeypatch, more=["--openai.server_type", "vllm"]) == 0
    with pytest.raises(Exception, match=r"--openai\.server_type vllm") as caught:
        start(serve, model, monkeypatch, more=["--openai.server_type", "openai"])
    assert "\n" not in str(caught.value)


def test_the_body_that_the_guide_posts_is_a_request_for_tokens_with_logprobs() -> None:
    request = RequestParser().parse(GENERATE_BODY.encode())
    assert (request.prompt, request.max_tokens) == ("Hello", 5)
    assert request.logprob_count == 0, "the sampled token's logprob is in the answer without being asked for"


@pytest.mark.parametrize("command", INSTALLS)
def test_what_the_guides_install_is_here_to_be_installed(command: str) -> None:
    last = shlex.split(command)[-1]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    if last.startswith("."):
        assert last.strip(".[]") in extras
    else:
        assert (ROOT / last).is_file()


def test_the_guides_way_to_count_layers_gives_the_range_that_a_layer_filter_takes(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(compile(NAMED_MODEL.sub(str(model), LAYER_QUERY), "guide", "exec"), {})
    assert "valid index range: 0-1" in capsys.readouterr().out


def test_no_variable_of_a_guide_is_left_behind() -> None:
    assert not {"NUM_INFERENCE_NODES", "VLLM_ENABLE_SHARED_WEIGHTS", "ACCELERATE_MIXED_PRECISION"} & set(os.environ)


def commands_of_our_guides() -> list[object]:
    """Return each command in a block of a shell on our how-to pages that starts one of our programs."""
    found = []
    for page in sorted((ROOT / "docs/howto").glob("*.md")):
        for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            lines = [line.partition("  #")[0].strip() for line in block.replace("\\\n", " ").splitlines()]
            found += [
                pytest.param(line, id=f"{page.stem} {line[:70]}")
                for line in lines
                if line[VARIABLES.match(line).end() :].startswith(OURS)
            ]
    return found


@pytest.mark.parametrize("line", commands_of_our_guides())
def test_a_command_of_our_own_guides_is_understood(
    line: str, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Placeholders are filled in, and `/tmp/tiny-chain` and an earlier command's output are the tiny model; no other
    model, no broker and no data set is used.
    """
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "my_env.py").touch()
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[2-3]")
    monkeypatch.setattr("environments.sdk.config._hostnames", lambda listed: ["node2", "node3"])
    filled = re.sub(r"\bMODEL(_FOLDER)?\b|/tmp/tiny-chain|runs/\w+/final_model", str(model), line)
    assert start(filled, model, monkeypatch) == 0


def test_the_server_of_the_gsm8k_guide_has_the_settings_of_the_run_file() -> None:
    page = (ROOT / "docs/howto/gsm8k.md").read_text(encoding="utf-8")
    (block,) = [block for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) if "vllm_api_server" in block]
    _, words = split_block(shell_words(block))
    config, rest = read_config(words[3:])
    trainer = yaml.safe_load((ROOT / "configs/gsm8k.yaml").read_text(encoding="utf-8"))["trainer"]
    assert rest == []
    assert (config.model, config.dtype, config.max_model_len, config.gpu_memory_utilization) == tuple(
        trainer[name] for name in ("model_name", "dtype", "max_model_len", "gpu_memory_utilization")
    )
