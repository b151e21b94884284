"""Reads printed commands as their programs do, up to the point where a program would begin its work."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path

import pytest

from atropos_api.common.cliconfig import load_config
from atropos_api.config import BrokerConfig
from environments.sdk import BaseEnv
from environments.sdk.runtime import cli as environment_cli
from example_trainer.cli import run as run_trainer
from example_trainer.run import run as run_launcher
from example_trainer.serving.config import read_config, vllm_arguments
from example_trainer.sft.cli import run as run_sft

from .seed_commands import COURSE_SCRIPT

NAMED_MODEL = re.compile(
    r"Qwen/Qwen2\.5-[\w.-]+|NousResearch/[\w.-]+|meta-llama/[\w.-]+|/data/a5-alignment/models/[\w.-]+|\$MODEL"
)
SERVER = re.compile(r"python environments/(\w+)\.py ")
ASSIGNMENT = re.compile(r"^[A-Z][A-Z0-9_]*=")


def shell_words(text: str) -> list[str]:
    return shlex.split(text.replace("\\\n", " "), comments=True)


def words_of(text: str, model: Path) -> list[str]:
    """Return the words of a printed block without comments; `...` stands for the model."""
    words = shell_words(NAMED_MODEL.sub(str(model), text))
    at = words.index("...") if "..." in words else None
    if at is not None:
        name = "--model-name" if "--model-name" in words else "--model"  # one name: two for a setting are refused
        words[at:] = [str(model) if words[at - 1] == "--model" else f"{name}={model}", *words[at + 1 :]]
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


def environment_class(server: str) -> type[BaseEnv]:
    module = import_module(f"environments.{server}")
    own = [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]
    (found,) = [value for value in own if isinstance(value, type) and issubclass(value, BaseEnv)]
    return found


def run_environment(server: str, argv: Sequence[str]) -> int:
    """Read the command of an environment, whose start the fixture `folder` replaces."""
    return environment_cli.run_verb(environment_class(server), argv)


def dry(program: Callable[[list[str]], int]) -> Callable[[Sequence[str]], int]:
    return lambda argv: program([*argv, "--dry-run"])


PROGRAMS: Mapping[str, Callable[[Sequence[str]], int]] = {
    COURSE_SCRIPT: lambda argv: run_launcher([*argv, "--preset", "cs336", "--dry-run"]),
    "run-api": run_broker,
    "atropos-grpo": dry(run_trainer),
    "atropos-sft": dry(run_sft),
    "atropos-grpo-run": dry(run_launcher),
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
    if server := SERVER.match(line):
        return run_environment(server[1], [*words[2:], *more])
    (program,) = [name for name in PROGRAMS if line == name or line.startswith(f"{name} ")]
    try:
        return PROGRAMS[program]([*words[len(program.split()) :], *more])
    except SystemExit as ended:  # --help
        return int(ended.code or 0)


def start_under_accelerate(words: Sequence[str], model: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Read the launcher's arguments with its own parser, then start the trainer with the precision from it."""
    from accelerate.commands.launch import launch_command_parser

    filled = ["1" if word == "<gpu_devices>" else word for word in words]
    read = launch_command_parser().parse_args(filled[1:])
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", read.mixed_precision)
    return run_trainer(["--model-name", str(model), "--dry-run"])
