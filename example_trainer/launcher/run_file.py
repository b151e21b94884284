"""Run files and flags: they are read here, and their settings sorted by the program they belong to.

A run file has sections `trainer: api: vllm: env: openai: teacher:` (or `environments:`, a list), and `modes:`, which
holds the trainer's settings for single weight bridge modes: full weights and adapters need different rates.
`modes_on_gpu:` overrides them if vLLM serves from a GPU. On the command line the trainer's flags have no prefix; those
of the other programs have their section as a prefix (`--env.group_size 8`). Only the settings of trainer, launcher and
broker are checked here; inference servers and environments check their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from atropos_api.common.cliconfig import ConfigError, check_keys, load_config, merge, nearest, read_config_file
from atropos_api.common.identity import is_this_host
from atropos_api.common.option_flags import aliases, named_in
from example_trainer.config import TrainingConfig, settings_from
from example_trainer.launcher.environment_settings import EnvironmentSettings, read_environments
from example_trainer.launcher.placement.settings import (
    DEFAULT_TIMEOUT_SECONDS,
    PlacementKind,
    PlacementSettings,
    launchers_own,
    read_placement,
    split_section,
)
from example_trainer.launcher.run_file_sections import read_sections
from example_trainer.launcher.section_flags import PREFIXED_SECTIONS, SectionFlags, split_section_flags
from example_trainer.launcher.teacher import TEACHER, check_teacher, own_teacher, unused_distillation
from example_trainer.options.layout import BadLayout, DistributedLayout
from example_trainer.options.modes import BridgeMode
from example_trainer.options.presets import hand_on_environment_options, refuse_two_sizes
from example_trainer.options.server import below_flags, with_vllm_section
from example_trainer.options.without_effect import SERVER_FIELDS, settings_without_effect
from example_trainer.processes.gpus import serves_from_gpu
from example_trainer.processes.program_log import LARGEST_LOG_BYTES
from example_trainer.processes.tree import PACKAGE_ROOT

RUN_FILES = PACKAGE_ROOT / "example_trainer" / "configs"
"""The folder of the run files that come with the package."""

PLACEMENT = "placement"
PROG = "atropos-grpo-run"
_DEFAULT_MODE: BridgeMode = "shared_vllm"

DESCRIPTION = """Start broker, vLLM, environment and trainer, watch them, and end them together.

