"""Each command that the published guides print is understood by its program as written, with a tiny local model in the
place of the named one; one that is not is refused in one line with the flag that works.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from atropos_api.common.cliconfig import ConfigError, load_config
from atropos_api.config import BrokerConfig
from environments.gsm8k_server import GSM8kEnv
from environments.sdk.runtime import cli as environment_cli
from example_trainer.cli import run as run_trainer
from example_trainer.config import TrainingConfig
from example_trainer.run import run as run_launcher
from example_trainer.serving.config import read_config, vllm_arguments
from example_trainer.serving.generate import RequestParser
from example_trainer.testing import make_tiny_model

from .seed_commands import (
    COMMANDS,
    COURSE_COMMANDS,
    COURSE_FRAGMENTS,
    COURSE_SCRIPT,
    GENERATE_BODY,
    INSTALLS,
    LAYER_QUERY,
    TRAINER_FRAGMENTS,
    Printed,
)

ROOT = Path(__file__).parents[3]
NAMED_MODEL = re.compile(
    r"Qwen/Qwen2\.5-[\w.-]+|NousResearch/[\w.-]+|meta-llama/[\w.-]+|/data/a5-alignment/models/[\w.-]+|\$MODEL"
)
ASSIGNMENT = re.compile(r"^[A-Z][A-Z0-9_]*=")
ADAPTER_MODE = ["--weight-bridge-mode", "lora_restart"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the course's data, and an environment whose start ends after its settings are read."""
    monkeypatch.chdir(tmp_path)
    for name in ("train", "test"):
        path = tmp_path / "data/math" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"question": "2 + 2?", "answer": "4"}) + "\n")
    monkeypatch.setattr(environment_cli, "run", lambda verb, make_env: 0)
    return tmp_path


def shell_words(text: str) -> list[str]:
    return shlex.split(text.replace("\\\n", " "), comments=True)


def words_of(text: str, model: Path) -> list[str]:
    """Return the words of a printed block, comments left out; `...` is for the reader to fill in with the model."""
    words = shell_words(NAMED_MODEL.sub(str(model), text))
    at = words.index("...") if "..." in words else None
    if at is not None:
        words[at:] = [str(model) if words[at - 1] == "--model" else f"--model={model}", *words[at + 1 :]]
    return words


def split_block(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables that a block sets, and the words of its last command."""
    variables: dict[str, str] = {}
    while words and (words[0] in {"export", "mkdir"} or ASSIGNMENT.match(words[0])):
        if words[0] == "mkdir":
            words = words[3:]  # mkdir -p DIRECTORY
            continue
        if words[0] != "export":
            name, _, value = words[0].partition("=")
            variables[name] = value
        words = words[1:]
    return variables, list(words)


def run_broker(argv: Sequence[str]) -> int:
    load_config(BrokerConfig, argv, prog="run-api", description="d")
    return 0


def run_server(argv: Sequence[str]) -> int:
    config, rest = read_config(argv)
    assert rest == [], "a flag that only vLLM's own parser can judge"
    assert str(Path(config.model)) in vllm_arguments(config, rest, on_cpu=True)
    return 0


def run_environment(argv: Sequence[str]) -> int:
    return environment_cli.run_verb(GSM8kEnv, argv)


def dry(program: Callable[[list[str]], int]) -> Callable[[Sequence[str]], int]:
    return lambda argv: program([*argv, "--dry-run"])


PROGRAMS: Mapping[str, Callable[[Sequence[str]], int]] = {
    COURSE_SCRIPT: lambda argv: run_launcher([*argv, "--preset", "cs336", "--dry-run"]),
    "run-api": run_broker,
    "python environments/gsm8k_server.py": run_environment,
    "python example_trainer/grpo.py": dry(run_trainer),
    "python -m example_trainer.grpo": dry(run_trainer),
    "python -m example_trainer.run": dry(run_launcher),
    "python example_trainer/vllm_api_server.py": run_server,
    "python -m example_trainer.vllm_api_server": run_server,
    "python vllm_api_server.py": run_server,
}


def start(text: str, model: Path, monkeypatch: pytest.MonkeyPatch, *, more: Sequence[str] = ()) -> int:
    """Run one printed block up to the point where its program would begin its work; return the exit code."""
    variables, words = split_block(words_of(text, model))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if words[0] == "accelerate":
        return start_under_accelerate(words[1:], model, monkeypatch)
    line = " ".join(words)
    (program,) = [name for name in PROGRAMS if line == name or line.startswith(f"{name} ")]
    try:
        return PROGRAMS[program]([*words[len(program.split()) :], *more])
    except SystemExit as ended:  # --help
        return int(ended.code or 0)


def start_under_accelerate(words: Sequence[str], model: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Read the launcher's arguments with its own parser, then start the trainer with the precision that it hands on."""
    from accelerate.commands.launch import launch_command_parser

    filled = ["1" if word == "<gpu_devices>" else word for word in words]
    read = launch_command_parser().parse_args(filled[1:])
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", read.mixed_precision)
    return run_trainer(["--model-name", str(model), "--dry-run"])


def waiting(printed: Printed) -> object:
    """Return the command as a test's parameter, expected to fail where a part of the system is still missing."""
    name = f"{printed.guide} {' '.join(printed.text.split())[:60]}"
    if printed.waits_for is None:
        return pytest.param(printed, id=name)
    return pytest.param(printed, id=name, marks=pytest.mark.xfail(strict=True, reason=printed.waits_for))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("printed", [waiting(printed) for printed in COMMANDS])
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
@pytest.mark.xfail(strict=True, reason=COURSE_COMMANDS[1].waits_for)
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
