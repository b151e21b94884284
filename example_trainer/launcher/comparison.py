"""Runs side by side: their figures, and the settings in which they differ, for the terminal and for the report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from example_trainer.launcher.summary import Summary, summary_lines

PLACES = frozenset(
    {"run_dir", "vllm_port", "port", "atropos_url", "rollout_server_url", "base_url", "inference_urls", "metrics_port"}
    | {"broker_url", "wandb_run_id", "name", "log_dir", "save_path", "store"}
)
"""Settings in which any two runs differ: addresses and folders."""
PROVENANCE = ("versions", "git", "host")
MISSING = "–"


def as_rows(summaries: Sequence[Summary]) -> list[list[str]]:
    """Return the figures of the summaries: a row for each that at least one run has, its label first."""
    columns = [dict(summary_lines(summary)) for summary in summaries]
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = [[label, *(column.get(label) or MISSING for column in columns)] for label in labels]
    return [row for row in rows if set(row[1:]) != {MISSING}]


def settings_of(config: Mapping[str, Any], root: Path) -> dict[str, str]:
    """Return a run's settings and provenance as text by dotted name; its own directory is written as RUN."""
    programs = config.get("programs") or {}
    found: dict[str, Any] = {"trainer": config.get("trainer") or {}}
    for name, program in programs.items():
        if name != "trainer" and isinstance(program, Mapping):
            sections = program.get("settings") or {}
            # The name of a program's only section is left out: the program's name says the same.
            found[name] = next(iter(sections.values())) if len(sections) == 1 else sections
    found |= {name: config[name] for name in PROVENANCE if config.get(name)}
    roots = (str(config.get("trainer", {}).get("run_dir") or root), str(root))
    return {name: _as_text(value, roots) for name, value in _flat(found, "")}


def differing_settings(settings: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Return a row for each setting in which the runs differ: its name, and its value in each run."""
    names = dict.fromkeys(name for one in settings for name in one if name.rpartition(".")[2] not in PLACES)
    rows = [[name, *(one.get(name, MISSING) for one in settings)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def as_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Build a table for the terminal with a column for each run."""
    table = Table(title=title, title_justify="left")
    table.add_column()
    for head in heads:
        table.add_column(Text(head), justify="right", overflow="fold")
    for row in rows:
        # As text: a value may hold what rich would read as markup.
        table.add_row(*map(Text, row))
    return table


def label_runs(roots: Sequence[Path]) -> list[str]:
    """Return a name for each run: that of its directory, with as many parents as tell the runs apart."""
    paths = [root.resolve().parts for root in roots]
    for count in range(1, max(map(len, paths)) + 1):
        labels = ["/".join(parts[-count:]) for parts in paths]
        if len(set(labels)) == len(labels):
            return labels
    return [str(root) for root in roots]


def _flat(content: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            found += _flat(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value))
    return found


def _as_text(value: Any, roots: Sequence[str]) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    for root in roots:
        text = text.replace(root, "RUN")
    return text
