"""A setting under its name in another framework is refused with the way to say it here, and that way exists."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from pydantic import BaseModel

from atropos_api.common.cliconfig import ConfigError, load_config
from atropos_api.common.option_flags import list_options
from environments.sdk.config import BaseEnvConfig
from environments.sdk.runtime.cli import EnvironmentCommand
from environments.verifiers_server import VerifiersEnvConfig
from example_trainer.cli import TrainerCommand
from example_trainer.cli import run as run_trainer
from example_trainer.launcher.run_file import LAUNCHER_FIELDS, read_settings
from example_trainer.options.names_elsewhere import FINE_TUNING_NAMES, TRAINING_NAMES
from example_trainer.options.presets import ENVIRONMENT_OPTIONS
from example_trainer.sft.cli import SftCommand

from .test_moving_pages import known_flags, spelt

NO_SETTINGS = {"--nproc-per-node", "--num-processes", "--env", "--help"}
MAPPINGS: Sequence[tuple[type[BaseModel], Mapping[str, str]]] = (
    (TrainerCommand, TRAINING_NAMES),
    (SftCommand, FINE_TUNING_NAMES),
    (BaseEnvConfig, BaseEnvConfig.names_elsewhere),
    (VerifiersEnvConfig, VerifiersEnvConfig.names_elsewhere),
)


@pytest.mark.parametrize(("model", "names"), MAPPINGS, ids=lambda value: getattr(value, "__name__", ""))
def test_every_flag_that_such_an_error_proposes_exists(model: type[BaseModel], names: Mapping[str, str]) -> None:
    proposed = {spelt(flag) for text in names.values() for flag in re.findall(r"--[a-z][\w.-]*\w", text)}
    known = known_flags() | {spelt(flag) for option in list_options(SftCommand) for flag in option.flags}
    known |= {spelt(f"--{name}") for name in ENVIRONMENT_OPTIONS}
    assert proposed - known - NO_SETTINGS == set()


@pytest.mark.parametrize(("model", "names"), MAPPINGS[:3], ids=lambda value: getattr(value, "__name__", ""))
def test_a_name_that_works_here_is_not_explained(model: type[BaseModel], names: Mapping[str, str]) -> None:
    own = {flag.removeprefix("--").replace("-", "_") for option in list_options(model) for flag in option.flags}
    own -= {"dry_run"}  # a flag of the trainer, and no key of a file
    assert set(names) & (own | (set(ENVIRONMENT_OPTIONS) if model is TrainerCommand else set())) == set()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--max-completion-length", "256"], "it belongs to the environment: --env.max-new-tokens"),
        (["--resume_from_checkpoint=auto"], "use --resume auto"),
        (["--use-peft", "true"], "use --weight-bridge-mode lora_only"),
    ],
)
@pytest.mark.parametrize("read", [read_settings, run_trainer], ids=["launcher", "trainer"])
def test_a_flag_of_another_framework_is_refused_with_what_works_here(
    read: Callable[[list[str]], object], words: list[str], told: str
) -> None:
    flag = words[0].partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^unknown option {flag}: .*{told}") as refused:
        read(["--model-name", "m", *words])
    assert "did you mean" not in str(refused.value)


def test_a_key_of_a_file_and_a_setting_of_an_environment_are_explained_too(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {model_name: m, report_to: wandb}\n")
    with pytest.raises(ConfigError, match=r"unknown key 'report_to': use --use-wandb"):
        read_settings(["--config", str(file)])
    with pytest.raises(ConfigError, match=r"^unknown option --env.num_generations: use --env.group-size"):
        load_config(EnvironmentCommand, ["--env.num_generations", "8"], prog="p", description="d")


def test_an_option_of_the_launcher_in_the_section_of_the_trainer_is_told_to_be_a_flag(tmp_path: Path) -> None:
    assert set(LAUNCHER_FIELDS) - set(TRAINING_NAMES) == set()
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {model_name: m, max_restarts: 4}\n")
    with pytest.raises(ConfigError, match=r"unknown key 'max_restarts': it is a flag of atropos-grpo-run alone"):
        read_settings(["--config", str(file)])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--env.group_size", "8"], "--env.group_size is an option of the environment"),
        (["--env", "gsm8k_server.py"], "--env is an option of the environment"),
        (["--api.port=8000"], "--api.port is an option of run-api, where it has no prefix"),
    ],
)
def test_the_trainer_names_the_owner_of_an_option_that_the_launcher_would_pass_on(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=f"^{told}.*atropos-grpo-run"):
        run_trainer(["--model-name", "m", *words])
