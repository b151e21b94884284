"""Questions from files: both common forms are read, and what cannot be used is named with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from environments.arithmetic_server import read_word_problems
from environments.tasks.questions import DataUnusable, Question, read_questions


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_both_forms_of_a_record_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", {"question": "1+1", "answer": 2, "level": 5}, {"prompt": "2+2", "response": "4"})
    assert read_questions(path) == [Question("1+1", "2"), Question("2+2", "4")]


@pytest.mark.parametrize(("line", "words"), [('{"question": "x"}', ":2: it has neither"), ("{", ":2: no JSON object")])
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"question": "1", "answer": "1"}\n' + line + "\n")
    with pytest.raises(DataUnusable, match=words):
        read_questions(path)


def test_a_missing_or_empty_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataUnusable, match="cannot be read"):
        read_questions(tmp_path / "none.jsonl")
    with pytest.raises(DataUnusable, match="holds no line"):
        read_questions(write(tmp_path / "empty.jsonl"))


def test_an_answer_is_a_number_alone_or_after_the_mark(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", {"question": "a", "answer": "1+1=2\n#### 2"}, {"question": "b", "answer": -3})
    assert [problem.answer for problem in read_word_problems(path)] == [2, -3]
    with pytest.raises(DataUnusable, match="'many' holds no whole number"):
        read_word_problems(write(path, {"question": "a", "answer": "many"}))
