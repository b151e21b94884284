"""The command-line options that follow from a pydantic model: names, types, help. Used by `cliconfig` alone."""

from __future__ import annotations

import argparse
import json
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option: `path` is dotted (`env.group_size`), `kind` one of value, bool, list, json."""

    path: str
    kind: str
    nullable: bool
    aliases: tuple[str, ...]
    help: str
    choices: tuple[str, ...]

    @property
    def group(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def flags(self) -> list[str]:
        """Kebab spelling first, then the field's own, then aliases."""
        prefix = f"{self.group}." if self.group else ""
        leaf = self.path.rpartition(".")[2]
        spelt = [f"--{prefix}{form}" for name in (leaf, *self.aliases) for form in (name.replace("_", "-"), name)]
        return list(dict.fromkeys(spelt))

    def add_to(self, group: argparse._ArgumentGroup) -> None:
        """Declare this option; booleans may stand bare, carry a value or be negated with `--no-`."""
        metavar = "|".join(self.choices) if self.choices else self.path.rpartition(".")[2].upper()
        text = self.help.replace("%", "%%")
        if self.kind == "bool":
            group.add_argument(*self.flags, dest=self.path, nargs="?", const="true", metavar="true|false", help=text)
            negated = [flag.replace("--", "--no-", 1) for flag in self.flags]
            group.add_argument(*negated, dest=self.path, action="store_const", const="false", help=argparse.SUPPRESS)
        elif self.kind == "list":
            group.add_argument(*self.flags, dest=self.path, nargs="+", metavar=metavar, help=text)
        else:
            group.add_argument(*self.flags, dest=self.path, metavar=metavar, help=text)

    def decode(self, given: object) -> object:
        """Text as pydantic should see it: `None` for nullable options, parsed JSON for mappings."""
        if self.nullable and given in ("None", ["None"]):
            return None
        if self.kind == "json" and isinstance(given, str):
            try:
                return json.loads(given)
            except json.JSONDecodeError:
                return given
        return given


def list_options(model: type[BaseModel], prefix: str = "") -> list[Option]:
    """All options of a model, nested models flattened with dots, in the order of the fields."""
    return list(_walk(model, prefix))


def nested_model(annotation: Any) -> type[BaseModel] | None:
    """The model inside an annotation such as `Server`, `Server | None` or `Server | list[Server]`."""
    for member in _members(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            return member
    return None


def _walk(model: type[BaseModel], prefix: str) -> Iterator[Option]:
    for name, field in model.model_fields.items():
        inner = nested_model(field.annotation)
        if inner is not None:
            yield from _walk(inner, f"{prefix}{name}.")
        else:
            yield _option(f"{prefix}{name}", field)


def _option(path: str, field: FieldInfo) -> Option:
    members = _members(field.annotation)
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    aliases = extra.get("aliases", ())
    return Option(
        path=path,
        kind=_kind(members),
        nullable=type(None) in members,
        aliases=tuple(str(alias) for alias in aliases) if isinstance(aliases, list | tuple) else (),
        help=_help(field),
        choices=tuple(
            str(choice) for member in members if get_origin(member) is Literal for choice in get_args(member)
        ),
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


def _literal_values(member: Any) -> tuple[Any, ...]:
    return get_args(member) if get_origin(member) is Literal else ()


def _help(field: FieldInfo) -> str:
    text = field.description or ""
    if field.is_required():
        return f"{text} (required)".strip()
    if field.default is PydanticUndefined:
        return text
    default = field.default
    return text if isinstance(default, BaseModel) else f"{text} (default: {default})".strip()
