"""`atroposlib.frontend.jsonl2html`: a page to read a file of groups in, with every text of a model escaped."""

from __future__ import annotations

from pathlib import Path

from environments.export.page import write_page

__all__ = ["generate_html"]


def generate_html(input_path: str, output_path: str | None = None) -> None:
    """Write the page beside the file, or to `output_path`."""
    page = write_page(Path(input_path))
    if output_path is not None:
        page.replace(output_path)
