"""`atroposlib.frontend.jsonl2html`: a page to read a file of groups in, with every text of a model escaped."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from environments.export.page import render_group, write_page

__all__ = ["create_html_for_group", "generate_html"]

logger = logging.getLogger(__name__)


def create_html_for_group(group_data: Mapping[str, Any], index: int) -> str:
    """One group as HTML, its messages as far as there are scores; nothing for a group without either."""
    messages, scores = group_data.get("messages") or [], group_data.get("scores") or []
    count = min(len(messages), len(scores))
    if count < max(len(messages), len(scores)):
        logger.warning(
            "group %d has %d messages and %d scores; the others are left out", index, len(messages), len(scores)
        )
    return render_group(index, {"messages": messages[:count], "scores": scores[:count]}) if count else ""


def generate_html(input_path: str, output_path: str | None = None) -> None:
    """Write the page beside the file, or to `output_path`."""
    write_page(Path(input_path), None if output_path is None else Path(output_path))
