"""Options that are secrets by their declaration, `Field(..., json_schema_extra=SECRET)`, and settings without them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from atropos_api.common.redaction import redact

SECRET: Final[dict[str, Any]] = {"secret": True}
"""The mark of a field that is a secret, as its `json_schema_extra`."""


def is_secret_field(field: FieldInfo) -> bool:
    """Whether a field was declared to be a secret."""
    extra = field.json_schema_extra
    return isinstance(extra, Mapping) and bool(extra.get("secret"))


def public_settings(config: BaseModel, *, exclude: set[str] | None = None) -> dict[str, Any]:
    """All settings of `config` as JSON holds them, without its secrets; for every record of a run."""
    shown: dict[str, Any] = redact(_without_declared(config, config.model_dump(mode="json", exclude=exclude)))
    return shown


def _without_declared(config: BaseModel, dumped: Mapping[str, Any]) -> dict[str, Any]:
    """What was dumped of `config`, without the fields declared secret in it or in any model inside it."""
    declared = {name for name, field in type(config).model_fields.items() if is_secret_field(field)}
    return {
        name: _without_declared_inside(getattr(config, name, None), value)
        for name, value in dumped.items()
        if name not in declared
    }


def _without_declared_inside(value: Any, dumped: Any) -> Any:
    if isinstance(value, BaseModel) and isinstance(dumped, Mapping):
        return _without_declared(value, dumped)
    if isinstance(value, Mapping) and isinstance(dumped, Mapping):
        known = {str(key): inner for key, inner in value.items()}
        return {key: _without_declared_inside(known.get(str(key)), inner) for key, inner in dumped.items()}
    if isinstance(value, list | tuple) and isinstance(dumped, list) and len(value) == len(dumped):
        return [_without_declared_inside(*pair) for pair in zip(value, dumped, strict=True)]
    return dumped