The options below are the trainer's and the launcher's own. Options of the other programs carry their section as a
prefix: --api.port 8002, --vllm.max_model_len 512, --env.group_size 8, --openai.server_type vllm. run-api --help lists
those of --api.*, python ENV.py serve --help those of --env.* and --openai.*. --env my_env.py, short for --env.server,
names the environment. --teacher.model_name starts a teacher for it, with --teacher.gpu 1 and
--teacher.vllm.max_model_len 512; --teacher.base_url names one that runs. With --atropos-url the broker is yours;
without an env section the environments are yours too."""


class RunConfig(TrainingConfig):
    """The trainer's settings and the launcher's own."""

    weight_bridge_mode: BridgeMode = Field(
        _DEFAULT_MODE, description="shared_vllm, lora_only, lora_restart, or none (checkpoint, restart)."
    )
    dry_run: bool = Field(False, description="Print what would run, and start nothing.")
    progress: Literal["auto", "live", "plain"] = Field(
        "auto",
        description="live: one view that is redrawn; plain: one line per step; auto: live where a terminal can redraw.",
    )
    quiet: bool = Field(False, description="Print only the summary at the end, and errors.")
    json_lines: bool = Field(
        False,
        description="Print one JSON object a line instead: each milestone, step, sign of trouble, and the summary.",
        json_schema_extra=aliases("json"),
    )
    max_restarts: int = Field(
        5,
        ge=0,
        description="Times that each program is restarted within --restart-window before the run ends, or goes on with "
        "its other registered servers.",
    )
    restart_window: float = Field(600.0, gt=0.0, description="Seconds for which a restart counts.")
    stop_grace: float = Field(
        120.0,
        ge=0.0,
        description="Seconds in which the trainer may write a checkpoint after a signal to the launcher. A second "
        "signal ends it at once.",
    )
    max_log_mib: int = Field(
        LARGEST_LOG_BYTES // 2**20,
        ge=1,
        description="Size in MiB at which a program's log is moved to NAME.log.1, in place of the one before.",
    )
    placement: PlacementKind = Field(
        "local", description="Where trainer, servers and environments run: on this machine, or on a Ray cluster."
    )
    placement_address: str | None = Field(
        None, description="HOST:PORT of the Ray cluster's head, which this machine has joined."
    )
    placement_timeout: float = Field(
        DEFAULT_TIMEOUT_SECONDS, gt=0.0, description="Seconds within which the cluster has a place for each program."
    )
    cost_per_hour: float | None = Field(
        None, ge=0.0, description="Price of all machines per hour, in any currency: the summary then shows the cost."
    )

    @model_validator(mode="after")
    def _show_one_way(self) -> Self:
        chosen = [name for name in ("quiet", "json_lines") if getattr(self, name)]
        chosen += ["progress"] if self.progress != "auto" else []
        if len(chosen) > 1:
            flags = " and ".join({"json_lines": "--json"}.get(name, f"--{name}") for name in chosen)
            raise ValueError(f"{flags} are different ways to show the progress; set only one of them")
        return self

    @property
    def view(self) -> Literal["auto", "live", "plain", "json", "quiet"]:
        """The name of the view that shows the progress."""
        return "quiet" if self.quiet else "json" if self.json_lines else self.progress

    @property
    def remote_servers(self) -> tuple[str, ...]:
        """The addresses of the inference servers that the launcher does not start; none if it starts its own."""
        if self.uses_remote_server:
            return self.server_urls
        starts = self.broadcasts and not self.inference_urls and is_this_host(self.vllm_host)
        return () if starts or not self.num_inference_nodes or self.registered_servers else self.server_urls


LAUNCHER_FIELDS = frozenset(RunConfig.model_fields) - frozenset(TrainingConfig.model_fields)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """All settings as they were given; nothing is decided yet."""

    trainer: RunConfig
    sections: Mapping[str, Mapping[str, Any]]
    flags: Mapping[str, SectionFlags]
    environments: tuple[EnvironmentSettings, ...]
    layout: DistributedLayout | None = None
    """The layout of the `placement` section."""
    placement: PlacementSettings = field(default_factory=PlacementSettings)
    remarks: tuple[str, ...] = ()
    """Sentences on what a preset has chosen, or could not set here, and on settings without effect."""
    reseeded: bool = False
    """True if `--seed` overrides the files: it then applies to every environment whose settings hold a seed."""

    def section(self, name: str) -> dict[str, Any]:
        """Return a section, overridden by its flags."""
        given = self.sections.get(name, {})
        return {**(given if isinstance(given, Mapping) else {}), **self.flags[name].values}

    @property
    def teachers(self) -> Any:
        """The `teacher:` section of the files: settings or a list of them."""
        return self.sections.get(TEACHER) or {}


def read_settings(argv: Sequence[str]) -> RunSettings:
    """Read `argv` and the files it names; raise `ConfigError` with one line for anything that cannot be used."""
    own, flags = split_section_flags(hand_on_environment_options(argv))
    launched = settings_from(os.environ)
    if launched.get("world_size", 1) != 1:
        raise ConfigError(
            f"$WORLD_SIZE is {launched['world_size']}: {PROG} would start every program once for each process; start "
            "the trainer with it (atropos-grpo, or example_trainer/grpo.py), and the other programs by themselves"
        )
    trainer, own, paths = trainer_settings(own, default_mode=_DEFAULT_MODE)
    trainer = launched | trainer
    sections: dict[str, Any] = {}
    layout: DistributedLayout | None = None
    for path in paths:
        sections = merge(sections, read_sections(path))
        layout = _layout_in(path) or layout
    _, placed = split_section(sections.get(PLACEMENT) or {})
    trainer = {**launchers_own(placed, layout), **trainer}
    config = load_config(RunConfig, own, prog=PROG, description=DESCRIPTION, defaults=trainer)
    environments, remarks = read_environments(
        sections,
        {name: given.values for name, given in flags.items()},
        config.preset,
        may_choose="atropos_url" not in config.model_fields_set,
    )
    sections["vllm"] = below_flags(sections.get("vllm") or {}, named_in(own, RunConfig))
    vllm = {**sections["vllm"], **flags["vllm"].settings}
    no_server = bool(config.remote_servers) or not config.local_servers
    config, vllm_remarks = with_vllm_section(config, vllm, no_server=no_server)
    settings = RunSettings(
        trainer=config,
        sections={name: sections.get(name) or {} for name in PREFIXED_SECTIONS},
        flags=flags,
        environments=environments,
        layout=layout,
        placement=read_placement(placed, config.model_dump()),
        remarks=remarks,
        reseeded="seed" in config.model_fields_set and config.seed != trainer.get("seed"),
    )
    check_teacher(settings)
    return replace(settings, remarks=(*remarks, *vllm_remarks, *without_effect(settings)))


def without_effect(settings: RunSettings, *used: str) -> list[str]:
    """Return a sentence for each of the trainer's settings that was changed and has no effect in this launch.

    `used` names further options of the server that the caller makes use of.
    """
    # A teacher's server takes its settings from those of the policy's.
    config = settings.trainer
    starts = (not config.remote_servers and config.local_servers > 0) or own_teacher(settings) is not None
    found = settings_without_effect(config, is_launched=True, used=SERVER_FIELDS if starts else ("log_dir", *used))
    return [*found, *_unused_sections(settings), *unused_distillation(settings)]


def _unused_sections(settings: RunSettings) -> Iterator[str]:
    """Yield a sentence on each section of a program that this launch does not start."""
    reasons = {
        "api": "with --atropos-url no broker is started" if "atropos_url" in settings.trainer.model_fields_set else "",
        "openai": "" if settings.environments else "no environment is started here",
    }
    for section, reason in reasons.items():
        if reason and (given := settings.section(section)):
            yield f"{', '.join(f'{section}.{name}' for name in given)}: no effect, since {reason}"


def trainer_settings(argv: Sequence[str], *, default_mode: str = "none") -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the trainer's settings in the files of `argv` for the chosen mode; the other arguments; and the files."""
    paths, own = _split_config_paths(argv)
    refuse_two_sizes(named_in(own, TrainingConfig))
    settings: dict[str, Any] = {}
    for path in paths:
        settings |= read_config_file(TrainingConfig, path, section="trainer")
        settings |= _sizes_of(_layout_in(path), settings, where=f"--config {path}, placement")
    mode = _requested_mode(own) or settings.get("weight_bridge_mode", default_mode)
    for path in paths:
        sections = read_sections(path)
        on_gpu = bool(sections.get("modes_on_gpu")) and serves_from_gpu(os.environ)
        for section in ("modes", "modes_on_gpu"):
            for name, differing in (sections.get(section) or {}).items():
                checked = check_keys(TrainingConfig, differing or {}, where=f"--config {path}, {section}.{name}")
                if name == mode and (section == "modes" or on_gpu):
                    settings |= checked
    return settings, own, paths


