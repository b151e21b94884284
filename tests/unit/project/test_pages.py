"""All that a user can name is on a page: programs, verbs, files, settings, metrics, symptoms; each page is linked."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi import APIRouter
from fastapi.routing import APIRoute

from atropos_api.common import metric_names
from atropos_api.config import BrokerConfig
from environments.commands import VERBS as ENVIRONMENT_DATA_VERBS
from environments.export import DpoOptions, SftOptions, ViewOptions
from environments.generate_docs import SHIPPED
from environments.sdk import APIServerConfig, BaseEnvConfig
from environments.sdk.runtime.cli import VERBS as ENVIRONMENT_VERBS
from environments.sdk.runtime.cli import EnvironmentCommand
from example_trainer.cli import TrainerCommand
from example_trainer.commands.main import VERBS
from example_trainer.commands.memory import MemoryOptions
from example_trainer.commands.scaling import DrainOptions, ScaleOptions
from example_trainer.commands.top import TopConfig
from example_trainer.commands.view import RunViewOptions
from example_trainer.launcher.run_file import RunConfig
from example_trainer.options.modes import MODES
from example_trainer.options.presets import PRESETS
from example_trainer.serving.adapter_routes import make_lora_router
from example_trainer.serving.bridge_routes import make_bridge_router, make_broadcast_router
from example_trainer.serving.config import ServerConfig
from example_trainer.sft.cli import SftCommand

from .programs import environment_class

ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"
PAGES = {path: path.read_text(encoding="utf-8") for path in (README, *sorted((ROOT / "docs").rglob("*.md")))}
GUIDES = "\n".join(text for path, text in PAGES.items() if path.parent.name == "howto")
REFERENCE = {name: PAGES[ROOT / "docs/reference" / f"{name}.md"] for name in ("cli", "environments", "metrics")}
TROUBLESHOOTING = PAGES[ROOT / "docs/howto/troubleshooting.md"]
ALL = "\n".join(PAGES.values())
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HELP_BEGINS = re.compile(r"[A-Z]|vLLM|[\w, ]+:|\w+ \(|\w*_\w+|cpu, ")
LINK = re.compile(r"\]\(([^)#:\s]*)(#[^)\s]*)?\)")

SYMPTOMS = (
    # of a first start
    "Atropos API not reachable",
    "Connection refused",
    "vLLM fails to start",
    "lsof -i :9001",
    "Parameter mapping file not found",
    "404 Not Found",
    "PEFT library not available",
    "ModuleNotFoundError",
    "no question and answer",
    "no such directory",
    "Cannot re-initialize CUDA in forked subprocess",
    "VLLM_USE_V1",
    "FlexibleArgumentParser",
    # of logprobs and the clip
    "GRPO requires inference_logprobs for importance sampling",
    "should be negative!",
    "inference_logprobs alignment is wrong",
    "Logprob gap: ref=",
    "mean_ratio",
    "clipped_fraction",
    "accuracy drops",
    "loss below -10",
    "repetitive",
    # of memory and speed
    "CUDA out of memory",
    "OOM",
    "trainer hangs",
    "slow throughput",
    "tokens/s drops",
    # of learning
    "diverging KL",
    "flat reward",
)
"""Phrases that people search for after a failure, in the words of the published guides."""

REMEDIES = (
    "--gradient-checkpointing",
    "--load-in-4bit",
    "LoRA",
    "FSDP",
    "--optimizer",
    "--master-weights",
    "--seq-len",
)
"""Advice of the guides and of this project for running out of memory."""


def kebab(name: str) -> str:
    return name.replace("_", "-")


@pytest.mark.parametrize("path", sorted((ROOT / "environments").glob("*_server*.py")), ids=lambda path: path.stem)
def test_each_environment_server_has_a_section_in_the_reference(path: Path) -> None:
    assert f"\n## `{path.name}`\n" in REFERENCE["environments"]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_each_run_file_is_in_a_guide_as_a_command(path: Path) -> None:
    assert f"--config configs/{path.name}" in GUIDES
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["env"]["server"] in REFERENCE["environments"]


@pytest.mark.parametrize("name", PROJECT["scripts"])
def test_each_console_script_is_on_a_page(name: str) -> None:
    assert re.search(rf"(`|^ *){re.escape(name)}\b", ALL, re.MULTILINE)


@pytest.mark.parametrize("name", PROJECT["optional-dependencies"])
def test_each_extra_is_on_the_page_about_installing(name: str) -> None:
    assert re.search(rf"^\|.*`{re.escape(name)}`", PAGES[ROOT / "docs/howto/install.md"], re.MULTILINE)


@pytest.mark.parametrize("command", [f"atropos {verb}" for verb in VERBS])
def test_each_verb_of_atropos_is_on_a_page(command: str) -> None:
    assert re.search(rf"{command}\b", ALL)


@pytest.mark.parametrize("command", [f"atropos env {verb}" for verb in ENVIRONMENT_DATA_VERBS])
def test_each_verb_of_atropos_env_is_on_a_page(command: str) -> None:
    assert command in ALL


@pytest.mark.parametrize("verb", ENVIRONMENT_VERBS)
def test_each_verb_of_an_environment_is_in_the_reference(verb: str) -> None:
    assert f"| `{verb}` |" in REFERENCE["environments"]


@pytest.mark.parametrize("section", ["env", "openai", "teacher"])
def test_each_setting_of_each_environment_is_in_the_reference(section: str) -> None:
    models = {"env": [BaseEnvConfig, *(type(environment_class(name).config_init()[0]) for name in SHIPPED)]}
    fields = {name for model in models.get(section, [APIServerConfig]) for name in model.model_fields}
    assert [name for name in fields if f"`--{section}.{kebab(name)}`" not in REFERENCE["environments"]] == []
    flags = set(EnvironmentCommand.model_fields) - {"env", "openai"}
    assert [name for name in flags if f"`--{kebab(name)}`" not in REFERENCE["environments"]] == []


def test_the_help_of_each_option_is_a_sentence() -> None:
    """It begins with a capital letter, or with a value or name of the code, and ends with a full stop."""
    models = [
        BrokerConfig,
        RunConfig,
        TrainerCommand,
        SftCommand,
        ServerConfig,
        MemoryOptions,
        TopConfig,
        RunViewOptions,
    ]
    models += [EnvironmentCommand, BaseEnvConfig, APIServerConfig, ViewOptions, SftOptions, DpoOptions]
    models += [ScaleOptions, DrainOptions]
    models += [type(environment_class(name).config_init()[0]) for name in SHIPPED]
    helps = {field.description for model in models for field in model.model_fields.values() if field.description}
    assert [text for text in helps if not (HELP_BEGINS.match(text) and text.endswith("."))] == []


def test_each_metric_is_in_the_reference() -> None:
    names = {value for name, value in vars(metric_names).items() if name.isupper() and isinstance(value, str)}
    assert names
    assert [name for name in names if f"`{name}`" not in REFERENCE["metrics"]] == []


@pytest.mark.parametrize("name", [*MODES, *PRESETS])
def test_each_mode_and_preset_is_in_the_reference(name: str) -> None:
    assert f"`{name}`" in REFERENCE["cli"]


@pytest.mark.parametrize("make", [make_bridge_router, make_broadcast_router, make_lora_router])
def test_each_route_for_a_trainer_is_in_the_reference_of_the_server(make: Callable[[], APIRouter]) -> None:
    rows = [line for line in PAGES[ROOT / "docs/reference/server.md"].splitlines() if line.startswith("| `")]
    paths = [route.path for route in make().routes if isinstance(route, APIRoute) and route.include_in_schema]
    assert paths
    for path in paths:
        folder, _, name = path.rpartition("/")
        assert any(f"{folder}/" in row and re.search(rf"\b{name}\b", row.split("|")[1]) for row in rows), path


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_each_symptom_of_the_guides_has_a_row_with_a_cause_and_a_remedy(symptom: str) -> None:
    rows = [line for line in TROUBLESHOOTING.splitlines() if line.startswith("|") and symptom in line]
    assert rows
    assert all(len(row.split("|")) >= 4 for row in rows)


def test_where_memory_runs_out_the_page_names_what_the_guides_advise() -> None:
    _, _, advice = TROUBLESHOOTING.partition("\n### Out of memory\n")
    assert [word for word in REMEDIES if word not in advice] == []


def test_each_page_is_reached_from_the_readme_and_no_link_is_broken() -> None:
    reached, waiting = {README}, [README]
    broken = []
    while waiting:
        page = waiting.pop()
        for target, _ in LINK.findall(PAGES[page]):
            path = (page.parent / target).resolve() if target else page
            if not path.exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
            elif path in PAGES and path not in reached:
                reached.add(path)
                waiting.append(path)
    assert broken == []
    assert sorted(str(path.relative_to(ROOT)) for path in PAGES.keys() - reached) == []


def test_a_link_to_a_heading_names_one_that_is_there() -> None:
    wrong = []
    for page, text in PAGES.items():
        for target, heading in LINK.findall(text):
            path = (page.parent / target).resolve() if target else page
            if heading and path in PAGES and heading[1:] not in headings(PAGES[path]):
                wrong.append(f"{page.relative_to(ROOT)}: {target}{heading}")
    assert wrong == []


def headings(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    lines = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def test_the_readme_names_what_differs_from_atropos() -> None:
    assert "(docs/explanation/differences.md)" in PAGES[README]


CLAIMS = re.compile(
    r"\b(measured|median|ratios?|faster|slower|cheaper|was seen|reaches|took|p99|of the rate|(used|kept) \d[\d.]*)\b"
)
"""Words of a paragraph that reports a measurement."""

FIGURE = re.compile(r"\d(\.\d+)? ?(%|ms|s\b|MiB|GB|KB|times|x\b)|\b\d+\.\d+")
REPEATS = re.compile(r"`[^`]*(python |benchmarks/|pytest|make (gpu|bench|demo)|atropos[ -]|ATROPOS_|tests/)[^`]*`|```")


def sections() -> list[tuple[str, str]]:
    """Return page and text of each section, of pages that are written by hand."""
    written = [path for path in PAGES if "prints this page" not in PAGES[path]]
    return [(str(path.relative_to(ROOT)), part) for path in written for part in re.split(r"(?m)^## ", PAGES[path])]


def test_a_section_that_reports_a_measured_figure_names_what_repeats_it() -> None:
    unnamed = [
        f"{page}: {section.splitlines()[0]}"
        for page, section in sections()
        if any(CLAIMS.search(text) and FIGURE.search(text) for text in section.split("\n\n"))
        and not REPEATS.search(section)
    ]
    assert unnamed == ["docs/howto/gsm8k.md: # GSM8K, from nothing to a curve"], "the run is in the next sections"
