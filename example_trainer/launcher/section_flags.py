"""The flags that have a program's section as prefix (`--env.group-size 8`), kept as they were typed.

Each program's own parser checks them; the launcher reads only the values that it needs itself.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atropos_api.common.cliconfig import ConfigError, merge, nearest
from atropos_api.common.secrets import redact_arguments
from example_trainer.launcher.teacher import TEACHER, TEACHER_SERVER

PREFIXED_SECTIONS = ("api", "vllm", "env", "openai", TEACHER)
FLAG_SECTIONS = (*PREFIXED_SECTIONS, TEACHER_SERVER)


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

    @property
    def settings(self) -> dict[str, Any]:
        """Key to value as a settings file would hold it."""
        return {key: _parsed(value) for key, value in self.values.items()}

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


def _expand_env_flag(argument: str) -> str:
    """Expand `--env`, which is short for `--env.server`."""
    name, equals, value = argument.partition("=")
    return f"--env.server{equals}{value}" if name == "--env" else argument


def _section_of(argument: str, flags_by_section: Mapping[str, list[list[str]]]) -> list[str] | None:
    """Add a new group for this flag to its section and return it; None for a flag without a section."""
    flag = argument.split("=", 1)[0]
    name = flag[2:].removeprefix("no-")
    section, dot, _ = name.partition(".")
    if not dot:
        return None
    if name.startswith(f"{TEACHER_SERVER}."):
        section = TEACHER_SERVER
    if section == "trainer":
        bare = flag.replace("trainer.", "", 1)
        raise ConfigError(f"unknown option {flag}: the trainer's options have no prefix; write {bare}")
    if section not in flags_by_section:
        raise ConfigError(
            f"unknown option {flag}{nearest(section, flags_by_section)} (sections: {', '.join(flags_by_section)})"
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
