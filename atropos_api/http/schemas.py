"""Schemas of the contract's types, as generators of clients understand them."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, Final

import msgspec

from atropos_api.http.contract import SECTIONS, Schema

REFERENCE: Final = "#/components/schemas/{name}"


def schema_of(content: Any) -> Schema:
    """The schema of what some route takes or answers; types of the contract are referred to."""
    if isinstance(content, tuple):
        return {"anyOf": [schema_of(one) for one in content]}
    return _schemas()[0][repr(content)]


def components() -> dict[str, Schema]:
    """The types of the contract by name, each field with its own description."""
    return _schemas()[1]


@functools.cache
def _schemas() -> tuple[Mapping[str, Schema], dict[str, Schema]]:
    used = {repr(content): content for content in _contents()}
    schemas, found = msgspec.json.schema_components(list(used.values()), ref_template=REFERENCE)
    kinds = {kind.__name__: kind for kind in _structs(msgspec.inspect.multi_type_info(list(used.values())))}
    named = {name: _described(_plain(schema), kinds.get(name)) for name, schema in found.items()}
    return dict(zip(used, map(_plain, schemas), strict=True)), named


def _contents() -> Iterator[Any]:
    for operations in SECTIONS.values():
        for operation in operations:
            for content in (operation.body, *(answer.content for answer in operation.answers.values())):
                if content is not None and not isinstance(content, dict):
                    yield from content if isinstance(content, tuple) else (content,)


def _plain(schema: Any) -> Any:
    """The schema without what is legal and hardly understood: tuples by `prefixItems`, default nulls, bare arrays."""
    if isinstance(schema, list):
        return [_plain(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: _plain(value) for key, value in schema.items() if not (key == "default" and value is None)}
    if "prefixItems" in plain:
        members = plain.pop("prefixItems")
        plain["items"] = {"anyOf": [one for index, one in enumerate(members) if one not in members[:index]]}
    elif plain.get("type") == "array":
        plain.setdefault("items", {})
    return plain


def _described(schema: Schema, kind: type | None) -> Schema:
    if "description" in schema:
        schema["description"] = " ".join(schema["description"].split())
    for name, text in _field_docs(kind).items() if kind is not None else ():
        if name in schema.get("properties", {}):
            schema["properties"][name]["description"] = text
    return schema


def _field_docs(kind: type) -> dict[str, str]:
    """The texts under the fields of a class, those of its bases included."""
    docs: dict[str, str] = {}
    for owner in reversed(kind.__mro__[:-1]):
        if owner.__module__.partition(".")[0] != __name__.partition(".")[0]:
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        statements = body.body if isinstance(body, ast.ClassDef) else []
        for field, text in pairwise(statements):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                value = text.value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    docs[field.target.id] = " ".join(value.value.split())
    return docs


def _structs(found: Any) -> Iterator[type]:
    """The classes that msgspec found in types, however deep."""
    waiting, seen = list(found), set()
    while waiting:
        one = waiting.pop()
        if isinstance(one, msgspec.inspect.StructType | msgspec.inspect.DataclassType):
            if one.cls in seen:
                continue
            seen.add(one.cls)
            yield one.cls
            waiting += [field.type for field in one.fields]
        else:
            parts = (getattr(one, name, ()) for name in ("types", "item_type", "item_types", "value_type"))
            for part in parts:
                waiting += part if isinstance(part, tuple | list) else [part]
