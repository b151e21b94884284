"""The reference pages agree with the code, and have every flag and metric that the guides name."""

from __future__ import annotations

from pathlib import Path

import pytest

from atropos_api.common.cliconfig import ConfigError, load_config
from atropos_api.common.option_flags import list_options
from example_trainer.commands.generate_docs import PAGES, cli_page, metric_sections, run
from example_trainer.config import TrainingConfig
from example_trainer.monitoring.health import sign_names
from example_trainer.options.presets import ENVIRONMENT_OPTIONS

from .seed_flags import (
    COURSE_SCRIPT,
    COURSE_SCRIPT_ENVIRONMENT,
    OLD_TRAINER_GUIDE,
    REQUIRED,
    TRAINER_GUIDE,
    TRL_GUIDE,
)

DOCS = Path(__file__).parents[3] / "docs"
GUIDES_METRICS = [
    "reward/mean",
    "reward/std",
    "train/loss",
    "train/lr",
    "train/grad_norm",
    "train/entropy",
    "train/kl",
    "train/pos_logp",
    "train/neg_logp",
    "grpo/mean_ratio",
    "grpo/clipped_fraction",
    "logprobs/training_mean",
    "logprobs/inference_mean",
    "alignment/diff_mean",
    "alignment/diff_abs_mean",
    "alignment/diff_max",
    "perf/tokens_per_second",
    "time/step",
    "time/sync",
    "time/fetch",
    "perf/gpu_memory_gb",
    "perf/gpu_memory_reserved_gb",
    "eval/accuracy",
    "eval/format_reward",
    "eval/answer_reward",
]


def parse(*argv: str) -> TrainingConfig:
    return load_config(TrainingConfig, argv, prog="p", description="d")


def flags() -> dict[str, str]:
    """Return every spelling of a flag, and the setting that it sets."""
    return {flag: option.path for option in list_options(TrainingConfig) for flag in option.flags}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_what_the_code_says_now(page: str) -> None:
    committed = (DOCS / "reference" / f"{page}.md").read_text(encoding="utf-8")
    how = f"python -m example_trainer.commands.generate_docs {page} > docs/reference/{page}.md"
    assert committed == PAGES[page](), f"the page is out of date: {how}"


@pytest.mark.parametrize(("flag", "default"), sorted({*TRAINER_GUIDE, *OLD_TRAINER_GUIDE}, key=str))
def test_r19_a_flag_of_the_trainer_s_guides_keeps_its_name_and_default(flag: str, default: object) -> None:
    setting = flags()[flag]
    field = TrainingConfig.model_fields[setting]
    assert (REQUIRED if field.is_required() else field.default) == default
    assert f"`{flag}`" in cli_page()


@pytest.mark.parametrize(("flag", "default", "place"), COURSE_SCRIPT)
def test_the_course_script_s_flags_are_understood_and_its_preset_has_their_defaults(
    flag: str, default: object, place: str
) -> None:
    assert flag in flags()
    if default is not REQUIRED:
        assert getattr(parse("--model-path", "m", "--preset", "cs336"), place) == default
    assert f"`{flag}`" in cli_page()


@pytest.mark.parametrize("flag", COURSE_SCRIPT_ENVIRONMENT)
def test_what_is_the_environment_s_is_listed_with_its_name_there(flag: str) -> None:
    owner = ENVIRONMENT_OPTIONS[flag.removeprefix("--").replace("-", "_")]
    assert f"| `{flag}` | `--{owner}` |" in cli_page()


@pytest.mark.parametrize(("flag", "value", "setting"), TRL_GUIDE)
def test_the_trl_guide_s_names_are_understood_and_its_preset_has_their_values(
    flag: str, value: object, setting: str
) -> None:
    assert flags()[flag] == setting
    assert getattr(parse("--model", "m", "--preset", "trl-note"), setting) == value


def test_every_flag_says_what_it_is_for() -> None:
    assert [option.path for option in list_options(TrainingConfig) if len(option.help.split()) < 3] == []


def test_every_metric_says_what_it_is_and_the_guides_are_among_them() -> None:
    metrics = [metric for section in metric_sections().values() for metric in section]
    assert [name for name, text in metrics if not text] == []
    assert len({name for name, _ in metrics}) == len(metrics)
    assert set(GUIDES_METRICS) <= {name for name, _ in metrics}


def test_every_sign_of_trouble_is_listed() -> None:
    page = PAGES["metrics"]()
    assert [sign for sign in sign_names() if f"| `{sign}` |" not in page] == []


def test_an_unknown_page_is_one_line() -> None:
    with pytest.raises(ConfigError, match="unknown page"):
        run(["clii"])