def _layout_in(path: str) -> DistributedLayout | None:
    """Return the layout of the file's `placement` section, if it has one."""
    section = read_sections(path).get(PLACEMENT)
    if not section:
        return None
    try:
        sizes, _ = split_section(section)
        return DistributedLayout.from_section(sizes) if sizes else None
    except BadLayout as error:
        raise ConfigError(f"--config {path}, {PLACEMENT}: {error}") from error


def _sizes_of(layout: DistributedLayout | None, settings: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return the trainer's settings that a layout decides; raise `ConfigError` if they are given differently."""
    if layout is None:
        return {}
    sizes = {
        "world_size": layout.world_size,
        "trainer_tensor_parallel_size": layout.actor_tp_size,
        "vllm_tensor_parallel_size": layout.rollout_tp_size,
    }
    for name, size in sizes.items():
        if settings.get(name, size) != size:
            raise ConfigError(f"{where} has a size of {size} for trainer.{name}, which is {settings[name]}")
    return sizes


def find_run_file(name: str) -> str:
    """Return the path of a run file: that file if it exists, else the package's own of this name."""
    if Path(name).exists():
        return name
    shipped = {path.stem: path for path in RUN_FILES.glob("*.yaml")}
    if name in shipped:
        return str(shipped[name])
    stem = Path(name).stem
    proposal = f", did you mean {stem}?" if stem in shipped else nearest(stem, shipped)
    shipped_names = ", ".join(sorted(shipped))
    raise ConfigError(f"--config {name}: no such file{proposal or '.'} These come with the package: {shipped_names}")


def _requested_mode(argv: Sequence[str]) -> str | None:
    """Return the value of `--weight-bridge-mode`, the last one if there are several."""
    asked = None
    for index, argument in enumerate(argv):
        flag, equals, value = argument.partition("=")
        if flag.replace("_", "-") == "--weight-bridge-mode":
            asked = value if equals else next(iter(argv[index + 1 :]), None)
    return asked


def _split_config_paths(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    paths: list[str] = []
    rest: list[str] = []
    waiting = iter(argv)
    for argument in waiting:
        if argument.startswith("--config="):
            paths.append(find_run_file(argument.partition("=")[2]))
        elif argument == "--config":
            path = next(waiting, None)
            if path is None:
                raise ConfigError("--config needs the path of a YAML file")
            paths.append(find_run_file(path))
        else:
            rest.append(argument)
    return paths, rest
