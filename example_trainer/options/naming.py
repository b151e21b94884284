"""How a setting's further names are told to the command line."""

from __future__ import annotations

from typing import Any


def aliases(*names: str) -> dict[str, Any]:
    """`Field(json_schema_extra=...)` that adds `--name` for each of `names`."""
    return {"aliases": list(names)}


def flag(field: str) -> str:
    """The flag of a field, as messages name it."""
    return "--" + field.replace("_", "-")
