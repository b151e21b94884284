"""`atroposlib.utils.tool_call_parser`: one tool call out of a text with tags, its arguments left as they were written.

Where a model wrote Python's quotes instead of JSON's, the call is read as a Python literal; apostrophes survive.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["extract_tool_call", "parse_tool_call"]

ERROR = "-ERROR-"


def extract_tool_call(text: str, preferred_tags: Sequence[str] | None = None) -> str | None:
    """What stands between the first of the tags that is found, `tool_call` by default."""
    for tag in preferred_tags or ["tool_call"]:
        found = re.search(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL)
        if found:
            return found[1].strip()
    return None


def parse_tool_call(
    response: str,
    available_tools: Sequence[Mapping[str, Any]] | None = None,
    preferred_tags: Sequence[str] | None = None,
) -> tuple[str, dict[str, Any], bool]:
    """The tool's name, its arguments, and whether the text holds no call that can be used."""
    body = extract_tool_call(response, preferred_tags)
    call = _read(body) if body else None
    if call is None:
        return ERROR, {}, True
    name, arguments = str(call.get("name", "")), call.get("arguments", {})
    if available_tools and name not in {_tool_name(tool) for tool in available_tools}:
        return ERROR, arguments, True
    return name, arguments, False


def _read(body: str) -> dict[str, Any] | None:
    try:
        found = json.loads(body, strict=False)
    except json.JSONDecodeError:
        try:
            found = ast.literal_eval(body)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
    return found if isinstance(found, dict) else None


def _tool_name(tool: Mapping[str, Any]) -> str:
    return str(tool.get("name") or (tool.get("function") or {}).get("name", ""))
