"""Reads the sections of a run file other than the trainer's, and refuses what has the wrong form or name.

The settings inside a section are the business of the program that it is for. Names that no program would see are
checked here: those of sections, of the keys of an entry of `environments:`, and of the modes of `modes:`. The broker's
settings are checked here too, since its program would refuse them only when the run has begun.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from atropos_api.common.cliconfig import RUN_FILE_SECTIONS, ConfigError, check_keys, load_config, nearest
from atropos_api.common.secrets import redact
from atropos_api.common.yaml_files import read_yaml
from example_trainer.launcher.section_flags import PREFIXED_SECTIONS, SectionFlags
from example_trainer.launcher.teacher import TEACHER
from example_trainer.options.modes import MODES

ENTRY_KEYS = ("file", "env", "openai", TEACHER)
"""The keys of an entry of `environments:`."""


def read_sections(path: str) -> dict[str, Any]:
    """Return the sections of a run file other than the trainer's; empty for a file without sections."""
    content = read_yaml(Path(path)) or {}
    if not set(RUN_FILE_SECTIONS) & set(content):
        return {}
    for key, value in content.items():
        if key not in RUN_FILE_SECTIONS:
            raise ConfigError(f"--config {path}: unknown section {key!r}{nearest(str(key), RUN_FILE_SECTIONS)}")
        has_form, words = _FORMS.get(key, (_is_mapping, "settings"))
        if value is not None and not has_form(value):
            shown = json.dumps(redact(value), default=str)
            raise ConfigError(f"--config {path}: section {key!r} takes {words}, got {shown}")
        _refuse_unknown_names(key, value, where=f"--config {path}, {key}")
    return {key: _by_field(key, value, f"--config {path}, {key}") for key, value in content.items() if key != "trainer"}


def _by_field(section: str, value: Any, where: str) -> Any:
    """Return a section with its settings named as fields are (`group-size` is `group_size`): plan and checks read some.

    Raise `ConfigError` for a setting that is named in both ways.
    """
    if not value:
        return value
    if section == "environments":
        return [{part: _by_field(part, inner, f"{where}: {part}") for part, inner in entry.items()} for entry in value]
    if section not in PREFIXED_SECTIONS:
        return value
    if isinstance(value, list):
        return [_by_field(section, server, where) for server in value]
    named: dict[str, Any] = {}
    for key, inner in value.items():
        name = str(key).replace("-", "_")
        if name in named:
            raise ConfigError(f"{where}: {name} is given with - and with _; leave one of them out")
        is_server = section == TEACHER and name == "vllm" and isinstance(inner, Mapping)
        named[name] = _by_field("vllm", inner, f"{where}: vllm") if is_server else inner
    return named


def _refuse_unknown_names(section: str, value: Any, *, where: str) -> None:
    """Raise `ConfigError` for a mode or a setting of the broker that does not exist, and for a key of an environment's
    entry that nobody reads.
    """
    if section == "api" and value:
        from atropos_api.config import BrokerConfig

        check_keys(BrokerConfig, value, where=where)
    if section in {"modes", "modes_on_gpu"}:
        for name in value or {}:
            if name not in MODES:
                raise ConfigError(f"{where}: unknown mode {name!r}{nearest(str(name), MODES)} ({', '.join(MODES)})")
    for number, entry in enumerate(value or () if section == "environments" else (), 1):
        for name in entry:
            if name not in ENTRY_KEYS:
                known = ", ".join(ENTRY_KEYS)
                raise ConfigError(
                    f"{where}: unknown key {name!r} in entry {number}{nearest(str(name), ENTRY_KEYS)} ({known}); "
                    "settings of the environment belong under env"
                )


def refuse_broker_settings(section: Mapping[str, Any], flags: SectionFlags) -> None:
    """Raise `ConfigError` for settings that the broker's program would refuse; its port is checked with the others."""
    content = {name: value for name, value in section.items() if name != "port"}
    arguments = flags.without("port").arguments
    if not content and not arguments:
        return
    # It takes 0.2 s to import, which a launch without such settings saves.
    from atropos_api.config import BrokerConfig

    class BrokerSection(BaseModel):
        model_config = ConfigDict(extra="forbid")

        api: BrokerConfig

    load_config(BrokerSection, arguments, prog="run-api", description="", defaults={"api": content})


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
    "modes_on_gpu": (_is_modes, "settings by weight bridge mode"),
}
"""Check of the form of each section that is more than settings, and the form's name in messages."""
