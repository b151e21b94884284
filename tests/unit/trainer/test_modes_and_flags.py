"""No flag is silently without effect: in each weight sync mode its value is observed, refused, or warned about.

The rows are the fields of `TrainingConfig`, so that a new flag is in the matrix when it is declared. A value counts as
observed if the weight bridge differs by it, or a choice that depends on the mode, or the memory that is counted for the
server; under the launcher, if one of its programs differs by it, or the bridge of the trainer that it starts. Flags of
the step itself (`STEP`) are read by code that is the same in every mode: `flag_effects` observes them in one mode, and
with ATROPOS_FLAGS=all in each.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atropos_api.common.cliconfig import ConfigError, load_config, merge
from atropos_api.common.option_flags import flag
from example_trainer.config import TrainingConfig
from example_trainer.launcher.endpoints import settle_endpoints
from example_trainer.launcher.plan import make_plan
from example_trainer.launcher.run_dir import plan_run_dir
from example_trainer.launcher.run_file import read_settings
from example_trainer.memory.preflight import gpu_of, serves_on, trainer_gpu
from example_trainer.memory.shapes import REFERENCE_SHAPES
from example_trainer.modeling.loading import policy_options
from example_trainer.options.model import BatchOptions, OptimizerOptions
from example_trainer.options.objective import ObjectiveOptions
from example_trainer.options.presets import CourseOptions, PresetOptions
from example_trainer.options.training_options import ObservabilityOptions, RunOptions, TrackingOptions
from example_trainer.testing import make_tiny_model
from example_trainer.weights.factory import make_bridge
from example_trainer.weights.publish_loop import SyncBudget

from .flag_effects import EFFECTS, SERVED
from .flag_harness import FlagHarness

MODES = {
    "none": "--weight-bridge-mode none",
    "none, reload": "--weight-bridge-mode none --restart-method reload",
    "shared_vllm": "--weight-bridge-mode shared_vllm",
    "broadcast": "--weight-bridge-mode shared_vllm --num-inference-nodes 2",
    "lora_only": "--weight-bridge-mode lora_only",
    "lora_only to two servers": "--weight-bridge-mode lora_only --num-inference-nodes 2",
    "lora_only to another machine": "--weight-bridge-mode lora_only --vllm-host gpu7.invalid",
    "lora_restart": "--weight-bridge-mode lora_restart",
    "none, registered": "--weight-bridge-mode none --restart-method reload --registered-servers",
    "broadcast, registered": "--weight-bridge-mode shared_vllm --registered-servers",
    "lora_only, registered": "--weight-bridge-mode lora_only --registered-servers",
}

VALUES = {
    "atropos_token_file": "--atropos-token-file token",
    "batch_timeout": "--batch-timeout 7",
    "bridge_token": "--bridge-token s3cret-of-the-server",
    "broadcast_address": "--broadcast-address 127.0.0.1:29400",
    "broadcast_backend": "--broadcast-backend nccl",
    "device": "--device cpu",
    "inference_urls": "--inference-urls http://a:1 http://b:2",
    "fit": "--fit off",
    "gpu_memory_gb": "--gpu-memory-gb 9",
    "init_method": "--init-method tcp://a:1",
    "kernels": "--kernels eager",
    "log_format": "--log-format json",
    "logprob_chunk_tokens": "--logprob-chunk-tokens 5",
    "max_nonfinite_steps": "--max-nonfinite-steps 5",
    "num_inference_nodes": "--num-inference-nodes 3",
    "otlp_traces_endpoint": "--otlp-traces-endpoint http://a:4317",
    "overlap_publish": "--overlap-publish",
    "registered_servers": "--registered-servers",
    "reshard_after_forward": "--no-reshard-after-forward",
    "restart_method": "--restart-method reload",
    "resume": "--resume auto",
    "standby_server": "--no-standby-server",
    "start_vllm": "--start-vllm never",
    "sync_budget": "--sync-budget 0.3",
    "sync_check": "--sync-check 3",
    "trainer_rank": "--trainer-rank 1",
    "trainer_tensor_parallel_size": "--trainer-tensor-parallel-size 2",
    "unusable_groups": "--unusable-groups leave_out",
    "use_trackio": "--use-trackio",
    "vllm_config_path": "--vllm-config-path x.json",
    "vllm_gpu": "--vllm-gpu 3",
    "world_size": "--world-size 2",
}
"""Values other than the default, for the flags without one in `flag_effects`."""

STEP = {
    name
    for section in (BatchOptions, OptimizerOptions, ObjectiveOptions, CourseOptions, PresetOptions)
    for name in section.model_fields
}
STEP |= {*RunOptions.model_fields, *TrackingOptions.model_fields} - {"num_inference_nodes", "world_size", "log_dir"}
STEP |= set(ObservabilityOptions.model_fields)
STEP |= {
    "dtype",
    "fit",
    "gpu_memory_gb",
    "kernels",
    "torch_threads",
    "overlap_publish",
    "keep_versions",
    "alignment_sample_sequences",
}
FIELDS = [field for field in TrainingConfig.model_fields if field != "weight_bridge_mode"]
BY_MODE = ("publish_interval", "forwards_from_masters", "steps_served_weights", "server_urls", "shares_memory")
"""Properties of the configuration that depend on the mode and are read outside the bridge."""

STEP |= {"broadcast_address"}  # the meeting of a publish, in tests/unit/weights/test_broadcast.py

IGNORED_BY_BRIDGE = {
    ("shared_vllm", "sync_budget"),
    ("lora_only", "drain_seconds"),
    ("lora_only to two servers", "start_vllm"),
}
"""Options that a bridge reads without using them: without masters in the forward, hand-over, or own server."""

FOREIGN_SERVERS = ("broadcast", "lora_only to two servers", "lora_only to another machine", "none, registered")
FOREIGN_SERVERS += ("broadcast, registered", "lora_only, registered")
UNDER_LONGROPE = {(mode, "max_model_len") for mode in FOREIGN_SERVERS}
"""The policy reads it for the rotary factors of LongRoPE, which other models do not have: `test_rotary_factors`."""

IN_ROWS_ALONE = {(mode, "world_size") for mode in MODES if mode.startswith("lora_")}
"""Ranks hold the same adapter, so that no bridge differs: they divide the rows, which `test_ranks` observes."""

OF_THE_LAUNCHER = {"vllm_host", "vllm_port"}
"""Flags that the launcher decides with in `settle_endpoints`, which `test_plan` observes; ports are made equal here."""

GPU_BYTES = 80e9
TOKEN = "the-same-in-every-plan"


@pytest.mark.parametrize("mode", MODES)
def test_each_flag_is_observed_refused_or_warned_about_in_each_mode(mode: str, tmp_path: Path) -> None:
    seen = {field: cell(mode, field, tmp_path) for field in FIELDS}
    assert {field: what for field, what in seen.items() if what.startswith("wrong")} == {}
    assert {"observed", "warned about"} <= set(seen.values())


@pytest.mark.parametrize("mode", MODES)
def test_under_the_launcher_each_flag_is_observed_refused_or_remarked_on_in_each_mode(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATROPOS_BRIDGE_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "token").write_text("of-the-broker")
    again = launched.__wrapped__(mode, (), tmp_path)
    assert launched(mode, (), tmp_path) == again, "otherwise every flag would seem to be observed"
    seen = {field: launched_cell(mode, field, tmp_path) for field in FIELDS if field not in OF_THE_LAUNCHER}
    assert {field: what for field, what in seen.items() if what.startswith("wrong")} == {}
    assert "observed" in seen.values()


def cell(mode: str, field: str, directory: Path) -> str:
    """Return what happens to another value of this flag in this mode."""
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
    if outcome(config) != outcome(usual) and (mode, field) not in IGNORED_BY_BRIDGE | UNDER_LONGROPE:
        return "wrong: observed, in spite of a warning" if warned else "observed"
    if warned:
        return "warned about"
    return "in the step" if (mode, field) in IN_ROWS_ALONE or field in STEP else "wrong: without effect, and no word"


def launched_cell(mode: str, field: str, directory: Path) -> str:
    """Say what becomes of another value of this flag in this mode, if the launcher starts the programs."""
    beside, argv = arguments(field)
    if " ".join(argv) in MODES[mode]:
        return "the mode's own value"
    try:
        remarks, warnings, seen = launched(mode, (*beside, *argv), directory)
    except ConfigError:
        return "refused"
    *_, usual = launched(mode, tuple(beside), directory)
    remarked, warned = (
        any(text.startswith(f"{flag(field)} ") and "no effect" in text for text in said) for said in (remarks, warnings)
    )
    if warned and not remarked:
        return "wrong: the trainer warns about what the launcher has used"
    if seen != usual and (mode, field) not in IGNORED_BY_BRIDGE:
        return "wrong: observed, in spite of a remark" if remarked else "observed"
    if remarked:
        return "remarked on"
    return "in the step" if (mode, field) in IN_ROWS_ALONE or field in STEP else "wrong: without effect, and no word"


@pytest.mark.parametrize("mode", ["shared_vllm", "lora_only", "lora_restart"])
@pytest.mark.skipif(os.environ.get("ATROPOS_FLAGS") != "all", reason="ATROPOS_FLAGS=all runs every flag in every mode")
def test_each_flag_of_the_step_has_its_effect_in_each_mode(
    mode: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = make_tiny_model(tmp_path_factory.mktemp("other"), seed=1)
    harness = FlagHarness(tiny_model, other, tmp_path_factory.mktemp("runs"))
    wrong = []
    for field in sorted(STEP & EFFECTS.keys()):
        beside, argv = (words(text) for text in (EFFECTS[field].beside, EFFECTS[field].argv))
        warned = is_warned_about(mode, beside, argv)
        if EFFECTS[field].needs or warned is None:
            continue
        usual, seen = harness.run(*words(MODES[mode]), *beside), harness.run(*words(MODES[mode]), *beside, *argv)
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
    """Return the options that a flag needs, and the flag with another value than the default."""
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
    """Return all that the bridge reads of a configuration, the properties that are read elsewhere, and the memory."""
    bridge = make_bridge(config, registry=SimpleNamespace())
    delivery = getattr(bridge, "_delivery", None)
    exchange = getattr(delivery or bridge, "_exchange", None)
    parts = [part for part in (bridge, delivery, exchange) if part is not None]
    # A delivery's module serves several modes, so only its class is read.
    kinds = [type(part) for part in parts]
    sources = kinds if config.registered_servers else [inspect.getmodule(kind) or inspect for kind in kinds]
    source = "".join(map(inspect.getsource, sources))
    if "SyncBudget.from_config(config)" in source:
        source += inspect.getsource(SyncBudget.from_config)
    read = {name: plain(getattr(config, name)) for name in sorted({*BY_MODE, *re.findall(r"config\.(\w+)", source)})}
    server = plain(getattr(bridge, "_vllm", None))
    return [kind.__name__ for kind in kinds], read, plain(policy_options(config)), server, memory(config)


def memory(config: TrainingConfig) -> float | None:
    """Return the share of a GPU that is counted for a server that is started separately; None if nothing is counted."""
    if config.fit == "off" or (config.device == "cpu" and config.gpu_memory_gb is None):
        return None
    shares_gpu = serves_on(trainer_gpu(config), config, {})
    return gpu_of(REFERENCE_SHAPES["8B"], config, GPU_BYTES, shares_gpu=shares_gpu, starts_server=False).share


def plain(value: Any) -> Any:
    """Return options as data that can be compared."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


