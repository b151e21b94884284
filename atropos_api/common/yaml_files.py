"""YAML files that people write: a mistake in one is an error, where YAML would silently take another value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


class _UniqueKeyLoader(yaml.SafeLoader):
    """A loader that refuses a key which a mapping has twice: YAML's own would silently drop the first one's value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag.endswith(":merge"):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(problem=f"{key.value!r} twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:  # 2024-13-45 has the form of a date, 0b_ that of a number
            problem = f"{node.value!r:.80} is no value ({error}); put a text in quotes"
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark) from error


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file; raises `yaml.YAMLError` also for a key that stands twice in a mapping, and for
    what has the form of a date or a number and is none.
    """
    text = path.read_text(encoding="utf-8")
    try:
        return yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506 - it is a SafeLoader
    except RecursionError as error:
        raise yaml.YAMLError("lists or mappings are nested too deeply; write it flatter") from error
