"""The verb `atropos report`: the summary of a run directory, its picture, and its pages of rollouts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from atropos_api.common.cliconfig import ConfigError
from example_trainer.launcher.summary import as_table, draw, read_timeline, summarise, write_rollout_pages

PRICE_FLAG = "--cost-per-hour"


def run(arguments: Sequence[str]) -> int:
    """Print the summary of a run directory and redraw its picture and pages."""
    rest, cost_per_hour = take_price(arguments)
    if len(rest) != 1:
        raise ConfigError(f"atropos report takes one argument, RUN; got {len(rest)}")
    run_dir = Path(rest[0])
    summary = summarise(run_dir, timeline=read_timeline(run_dir), cost_per_hour=cost_per_hour)
    Console().print(as_table(summary))
    sys.stdout.writelines(f"{line}\n" for line in (f"picture: {draw(run_dir)}", *write_rollout_pages(run_dir)))
    return 0


def take_price(arguments: Sequence[str]) -> tuple[list[str], float | None]:
    """Return the arguments without `--cost-per-hour PRICE` (or `=PRICE`), and the price if there is one."""
    rest = list(arguments)
    at = next((index for index, word in enumerate(rest) if word.partition("=")[0] == PRICE_FLAG), None)
    if at is None:
        return rest, None
    _, joined, value = rest[at].partition("=")
    end = at + 1 if joined else at + 2
    given = [value] if joined else rest[at + 1 : end]
    try:
        (price,) = map(float, given)
    except ValueError:
        raise ConfigError(f"{PRICE_FLAG} {' '.join(given)} is not a price; give a number, {PRICE_FLAG} 2.5") from None
    return rest[:at] + rest[end:], price
