"""Options as a Markdown table, for the reference pages that are printed from the declarations themselves."""

from __future__ import annotations

from collections.abc import Iterable

from atropos_api.common.options import Option


def option_table(options: Iterable[Option]) -> str:
    """A table of flags, defaults and meanings."""
    rows = "".join(map(_row, options))
    return f"| option | default | meaning |\n|---|---|---|\n{rows}"


def cell(text: str) -> str:
    """Text that stays in its cell."""
    return " ".join(text.split()).replace("|", "\\|")


def _row(option: Option) -> str:
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
    return f"| {flags} | {shown} | {cell(text.removesuffix('(required)').strip())}{choices} |\n"