@cache
def launched(mode: str, argv: Sequence[str], directory: Path) -> tuple[Sequence[str], Sequence[str], Any]:
    """Return the launcher's remarks, its trainer's warnings, and what all programs get and the trainer makes of it.

    The bridge token is that of the inference servers: the others inherit the variable and have no use for it.
    """
    given = ["--model-name", "m", "--run-dir", str(directory / "run"), "--env.server", __file__]
    settings = read_settings([*given, *MODES[mode].split(), *argv])
    run = plan_run_dir(settings.trainer.run_dir, name="x", log_dir=settings.trainer.log_dir, resume=False)
    made = make_plan(settings, run, settle_endpoints(settings), model=settings.trainer.model_name)
    final = [] if made.final_server is None else [made.final_server]
    programs = {
        spec.name: (
            spec.command,
            {
                name: value
                for name, value in spec.environment.items()
                if name != "ATROPOS_BRIDGE_TOKEN" or spec.name in made.servers
            },
            plain_ports(made.settings_of(spec.name)),
        )
        for spec in (*made.children, *final)
        if spec.name != "trainer"
    }
    child = made.child("trainer")
    assert child is not None
    trainer = TrainingConfig(**merge(made.settings_of("trainer"), child.secret_settings)["trainer"])
    seen = (programs, str(run.logs), plain_ports(outcome(trainer)), memory(settings.trainer))
    return settings.remarks, trainer.warnings(), seen


def plain_ports(value: Any) -> str:
    """Return settings as text without the free ports that differ between plans."""
    return re.sub(r"(port': |127\.0\.0\.1:|localhost:)\d+", r"\1N", str(value))
