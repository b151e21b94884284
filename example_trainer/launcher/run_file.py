"""Reads run files and flags, and sorts the settings by the program they belong to.

A run file has sections `trainer: api: vllm: env: openai: teacher:` (or `environments:`, a list), and `modes:`, which
holds the trainer's settings that differ in a weight bridge mode: full weights and adapters need different rates.
On the command line the trainer's flags have no prefix; those of the other programs have their section as a prefix
(`--env.group_size 8`). Each program checks its own settings; only the trainer's and the launcher's are known here.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field

from atropos_api.common.cliconfig import ConfigError, check_keys, load_config, nearest, read_config_file
from atropos_api.common.secrets import redact, redact_arguments
from example_trainer.config import TrainingConfig
from example_trainer.launcher.environment_settings import EnvironmentSettings, merge, read_environments
from example_trainer.launcher.teacher import TEACHER, TEACHER_SERVER, check_teacher
from example_trainer.options.modes import BridgeMode
from example_trainer.options.presets import hand_on_environment_options

PREFIXED_SECTIONS = ("api", "vllm", "env", "openai", TEACHER)
FLAG_SECTIONS = (*PREFIXED_SECTIONS, TEACHER_SERVER)
SECTIONS = ("trainer", *PREFIXED_SECTIONS, "environments", "modes")
PROG = "atropos-grpo-run"
_DEFAULT_MODE: BridgeMode = "shared_vllm"

DESCRIPTION = """Start broker, vLLM, environment and trainer, watch them, and end them together.

The options below are the trainer's and the launcher's own. Options of the other programs carry their section as a
prefix: --api.port 8002, --vllm.max_model_len 512, --env.group_size 8, --openai.server_type vllm. --env my_env.py, short
for --env.server, names the environment. --teacher.model_name starts a teacher for it, with --teacher.gpu 1 and
--teacher.vllm.max_model_len 512; --teacher.base_url names one that runs. With --atropos-url the broker is yours;
without an env section the environments are yours too."""


class RunConfig(TrainingConfig):
    """The trainer's settings and the launcher's own."""

    weight_bridge_mode: BridgeMode = Field(
        _DEFAULT_MODE, description="shared_vllm, lora_only, lora_restart, or none (checkpoint, restart)."
    )
    dry_run: bool = Field(False, description="Print what would run, and start nothing.")
    progress: Literal["auto", "live", "plain"] = Field(
        "auto", description="live: one view that is redrawn; plain: one line per step; auto: live on a terminal."
    )
    cost_per_hour: float | None = Field(
        None, ge=0.0, description="Price of all machines per hour, in any currency: the summary then tells the cost."
    )


LAUNCHER_FIELDS = frozenset(RunConfig.model_fields) - frozenset(TrainingConfig.model_fields)


@dataclass(frozen=True, kw_only=True, slots=True)
class SectionFlags:
    """The flags of one program as they were typed; the program's own parser checks them."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """Key (snake case) to text, list of texts, True or False, for the settings that the launcher itself reads."""
    groups: tuple[tuple[str, ...], ...] = ()
    """Each flag with its values as typed, section prefix included."""

    @property
    def arguments(self) -> tuple[str, ...]:
        return tuple(word for group in self.groups for word in group)

    def without(self, *keys: str) -> SectionFlags:
        """Return these flags without `keys`, which the launcher handles itself."""
        kept = [group for group in self.groups if _key_of(group[0]) not in keys]
        return _section_flags([list(group) for group in kept])

    @property
    def secret_values(self) -> dict[str, Any]:
        """Values of the flags that no command line may show, in the form of a settings file."""
        found: dict[str, Any] = {}
        for key, value in _section_flags([list(group) for group in self.groups if _is_secret(group)]).values.items():
            *parents, leaf = key.split(".")
            content: dict[str, Any] = {leaf: _parsed(value)}
            for parent in reversed(parents):
                content = {parent: content}
            found = merge(found, content)
        return found

    def without_secrets(self) -> SectionFlags:
        return _section_flags([list(group) for group in self.groups if not _is_secret(group)])

    def unprefixed(self, section: str) -> tuple[str, ...]:
        """Return the arguments without the section prefix, for a program that has no sections."""
        bare = (argument.replace(f"--{section}.", "--", 1) for argument in self.arguments)
        return tuple(argument.replace(f"--no-{section}.", "--no-", 1) for argument in bare)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """All settings as they were asked for; nothing is decided yet."""

    trainer: RunConfig
    sections: Mapping[str, Mapping[str, Any]]
    flags: Mapping[str, SectionFlags]
    environments: tuple[EnvironmentSettings, ...]
    remarks: tuple[str, ...] = ()
    """Sentences on what a preset has chosen, or could not set here."""
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
    trainer, own, paths = trainer_settings(own, default_mode=_DEFAULT_MODE)
    sections: dict[str, Any] = {}
    for path in paths:
        sections = merge(sections, read_sections(path))
    config = load_config(RunConfig, own, prog=PROG, description=DESCRIPTION, defaults=trainer)
    environments, remarks = read_environments(
        sections,
        {name: given.values for name, given in flags.items()},
        config.preset,
        may_choose="atropos_url" not in config.model_fields_set,
    )
    settings = RunSettings(
        trainer=config,
        sections={name: sections.get(name) or {} for name in PREFIXED_SECTIONS},
        flags=flags,
        environments=environments,
        remarks=remarks,
        reseeded="seed" in config.model_fields_set and config.seed != trainer.get("seed"),
    )
    check_teacher(settings)
    return settings


