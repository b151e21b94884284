"""The pages on moving here name flags, methods, files and losses that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from atropos_api.common.option_flags import list_options
from atropos_api.config import BrokerConfig
from environments.dataset_server import DatasetEnvConfig
from environments.sdk import BaseEnv, ManagedSession
from environments.sdk.config import APIServerConfig
from environments.sdk.runtime.cli import EnvironmentCommand
from environments.verifiers_server import VerifiersEnvConfig
from example_trainer.launcher.run_file import RunConfig
from example_trainer.options.objective import LossType
from example_trainer.serving.config import ServerConfig

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs/howto").glob("from-*.md"))
FOREIGN_FLAGS = {"--num_processes"}
"""Flags of the other projects' commands."""

HOOKS = (
    "config_init",
    "setup",
    "get_next_item",
    "collect_trajectories",
    "evaluate",
    "cli",
    "wandb_log",
    "evaluate_log",
)


def spelt(flag: str) -> str:
    return flag.replace("_", "-")


def known_flags() -> set[str]:
    models = {"": [RunConfig, BrokerConfig, ServerConfig, EnvironmentCommand], "openai.": [APIServerConfig]}
    models["env."] = [DatasetEnvConfig, VerifiersEnvConfig]
    options = [option for prefix, group in models.items() for model in group for option in list_options(model, prefix)]
    return {spelt(flag) for option in options for flag in option.flags} | {"--env", "--config"}


def test_there_is_a_page_for_each_of_the_four() -> None:
    assert [page.stem for page in PAGES] == ["from-atropos", "from-trl", "from-verifiers", "from-verl"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_flag_on_the_page_is_one_of_a_program(page: Path) -> None:
    flags = set(re.findall(r"(?<![\w-])--[a-z][\w.-]*[\w]", page.read_text(encoding="utf-8")))
    assert {flag for flag in flags - FOREIGN_FLAGS if spelt(flag) not in known_flags()} == set()


def test_the_hooks_of_atropos_are_methods_of_ours() -> None:
    text = (ROOT / "docs/howto/from-atropos.md").read_text(encoding="utf-8")
    for name in HOOKS:
        assert f"`{name}`" in text or f"self.{name}(" in text
        assert hasattr(BaseEnv, name)
    assert hasattr(ManagedSession, "chat_completion")


def test_the_losses_that_trl_has_are_named_as_there_is() -> None:
    text = (ROOT / "docs/howto/from-trl.md").read_text(encoding="utf-8")
    losses = set(LossType.__args__)
    assert {"grpo", "dapo", "gspo"} <= losses
    assert "bnpo" not in losses
    assert "there is no `bnpo`" in text
