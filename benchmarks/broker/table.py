"""The rows of the result and how they are printed: ratios first, since only they carry over to another machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One measure; `ratio` is the reference's figure over ours (above 1 is better), None without a reference."""

    measure: str
    ours: str
    reference: str = ""
    ratio: float | None = None
    must: str = ""
    aim: str = ""
    met: bool | None = None


def compared(
    measure: str,
    ours: float,
    reference: float,
    unit: str,
    *,
    ratio: float | None = None,
    must: float = 0,
    aim: float = 0,
) -> Row:
    """Return a row of two figures in the same unit; `ratio` is given if it is not just their quotient."""
    achieved = reference / ours if ratio is None else ratio
    return Row(
        measure,
        f"{ours:.4g} {unit}",
        f"{reference:.4g} {unit}",
        achieved,
        f"{must:g}x" if must else "",
        f"{aim:g}x" if aim else "",
        achieved >= must if must else None,
    )


def format_table(rows: list[Row]) -> str:
    lines = [("measure", "ours", "reference", "ratio", "must", "aim", "")]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.4g}x"
        verdict = {True: "met", False: "MISSED", None: ""}[row.met]
        lines.append((row.measure, row.ours, row.reference, ratio, row.must, row.aim, verdict))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