def trainer_settings(argv: Sequence[str], *, default_mode: str = "none") -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the trainer's settings from the files in `argv` for the mode asked for, the other arguments, the files."""
    paths, own = _split_config_paths(argv)
    settings: dict[str, Any] = {}
    for path in paths:
        settings |= read_config_file(TrainingConfig, path, section="trainer")
    mode = _requested_mode(own) or settings.get("weight_bridge_mode", default_mode)
    for path in paths:
        differing = (read_sections(path).get("modes") or {}).get(mode) or {}
        settings |= check_keys(TrainingConfig, differing, where=f"--config {path}, modes.{mode}")
    return settings, own, paths


def _requested_mode(argv: Sequence[str]) -> str | None:
    """Return the value of `--weight-bridge-mode`, the last one if there are several."""
    asked = None
    for index, argument in enumerate(argv):
        flag, equals, value = argument.partition("=")
        if flag.replace("_", "-") == "--weight-bridge-mode":
            asked = value if equals else next(iter(argv[index + 1 :]), None)
    return asked


def split_section_flags(argv: Sequence[str]) -> tuple[list[str], dict[str, SectionFlags]]:
    """Split the arguments into the launcher's own and those with a section's prefix."""
    own: list[str] = []
    flags_by_section: dict[str, list[list[str]]] = {name: [] for name in FLAG_SECTIONS}
    current: list[str] | None = None
    for argument in map(_expand_env_flag, argv):
        if argument.startswith("--"):
            current = _section_of(argument, flags_by_section)
            if current is not None:
                current.append(argument)
                continue
        (own if current is None else current).append(argument)
    return own, {name: _section_flags(groups) for name, groups in flags_by_section.items()}


def read_sections(path: str) -> dict[str, Any]:
    """Return the sections of a run file other than the trainer's; empty for a file without sections."""
    content = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    if not set(SECTIONS) & set(content):
        return {}
    for key, value in content.items():
        if key not in SECTIONS:
            raise ConfigError(f"--config {path}: unknown section {key!r}{nearest(str(key), SECTIONS)}")
        has_form, words = _FORMS.get(key, (_is_mapping, "settings"))
        if value is not None and not has_form(value):
            shown = json.dumps(redact(value), default=str)
            raise ConfigError(f"--config {path}: section {key!r} takes {words}, got {shown}")
    return {key: value for key, value in content.items() if key != "trainer"}


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_server(value: Any) -> bool:
    """Return True if `value` has the form of one inference server or a list of them."""
    return _is_mapping(value) or (isinstance(value, list) and all(map(_is_mapping, value)))


