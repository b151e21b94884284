"""The counts of a run's data reach its directory, its summary and `atropos report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from example_trainer.launcher.data_use import data_lines, read_data_use, trained_length, write_data_use
from example_trainer.launcher.summary import as_table, summarise

ITEMS = {
    "drawn": 2000,
    "in_progress": 3,
    "finished": 1990,
    "dropped": {"timed-out": 7},
    "sampled_sequences": 1000,
    "sampled_tokens": 24_500,
}
STATUS = {
    "environments": [
        {
            "name": "gsm8k",
            "items": ITEMS,
            "outcomes": {"trained": 1980, "too-old": 10},
            "dropped_groups": {},
            "queued_sequences": 0,
            "weight": 1.0,
        },
        {"name": "arithmetic", "items": None, "outcomes": {}, "dropped_groups": {}, "queued_sequences": 8},
    ]
}


def write_rows(run_dir: Path, *rows: dict[str, Any]) -> None:
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


IN_ANY_BATCH = {"data/sequences": 40, "response/length_mean": 31.0}
"""The trainer leaves out answers that are too long or have no signal: they are in the batch and not trained."""


def test_counts_of_items_and_the_lengths_of_sampled_and_trained_answers_are_in_the_summary(tmp_path: Path) -> None:
    write_data_use(tmp_path, STATUS)
    write_rows(
        tmp_path,
        {"step": 1, **IN_ANY_BATCH, "data/trained_tokens": 200, "response/trained_length_mean": 20.0},
        {"step": 2, **IN_ANY_BATCH, "data/trained_tokens": 720, "response/trained_length_mean": 24.0},
        {"step": 3, **IN_ANY_BATCH, "data/trained_tokens": 0},
    )
    console = Console(width=200, record=True)
    console.print(as_table(summarise(tmp_path)))
    text = console.export_text()
    assert "items of gsm8k" in text
    assert (
        "2,000 drawn, 1,980 groups trained, 7 dropped (timed-out), 10 dropped (too-old), 3 in progress"
        in text.replace("  ", " ")
    )
    assert "24.5, 23.0" in text
    assert "arithmetic" not in text


def test_the_summary_shows_a_name_that_looks_like_markup(tmp_path: Path) -> None:
    environment = {**STATUS["environments"][0], "name": "gsm8k[train]", "outcomes": {"[/b]": 2}}
    write_data_use(tmp_path, {"environments": [environment]})
    write_rows(tmp_path, {"step": 1})
    console = Console(width=200, record=True)
    console.print(as_table(summarise(tmp_path)))
    text = console.export_text()
    assert "items of gsm8k[train]" in text
    assert "2 dropped ([/b])" in text


def test_a_run_without_counts_or_with_a_broken_file_of_them_is_summed_up_too(tmp_path: Path) -> None:
    write_data_use(tmp_path, {})
    assert not (tmp_path / "data.json").exists()
    assert read_data_use(tmp_path) == ()
    (tmp_path / "data.json").write_text("{broken")
    assert read_data_use(tmp_path) == ()
    assert data_lines((), None) == []
    assert trained_length([{"step": 1}]) is None
