"""`atropos env convert-data`: any usual form becomes question/answer, and the original file can be restored."""

from __future__ import annotations

import json

import pytest

from atropos_api.common.cliconfig import ConfigError
from environments.commands import convert_data, restore_data
from environments.tasks.data import Question, load_questions
from environments.tasks.records import DataUnusable
from example_trainer.commands.main import run


@pytest.fixture
def math_file(tmp_path):
    path = tmp_path / "train.jsonl"
    records = [
        {"problem": "1+1?", "level": 1, "solution": "It is $\\boxed{\\frac{4}{2}}$."},
        {"problem": "ü?", "level": 2, "solution": "no box"},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_file_is_rewritten_and_its_original_kept(math_file, capsys):
    before = math_file.read_bytes()
    assert run(["env", "convert-data", str(math_file)]) == 0
    assert "2 records converted; the original is" in capsys.readouterr().out
    first, second = map(json.loads, math_file.read_text().splitlines())
    assert list(first) == ["question", "answer", "level", "solution"]
    assert (first["question"], first["answer"], first["level"]) == ("1+1?", "\\frac{4}{2}", 1)
    assert second["answer"] == "no box"
    assert (math_file.parent / "train.jsonl.backup").read_bytes() == before


@pytest.mark.parametrize("way", ["verb", "move"])
def test_the_original_can_be_had_back(math_file, way):
    before = math_file.read_bytes()
    backup = convert_data(math_file).backup
    if way == "verb":
        assert run(["env", "convert-data", "--restore", str(math_file)]) == 0
    else:
        backup.rename(math_file)
    assert math_file.read_bytes() == before
    assert [path.name for path in math_file.parent.iterdir()] == ["train.jsonl"]


def test_what_was_changed_since_the_conversion_is_not_lost_by_restoring(math_file):
    convert_data(math_file)
    with math_file.open("a") as file:
        file.write('{"question": "new", "answer": "1"}\n')
    changed = math_file.read_bytes()
    with pytest.raises(DataUnusable, match="has been changed since it was converted"):
        restore_data(math_file)
    assert math_file.read_bytes() == changed


def test_where_files_cannot_have_two_names_the_original_is_copied(math_file, monkeypatch):
    def no_links(*_):
        raise OSError("not here")

    monkeypatch.setattr("os.link", no_links)
    before = math_file.read_bytes()
    convert_data(math_file)
    restore_data(math_file)
    assert math_file.read_bytes() == before


def test_a_second_conversion_changes_nothing_and_keeps_the_first_backup(math_file):
    backup = convert_data(math_file).backup
    original, converted = backup.read_bytes(), math_file.read_bytes()
    assert convert_data(math_file).backup is None
    assert (backup.read_bytes(), math_file.read_bytes()) == (original, converted)


def test_a_backup_is_never_overwritten(math_file):
    convert_data(math_file)
    math_file.write_text(json.dumps({"prompt": "new", "response": "data"}) + "\n")
    with pytest.raises(DataUnusable, match="exists already"):
        convert_data(math_file)
    assert json.loads(math_file.read_text())["prompt"] == "new"


def test_prompts_and_responses_of_a_json_list_are_converted(tmp_path):
    path = tmp_path / "d.json"
    path.write_text(json.dumps([{"prompt": "a", "response": "b"}, {"question": "c", "answer": 1}]))
    convert_data(path)
    assert json.loads(path.read_text()) == [{"question": "a", "answer": "b"}, {"question": "c", "answer": 1}]
    assert load_questions(path, "train") == [Question("a", "b"), Question("c", "1")]


def test_a_file_that_cannot_be_converted_stays_as_it_is(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n{"text": "c"}\n')
    with pytest.raises(DataUnusable, match=r"d\.jsonl:2: it has no question and answer, only text"):
        convert_data(path)
    assert [found.name for found in tmp_path.iterdir()] == ["d.jsonl"]
    with pytest.raises(DataUnusable, match="no conversion of"):
        restore_data(path)
    with pytest.raises(DataUnusable, match=r"only \.jsonl and \.json"):
        convert_data(tmp_path / "d.parquet")


@pytest.mark.parametrize(
    ("words", "message"), [(["convert-dat"], "did you mean"), (["convert-data"], "takes one file"), (["x"], "verbs of")]
)
def test_a_mistaken_command_is_reported(words, message):
    with pytest.raises(ConfigError, match=message):
        run(["env", *words])


def test_help_names_the_verbs(capsys):
    assert run(["env", "--help"]) == 0
    assert "convert-data FILE" in capsys.readouterr().out
