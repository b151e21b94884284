"""The verb `atropos report`: the summary of a run directory with its picture and pages, or several runs compared."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from atropos_api.common.cliconfig import ConfigError, nearest
from atropos_api.common.html_pages import is_page
from example_trainer.launcher.comparison import as_rows, as_table, differing_settings, label_runs, settings_of
from example_trainer.launcher.run_report import REPORT_NAME, RunRecord, read_run, write_report
from example_trainer.launcher.summary import as_table as summary_table
from example_trainer.launcher.summary import draw, write_rollout_pages

PRICE_FLAG, HTML_FLAG = "--cost-per-hour", "--html"
COMPARISON_NAME = "comparison.html"


def run(arguments: Sequence[str]) -> int:
    """Print the summary of a run directory and write its pages again; with several directories, compare them."""
    rest, cost_per_hour = take_price(arguments)
    rest, page = take_page(rest)
    flags = [word for word in rest if word.startswith("-")]
    if flags:
        raise ConfigError(f"unknown option {flags[0]}{nearest(flags[0], (PRICE_FLAG, HTML_FLAG))}")
    if not rest:
        raise ConfigError("atropos report takes directories of runs; got none")
    try:
        report(list(map(Path, rest)), page, cost_per_hour)
    except OSError as error:
        if error.filename is None:  # an error of the output, not of a file
            raise
        raise ConfigError(
            f"{Path(error.filename).parent}: cannot be used ({error.strerror}); {HTML_FLAG} names the report's file; "
            "picture and pages are written into the run's directory, so take a copy of one that you may only read"
        ) from error
    return 0


def report(roots: Sequence[Path], page: Path | None, cost_per_hour: float | None) -> None:
    """Show one run, or compare several."""
    if len(roots) == 1:
        show(read_run(roots[0], cost_per_hour=cost_per_hour), page)
    else:
        labels = label_runs(roots)
        found = [
            read_run(root, label=label, cost_per_hour=cost_per_hour) for root, label in zip(roots, labels, strict=True)
        ]
        compare(found, page)


def show(record: RunRecord, page: Path | None) -> None:
    """Print the summary of one run, redraw its picture, and write its report and pages of rollouts."""
    Console().print(summary_table(record.summary))
    pages = write_rollout_pages(record.root)
    report = write_report([record], page or record.root / REPORT_NAME)
    sys.stdout.writelines(f"{line}\n" for line in (f"picture: {draw(record.root)}", *pages, f"report: {report}"))


def compare(records: Sequence[RunRecord], page: Path | None) -> None:
    """Print the figures of several runs and the settings in which they differ, and draw their curves on one page."""
    heads = [record.label for record in records]
    console = Console()
    console.print(as_table("Runs compared", heads, as_rows([record.summary for record in records])))
    differing = differing_settings([settings_of(record.config, record.root) for record in records])
    if differing:
        console.print(as_table("Settings that differ", heads, differing))
    for record in records:
        if not record.config:
            sys.stdout.write(f"{record.root} has no config.json, so its settings are not known\n")
    sys.stdout.write(f"report: {write_report(records, page or records[0].root / COMPARISON_NAME)}\n")


def take_price(arguments: Sequence[str]) -> tuple[list[str], float | None]:
    """Return the arguments without `--cost-per-hour PRICE` (or `=PRICE`), and the price if there is one."""
    rest, value = _take(arguments, PRICE_FLAG)
    if value is None:
        return rest, None
    try:
        price = float(value)
    except ValueError:
        price = math.nan
    if 0.0 <= price < math.inf:
        return rest, price
    raise ConfigError(f"{PRICE_FLAG} {value} is not a price; give a number, {PRICE_FLAG} 2.5")


def take_page(arguments: Sequence[str]) -> tuple[list[str], Path | None]:
    """Return the arguments without `--html FILE`, and the file if one is named."""
    rest, value = _take(arguments, HTML_FLAG)
    if value == "" or (value is not None and Path(value).is_dir()):
        raise ConfigError(f"{HTML_FLAG} {value} is not a file to write; name one, {HTML_FLAG} report.html")
    page = None if value is None else Path(value)
    if page is not None and page.is_file() and not is_page(page):
        raise ConfigError(f"{HTML_FLAG} {value} exists and is no report; name another file")
    return rest, page


def _take(arguments: Sequence[str], flag: str) -> tuple[list[str], str | None]:
    """Return the arguments without a flag and its value, and the value: None without the flag, empty if it has none."""
    rest = list(arguments)
    at = next((index for index, word in enumerate(rest) if word.partition("=")[0] == flag), None)
    if at is None:
        return rest, None
    _, joined, value = rest[at].partition("=")
    end = at + 1 if joined else at + 2
    given = value if joined else next(iter(rest[at + 1 : end]), "")
    return rest[:at] + rest[end:], given