def _is_environments(value: Any) -> bool:
    """Return True if `value` is a list of entries whose `file`, `env`, `openai` and `teacher` have the right form."""
    return isinstance(value, list) and all(
        _is_mapping(entry)
        and isinstance(entry.get("env") or {}, Mapping)
        and _is_server(entry.get("openai") or {})
        and _is_server(entry.get(TEACHER) or {})
        and isinstance(entry.get("file") or "", str)
        for entry in value
    )


def _is_modes(value: Any) -> bool:
    return _is_mapping(value) and all(isinstance(settings or {}, Mapping) for settings in value.values())


_FORMS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "openai": (_is_server, "settings, or a list of them"),
    TEACHER: (_is_server, "settings, or a list of them"),
    "environments": (_is_environments, "a list of settings, each with file, env, openai and teacher"),
    "modes": (_is_modes, "settings by weight bridge mode"),
}
"""Check of the form of each section that is more than settings, and the form's name in messages."""


def _expand_env_flag(argument: str) -> str:
    """Expand `--env`, which is short for `--env.server`."""
    name, equals, value = argument.partition("=")
    return f"--env.server{equals}{value}" if name == "--env" else argument


def _section_of(argument: str, flags_by_section: Mapping[str, list[list[str]]]) -> list[str] | None:
    """Add a new group for this flag to its section and return it; None for a flag without a section."""
    name = argument[2:].removeprefix("no-").split("=", 1)[0]
    section, dot, _ = name.partition(".")
    if not dot:
        return None
    if name.startswith(f"{TEACHER_SERVER}."):
        section = TEACHER_SERVER
    if section not in flags_by_section:
        raise ConfigError(
            f"unknown option {argument}{nearest(section, flags_by_section)} (sections: {', '.join(flags_by_section)})"
        )
    flags_by_section[section].append([])
    return flags_by_section[section][-1]


def _section_flags(groups: list[list[str]]) -> SectionFlags:
    values: dict[str, Any] = {}
    for flag, *given in groups:
        _, equals, inline = flag.partition("=")
        words = [inline, *given] if equals else given
        values[_key_of(flag)] = words if len(words) > 1 else words[0] if words else not flag.startswith("--no-")
    return SectionFlags(values=values, groups=tuple(tuple(group) for group in groups))


def _is_secret(group: Sequence[str]) -> bool:
    return redact_arguments(group) != list(group)


def _parsed(value: Any) -> Any:
    """Return a flag's value as a file would hold it: a JSON object or array becomes a mapping or list."""
    if isinstance(value, str) and value[:1] in {"{", "["}:
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value


def _key_of(flag: str) -> str:
    """Return a flag's key: `group_size` for `--env.group-size=8`, `seed` for `--teacher.vllm.seed`."""
    name = flag.partition("=")[0].removeprefix("--").removeprefix("no-")
    if name.startswith(f"{TEACHER_SERVER}."):
        return name.removeprefix(f"{TEACHER_SERVER}.").replace("-", "_")
    return name.partition(".")[2].replace("-", "_")


def _split_config_paths(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    paths: list[str] = []
    rest: list[str] = []
    waiting = iter(argv)
    for argument in waiting:
        if argument.startswith("--config="):
            paths.append(argument.partition("=")[2])
        elif argument == "--config":
            path = next(waiting, None)
            if path is None:
                raise ConfigError("--config needs the path of a YAML file")
            paths.append(path)
        else:
            rest.append(argument)
    return paths, rest
