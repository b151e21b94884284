"""No flag is without effect in silence: in each weight sync mode its value is observed, refused, or warned about.

The rows are the fields of `TrainingConfig`, so that a new flag is in the matrix when it is declared. A value counts as
observed if the weight bridge, a choice that depends on the mode, or a program of the launcher's plan differs by it.
Flags of the step itself (`STEP`) are read by code that is the same in every mode: `flag_effects` observes them in one
mode, and with ATROPOS_FLAGS=all in each.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from atropos_api.common.cliconfig import ConfigError, load_config
from atropos_api.common.option_flags import flag
from example_trainer.config import TrainingConfig
from example_trainer.launcher.endpoints import settle_endpoints
from example_trainer.launcher.plan import make_plan
from example_trainer.launcher.run_dir import plan_run_dir
from example_trainer.launcher.run_file import read_settings
from example_trainer.options.model import BatchOptions, OptimizerOptions
from example_trainer.options.objective import ObjectiveOptions
from example_trainer.options.presets import CourseOptions, PresetOptions
from example_trainer.options.training_options import RunOptions, TrackingOptions
from example_trainer.testing import make_tiny_model
from example_trainer.weights.factory import make_bridge

from .flag_bench import FlagBench
from .flag_effects import EFFECTS, SERVED

MODES = {
    "none": "--weight-bridge-mode none",
    "none, reload": "--weight-bridge-mode none --restart-method reload",
    "shared_vllm": "--weight-bridge-mode shared_vllm",
    "broadcast": "--weight-bridge-mode shared_vllm --num-inference-nodes 2",
    "lora_only": "--weight-bridge-mode lora_only",
    "lora_only to two servers": "--weight-bridge-mode lora_only --num-inference-nodes 2",
    "lora_restart": "--weight-bridge-mode lora_restart",
}

VALUES = {
    "atropos_token_file": "--atropos-token-file token",
    "batch_timeout": "--batch-timeout 7",
    "bridge_token": "--bridge-token s3cret-of-the-server",
    "broadcast_backend": "--broadcast-backend nccl",
    "device": "--device cpu",
    "inference_urls": "--inference-urls http://a:1 http://b:2",
    "fit": "--fit off",
    "gpu_memory_gb": "--gpu-memory-gb 9",
    "init_method": "--init-method tcp://a:1",
    "logprob_chunk_tokens": "--logprob-chunk-tokens 5",
    "max_nonfinite_steps": "--max-nonfinite-steps 5",
    "num_inference_nodes": "--num-inference-nodes 3",
    "overlap_publish": "--overlap-publish",
    "reshard_after_forward": "--no-reshard-after-forward",
    "restart_method": "--restart-method reload",
    "resume": "--resume auto",
    "start_vllm": "--start-vllm never",
    "sync_budget": "--sync-budget 0.3",
    "sync_check": "--sync-check 3",
    "trainer_rank": "--trainer-rank 1",
    "trainer_tensor_parallel_size": "--trainer-tensor-parallel-size 2",
    "vllm_config_path": "--vllm-config-path x.json",
    "vllm_gpu": "--vllm-gpu 3",
    "world_size": "--world-size 2",
}
"""Another value than the default, of the flags whose entry in `flag_effects` holds none."""

STEP = {
    name
    for section in (BatchOptions, OptimizerOptions, ObjectiveOptions, CourseOptions, PresetOptions)
    for name in section.model_fields
}
STEP |= {*RunOptions.model_fields, *TrackingOptions.model_fields} - {"num_inference_nodes", "world_size", "log_dir"}
STEP |= {
    "dtype",
    "fit",
    "gpu_memory_gb",
    "torch_threads",
    "overlap_publish",
    "keep_versions",
    "alignment_sample_sequences",
}
BY_MODE = ("publish_interval", "forwards_from_masters", "steps_served_weights", "server_urls", "shares_memory")
"""Properties of the configuration that depend on the mode and are read outside the bridge."""

IGNORED_BY_BRIDGE = {("shared_vllm", "sync_budget"), ("lora_only", "drain_seconds")}
"""Options that a bridge has and does not use: without masters in the forward; without a hand-over."""


@pytest.mark.parametrize("mode", MODES)
def test_each_flag_is_observed_refused_or_warned_about_in_each_mode(mode: str, tmp_path: Path) -> None:
    seen = {
        field: cell(mode, field, tmp_path) for field in TrainingConfig.model_fields if field != "weight_bridge_mode"
    }
    assert {field: what for field, what in seen.items() if what.startswith("wrong")} == {}
    assert {"observed", "warned about"} <= set(seen.values())


def cell(mode: str, field: str, directory: Path) -> str:
    """Say what becomes of another value of this flag in this mode."""
    beside, argv = arguments(field)
    try:
        config = parsed(directory, *MODES[mode].split(), *beside, *argv)
    except ConfigError as error:
        is_named = any(text in str(error) for text in (*beside, *argv) if text.startswith("--"))
        return "refused" if is_named else f"wrong: refused without its name: {error}"
    usual = parsed(directory, *MODES[mode].split(), *beside)
    if getattr(config, field) == getattr(usual, field):
        return "the mode's own value"
    warned = any(text.startswith(f"{flag(field)} ") and "no effect" in text for text in config.warnings())
    if outcome(config) != outcome(usual) and (mode, field) not in IGNORED_BY_BRIDGE:
        return "wrong: observed, in spite of a warning" if warned else "observed"
    if warned:
        return "warned about"
    if field in STEP:
        return "in the step"
    with_it, without = programs(directory, mode, beside, argv), programs(directory, mode, beside, ())
    return "observed" if with_it != without else "wrong: without effect, and no word"


@pytest.mark.parametrize("mode", ["shared_vllm", "lora_only", "lora_restart"])
@pytest.mark.skipif(os.environ.get("ATROPOS_FLAGS") != "all", reason="ATROPOS_FLAGS=all runs every flag in every mode")
def test_each_flag_of_the_step_has_its_effect_in_each_mode(
    mode: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = make_tiny_model(tmp_path_factory.mktemp("other"), seed=1)
    bench = FlagBench(tiny_model, other, tmp_path_factory.mktemp("runs"))
    wrong = []
    for field in sorted(STEP & EFFECTS.keys()):
        beside, argv = (words(text) for text in (EFFECTS[field].beside, EFFECTS[field].argv))
        warned = is_warned_about(mode, beside, argv)
        if EFFECTS[field].needs or warned is None:
            continue
        usual, seen = bench.run(*words(MODES[mode]), *beside), bench.run(*words(MODES[mode]), *beside, *argv)
        holds = seen.same_weights(usual) if warned else EFFECTS[field].holds(seen, usual)
        wrong += [] if holds else [f"{field}, warned about: {warned}"]
    assert wrong == []


def is_warned_about(mode: str, beside: Sequence[str], argv: Sequence[str]) -> bool | None:
    """Return True if these options warn that one of them has no effect; None if they are refused."""
    try:
        config = parsed(Path("unused"), *MODES[mode].split(), *beside, *argv)
    except ConfigError:
        return None
    return any("no effect" in warning for warning in config.warnings())


def arguments(field: str) -> tuple[list[str], list[str]]:
    """Return the options that a flag needs beside it, and the flag with another value than the default."""
    if field in EFFECTS:
        return words(EFFECTS[field].beside), words(EFFECTS[field].argv)
    return [], words(SERVED[field][0] if field in SERVED else VALUES[field])


def words(text: str) -> list[str]:
    """Return the words of an entry of `flag_effects` without a mode, which the matrix sets itself."""
    return re.sub(r"--weight-bridge-mode \S+( --lora-dropout 0(?!\.))?", "", text).split()


def parsed(directory: Path, *argv: str) -> TrainingConfig:
    usual = ("--model-name", "m", "--run-dir", str(directory))
    return load_config(TrainingConfig, [*usual, *argv], prog="p", description="d")


def outcome(config: TrainingConfig) -> Any:
    return plain(make_bridge(config)), {name: getattr(config, name) for name in BY_MODE}


def plain(value: Any) -> Any:
    """Return the options inside a bridge as data that can be compared."""
    for inside in ("_options", "_bridges"):
        if hasattr(value, inside):
            return type(value).__name__, plain(getattr(value, inside))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def programs(directory: Path, mode: str, beside: Sequence[str], argv: Sequence[str]) -> Mapping[str, Any]:
    """Return the settings and variables of each program that the launcher would start, but for the trainer's own."""
    given = ["--model-name", "m", "--run-dir", str(directory / "run"), "--env.server", __file__]
    settings = read_settings([*given, *MODES[mode].split(), *beside, *argv])
    run = plan_run_dir(settings.trainer.run_dir, name="x", log_dir=settings.trainer.log_dir, resume=False)
    made = make_plan(settings, run, settle_endpoints(settings), model="m")
    return {
        spec.name: (spec.command, dict(spec.environment), plain_ports(made.settings_of(spec.name)), str(run.logs))
        for spec in made.children
        if spec.name != "trainer"
    }


def plain_ports(settings: Mapping[str, Any]) -> str:
    """Return settings as text without the free ports and tokens that each plan draws anew."""
    return re.sub(r"(port': |127\.0\.0\.1:|localhost:)\d+", r"\1N", str(settings))
