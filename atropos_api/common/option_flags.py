"""The command-line options that follow from a pydantic model: their names, types and help.

`cliconfig` builds command lines from them, and `option_table` prints them as Markdown for the reference pages.
`aliases` declares further names of a setting.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from atropos_api.common.secrets import is_secret_field


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option: `path` is dotted (`env.group_size`), `kind` one of value, bool, list, json."""

    path: str
    kind: str
    nullable: bool
    aliases: tuple[str, ...]
    description: str
    required: bool
    default: object
    """The value used if none is given; `PydanticUndefined` if a factory makes it or the option is required."""
    choices: tuple[str, ...]
    values: tuple[object, ...] = ()
    """The choices as the setting has them: numbers and None too, which a flag gives as text."""
    secret: bool = False
    """True if the value must never be shown."""
    type_name: str = "text"
    """The type in words, as the reference pages give it: integer, number, text, list of texts."""

    @property
    def help(self) -> str:
        """The description with the default, unless that is empty, computed, secret or already described."""
        if self.required:
            return f"{self.description} (required)".strip()
        if self.secret and self.default is not None:
            return self.description
        value = self.default.value if isinstance(self.default, Enum) else self.default
        said = value is None and "default:" in self.description
        if said or value is PydanticUndefined or value in ("", {}) or isinstance(value, BaseModel):
            return self.description
        shown = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        return f"{self.description} (default: {shown})".strip()

    @property
    def group(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def flags(self) -> list[str]:
        """The spellings of the flag: kebab case first, then the field's own, then aliases."""
        prefix = f"{self.group}." if self.group else ""
        leaf = self.path.rpartition(".")[2]
        spelt = [f"--{prefix}{form}" for name in (leaf, *self.aliases) for form in (name.replace("_", "-"), name)]
        return list(dict.fromkeys(spelt))

    def add_to(self, group: argparse._ActionsContainer) -> None:
        """Declare this option to argparse; booleans may stand alone, take a value or be negated with `--no-`."""
        metavar = "|".join(self.choices) if self.choices else self.path.rpartition(".")[2].upper()
        text = self.help.replace("%", "%%")
        if self.kind == "bool":
            group.add_argument(*self.flags, dest=self.path, nargs="?", const="true", metavar="true|false", help=text)
            negated = [flag.replace("--", "--no-", 1) for flag in self.flags]
            group.add_argument(*negated, dest=self.path, action="store_const", const="false", help=argparse.SUPPRESS)
        elif self.kind in {"list", "json"}:
            shown = "KEY=VALUE" if self.kind == "json" else metavar
            # A flag that is repeated adds to its list: a value that was given first would be dropped without an error.
            group.add_argument(*self.flags, dest=self.path, nargs="+", action="extend", metavar=shown, help=text)
        else:
            group.add_argument(*self.flags, dest=self.path, metavar=metavar, help=text)

    def decode(self, given: object) -> object:
        """Return text as pydantic should see it: `None` for nullable options, a mapping for JSON or KEY=VALUE words."""
        while self.nullable and isinstance(given, list) and "None" in given:
            given = given[given.index("None") + 1 :]  # None discards the values that come before it
        if self.nullable and given in ("None", []):
            return None
        if given in self.choices and given not in self.values:
            return self.values[self.choices.index(str(given))]
        return _as_mapping(given) if self.kind == "json" and isinstance(given, list) else given


def _as_mapping(words: list[str]) -> object:
    """Return the mapping that JSON or KEY=VALUE words describe, else the text, which pydantic then refuses.

    JSON may be spread over several words, or come several times if the flag is repeated; a later value of a key wins.
    """
    text = " ".join(words)
    for pieces in ([text], words) if text.lstrip().startswith("{") else (words,):
        found = [_mapping_of(piece) for piece in pieces]
        if all(isinstance(mapping, dict) for mapping in found):
            return {key: value for mapping in found for key, value in mapping.items()}
    return text


def _mapping_of(piece: str) -> Any:
    """Return the mapping that JSON or one KEY=VALUE describes, else None."""
    if piece.lstrip().startswith("{"):
        with contextlib.suppress(json.JSONDecodeError):
            return json.loads(piece)
        return None
    key, _, value = piece.partition("=")
    return {key: _value(value)} if re.fullmatch(r"[\w.-]+", key) and "=" in piece else None


def _value(text: str) -> object:
    """Return a value as a YAML file would hold it: number, switch, list, mapping, else text."""
    with contextlib.suppress(yaml.YAMLError, ValueError, RecursionError):  # ValueError: 2024-13-45 is no date
        return yaml.safe_load(text)
    return text


def list_options(model: type[BaseModel], prefix: str = "") -> list[Option]:
    """Return all options of a model, nested models flattened with dots, in the order of the fields."""
    return list(_walk(model, prefix))


def named_in(argv: Iterable[str], model: type[BaseModel]) -> frozenset[str]:
    """Return the paths of the model's options that a command line names."""
    words = {word.partition("=")[0].replace("--no-", "--", 1) for word in argv if word.startswith("--")}
    return frozenset(option.path for option in list_options(model) if not words.isdisjoint(option.flags))


def nested_model(annotation: Any) -> type[BaseModel] | None:
    """Return the model inside an annotation such as `Server`, `Server | None` or `Server | list[Server]`."""
    for member in _members(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            return member
    return None


def takes_null(annotation: Any) -> bool:
    """Return True if None is a value of this annotation."""
    return type(None) in _members(annotation)


def _walk(model: type[BaseModel], prefix: str) -> Iterator[Option]:
    for name, field in model.model_fields.items():
        inner = nested_model(field.annotation)
        if inner is not None:
            yield from _walk(inner, f"{prefix}{name}.")
        else:
            yield _option(f"{prefix}{name}", field)


def _option(path: str, field: FieldInfo) -> Option:
    members = _members(field.annotation)
    values = tuple(choice for member in members for choice in _choices(member))
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    aliases = extra.get("aliases", ())
    return Option(
        path=path,
        kind=_kind(members),
        nullable=type(None) in members,
        aliases=tuple(str(alias) for alias in aliases) if isinstance(aliases, list | tuple) else (),
        description=field.description or "",
        required=field.is_required(),
        default=field.default,
        choices=tuple(map(str, values)),
        values=values,
        secret=is_secret_field(field),
        type_name=" or ".join(dict.fromkeys(word for member in members if (word := _type_name(member)))),
    )


def _members(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in {Union, types.UnionType}:
        return tuple(member for part in get_args(annotation) for member in _members(part))
    return (annotation,)


def _kind(members: tuple[Any, ...]) -> str:
    origins = {get_origin(member) or member for member in members}
    if bool in origins:
        return "bool"
    if origins & {list, tuple, set, frozenset}:
        return "list"
    return "json" if dict in origins else "value"


def _choices(member: Any) -> tuple[Any, ...]:
    if get_origin(member) is Literal:
        return get_args(member)
    if isinstance(member, type) and issubclass(member, Enum):
        return tuple(choice.value for choice in member)
    return ()


_TYPE_NAMES = {bool: "switch", int: "integer", float: "number", str: "text", Path: "path", dict: "JSON"}


def _type_name(member: Any) -> str:
    """Return the word for one member of an annotation; empty for None, which is a missing value and no type."""
    if member is type(None):
        return ""
    origin = get_origin(member) or member
    if _choices(member):
        return "choice"
    if origin in {list, tuple, set, frozenset}:
        items = dict.fromkeys(f"{_type_name(part)}s" for part in get_args(member) if part is not Ellipsis)
        return f"list of {' or '.join(items) or 'values'}"
    return _TYPE_NAMES.get(origin, "JSON" if isinstance(origin, type) and issubclass(origin, Mapping) else "text")


def option_table(options: Iterable[Option], *, with_types: bool = False) -> str:
    """Return a Markdown table of flags, defaults and meanings, and of their types if asked for."""
    rows = "".join(_row(option, with_types=with_types) for option in options)
    head = "| option | type | default | meaning |\n|---|---|---|---|\n"
    return f"{head if with_types else head.replace(' type |', '').replace('---|', '', 1)}{rows}"


def cell(text: str) -> str:
    """Return text that fits in one table cell: on one line, with `|` escaped."""
    return " ".join(text.split()).replace("|", "\\|")


def _row(option: Option, *, with_types: bool = False) -> str:
    spelt = [flag for flag in option.flags if "_" not in flag]
    flags = " or ".join(f"`{flag}`" for flag in spelt)
    text, _, default = option.help.partition(" (default: ")
    needed = text.endswith("(required)")
    shown = "(required)" if needed else f"`{default.removesuffix(')')}`" if default else ""
    choices = (
        f"{'' if text.endswith('.') else '.'} One of {', '.join(f'`{choice}`' for choice in option.choices)}."
        if option.choices
        else ""
    )
    kind = f" {option.type_name} |" if with_types else ""
    return f"| {flags} |{kind} {shown} | {cell(text.removesuffix('(required)').strip())}{choices} |\n"


def aliases(*names: str) -> dict[str, Any]:
    """Return the `json_schema_extra` of a `Field` that adds `--name` for each of `names`."""
    return {"aliases": list(names)}


def flag(field: str) -> str:
    """Return the flag of a field, as messages name it."""
    return "--" + field.replace("_", "-")
