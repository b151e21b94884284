"""Rewriting a data file into the `question`/`answer` form, with the file as it was kept beside it.

    convert_data(Path("train.jsonl"))   # train.jsonl is rewritten, train.jsonl.backup is what it was
    restore_data(Path("train.jsonl"))   # and back

`mv train.jsonl.backup train.jsonl` restores as well. Other columns are kept; a worked solution without an answer of its
own gives the answer in its last box.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atropos_api.common.whole_files import write_whole
from environments.rewards.answers import last_boxed
from environments.tasks.data import DataUnusable, form_of, read_cell, read_records

BACKUP_SUFFIX = ".backup"


@dataclass(frozen=True, slots=True)
class Conversion:
    """What was done to a file; `backup` is None where it had the form already and was left alone."""

    path: Path
    records: int
    backup: Path | None


def backup_of(path: Path) -> Path:
    return path.with_name(path.name + BACKUP_SUFFIX)


def convert_data(path: Path) -> Conversion:
    """Rewrite `path` as JSON Lines of question and answer; whatever happens meanwhile, one whole file is there."""
    if path.suffix not in {".jsonl", ".json"}:
        raise DataUnusable(f"{path}: only .jsonl and .json files are converted; a .parquet file is read as it is")
    records = [(number, _converted(record, f"{path}:{number}")) for number, record in read_records(path)]
    if all(not changed for _, (_, changed) in records):
        return Conversion(path, len(records), None)
    backup = backup_of(path)
    if backup.exists():
        raise DataUnusable(f"{backup} is in the way: the original of an earlier conversion; restore it or move it away")
    _keep(path, backup)
    write_whole(path, _as_text([record for _, (record, _) in records], path))
    return Conversion(path, len(records), backup)


def restore_data(path: Path) -> Path:
    """Put the file back as it was before it was converted."""
    backup = backup_of(path)
    if not backup.is_file():
        raise DataUnusable(f"{backup}: there is no such file, so {path.name} has not been converted here")
    if path.exists() and path.read_bytes() != _conversion_of(backup, path):
        raise DataUnusable(f"{path} has been changed since it was converted; move it away, then restore")
    return backup.replace(path)


def _keep(path: Path, backup: Path) -> None:
    """Give the file as it is a second name, or a copy where the file system has no links; never over another file."""
    try:
        os.link(path, backup)
    except FileExistsError:
        raise DataUnusable(f"{backup} has appeared meanwhile; restore it or move it away") from None
    except OSError:
        write_whole(backup, path.read_bytes())


def _conversion_of(backup: Path, path: Path) -> bytes:
    """What converting `backup` made of `path`, whose name says how the file is read."""
    records = [_converted(record, f"{path}:{number}")[0] for number, record in read_records(backup, path.suffix)]
    return _as_text(records, path).encode()


def _converted(record: Any, where: str) -> tuple[dict[str, Any], bool]:
    """The record in question/answer form, these first, and whether it had another."""
    form = form_of(record) if isinstance(record, Mapping) else None
    if form is None:
        shown = ", ".join(map(str, record)) if isinstance(record, Mapping) else repr(record)[:80]
        raise DataUnusable(f"{where}: it holds no question and answer; it has {shown}")
    if form == ("question", "answer"):
        return dict(record), False
    question, answer = (read_cell(record[column]) for column in form)
    if form[1] == "solution":
        answer = last_boxed(answer) or answer
    rest = {key: value for key, value in record.items() if key not in form or key == "solution"}
    return {"question": question, "answer": answer, **rest}, True


def _as_text(records: list[dict[str, Any]], path: Path) -> str:
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    if path.suffix == ".jsonl":
        return "\n".join(lines) + "\n"
    return "[\n" + ",\n".join(lines) + "\n]\n"
