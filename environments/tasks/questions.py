"""Questions with answers from a JSON Lines file, in either of two common forms: `question`/`answer` or
`prompt`/`response`. One object a line; other keys are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atropos_api.common.errors import AtroposError

FORMS = (("question", "answer"), ("prompt", "response"))


class DataUnusable(AtroposError):
    """A data file that cannot be read, or a line of it that holds no question and answer."""


@dataclass(frozen=True, slots=True)
class Question:
    question: str
    answer: str


def read_questions(path: Path) -> list[Question]:
    """Every question of the file, in its order."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataUnusable(f"{path}: cannot be read ({error}); name a JSON Lines file") from error
    found = [_read_line(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise DataUnusable(f"{path}: it holds no line; one JSON object with question and answer a line is needed")
    return found


def _read_line(line: str, where: str) -> Question:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataUnusable(f"{where}: no JSON object ({error})") from None
    found = _pair(record) if isinstance(record, Mapping) else None
    if found is None:
        raise DataUnusable(f"{where}: it has neither question and answer nor prompt and response: {line[:120]}")
    return found


def _pair(record: Mapping[str, Any]) -> Question | None:
    for question, answer in FORMS:
        if question in record and answer in record:
            return Question(str(record[question]), str(record[answer]))
    return None
