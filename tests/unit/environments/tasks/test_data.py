"""Questions from files, folders and the hub: usual forms are read, unusable ones named, orders are fixed."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from environments.arithmetic_server import as_word_problems
from environments.math_server_zero import EVAL_SETS
from environments.tasks.chat_dataset import ChatDataset, load_rows
from environments.tasks.data import DataFields, Question, ShuffledEpochs, load_questions
from environments.tasks.records import DataUnusable


def write(path: Path, *records: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    "record",
    [
        {"question": "1+1", "answer": 2, "level": 5},
        {"prompt": "1+1", "answer": "2"},
        {"prompt": "1+1", "response": "2"},
        {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1"}], "response": "2"},
        {"problem": "1+1", "solution": "is 2", "answer": "2"},
        {"question": "1+1", "solution": "is 2", "final_answer": ["2"]},
    ],
)
def test_every_usual_form_of_a_record_is_read(tmp_path: Path, record: object) -> None:
    assert load_questions(write(tmp_path / "d.jsonl", record), "train") == [Question("1+1", "2")]


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a_text_that_was_cut_in_an_emoji_can_be_tokenized_and_sent(tmp_path: Path, suffix: str) -> None:
    """JSON can express half a surrogate pair; one such row made each evaluation fail."""
    data = write(tmp_path / f"d{suffix}", {"question": "What is \ud83d", "answer": "\ud83d\ude00 2"})
    assert load_questions(data, "train") == [Question("What is ?", "\U0001f600 2")]
    (sample,) = load_rows(data, "train")
    assert sample.question == "What is ?"


def test_json_lists_and_parquet_hold_the_same_questions_as_lines(tmp_path: Path) -> None:
    records = [{"question": f"q{n}", "answer": str(n), "notes": "x" * 50} for n in range(5)]
    (tmp_path / "d.json").write_text(json.dumps(records))
    (tmp_path / "under_a_key.json").write_text(json.dumps({"version": 1, "data": records}))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "d.parquet")
    expected = load_questions(write(tmp_path / "d.jsonl", *records), "train")
    assert len(expected) == 5
    for name in ("d.json", "under_a_key.json", "d.parquet"):
        assert load_questions(tmp_path / name, "train") == expected


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            '{"question": "x", "reply": "y"}',
            ":2: it has neither question and answer .* its columns are question, reply",
        ),
        ("[1]", r":2: it has neither .* it is \[1\]"),
        ("{", ":2: not a JSON object"),
    ],
)
def test_a_line_that_cannot_be_used_is_named_with_what_it_has(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"question": "1", "answer": "1"}\n' + line + "\n")
    with pytest.raises(DataUnusable, match=words):
        load_questions(path, "train")


def test_data_that_is_not_there_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataUnusable, match="cannot be read"):
        load_questions(tmp_path / "none.jsonl", "train")
    with pytest.raises(DataUnusable, match="cannot be read"):
        load_questions("missing/folder/of/files", "train")
    with pytest.raises(DataUnusable, match="it has no question"):
        load_questions(write(tmp_path / "empty.jsonl"), "train")
    with pytest.raises(DataUnusable, match="not a Parquet file"):
        load_questions(write(tmp_path / "d.parquet", "text"), "train")
    with pytest.raises(DataUnusable, match=r"supported are \.jsonl"):
        load_questions(write(tmp_path / "d.csv", "text"), "train")


def test_an_empty_text_is_refused_where_it_would_mean_the_present_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--env.data_path "$DATA"`, with a variable that is not set, trained on whatever files lay there."""
    write(tmp_path / "other.jsonl", {"question": "a", "answer": "1"})
    monkeypatch.chdir(tmp_path)
    for name in ("data_path", "val_data_path"):
        with pytest.raises(ValidationError, match="an empty text is not a path"):
            DataFields.model_validate({name: ""})
    for read in (load_questions, load_rows):
        with pytest.raises(DataUnusable, match="an empty text names no data"):
            read("", "train")
    with pytest.raises(DataUnusable, match="an empty text names no data"):
        ChatDataset("", None)


def test_records_without_an_answer_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "d.jsonl", {"question": "a", "answer": None}, {"question": "b", "answer": 0})
    assert load_questions(path, "train") == [Question("b", "0")]
    assert "1 records without" in caplog.text


@pytest.mark.parametrize("load", [load_questions, load_rows])
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize(("column", "part"), [("choices", ["1", "2"]), ("context", "He wrote 1 and 2.")])
def test_a_part_of_the_questions_that_no_prompt_shows_is_warned_about(
    tmp_path: Path, caplog, load, form: str, column: str, part: object
) -> None:
    """MMLU's rows: the model was asked for the number of an option without the options. SQuAD's: without the text."""
    rows = [{"question": "Which is even?", column: given, "answer": 1} for given in (None, part)]
    path = tmp_path / f"d.{form}"
    if form == "jsonl":
        write(path, *rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    assert [question.question for question in load(path, "train")] == ["Which is even?"] * 2
    assert caplog.text.count(f"is not shown the column {column}") == 1


@pytest.mark.parametrize("load", [load_questions, load_rows])
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize(("column", "empty"), [("input", ""), ("input", float("nan"))])
def test_a_part_that_is_empty_in_all_rows_is_not_warned_about(
    tmp_path: Path, caplog, load, form: str, column: str, empty: object
) -> None:
    """Data in Alpaca's form have a column `input` whether a question has one or not."""
    rows = [{"question": "What is 1 + 1?", "answer": "2", column: empty}]
    path = tmp_path / f"d.{form}"
    if form == "jsonl":
        write(path, *rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    assert len(load(path, "train")) == 1
    assert "is not shown" not in caplog.text


@pytest.mark.parametrize("folder", [".", "~"])
def test_a_folders_files_belong_to_the_split_their_names_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "train-00000-of-00002.jsonl", {"question": "a", "answer": "1"})
    write(tmp_path / "train-00001-of-00002.jsonl", {"question": "b", "answer": "1"})
    write(tmp_path / "validation/part.jsonl", {"question": "c", "answer": "1"})
    (tmp_path / "README.md").write_text("about")
    fields = DataFields(data_path=Path(folder))
    assert [item.question for item in fields.training_questions()] == ["a", "b"]
    assert [item.question for item in fields.evaluation_questions()] == ["c"]


def test_hidden_files_beside_the_data_are_no_data(tmp_path: Path) -> None:
    """A killed conversion leaves the first, a notebook the second, macOS the third, which is not even text."""
    row = '{"question": "1+1?", "answer": "2"}\n'
    for name in ("problems.jsonl", ".problems.4711.jsonl", ".ipynb_checkpoints/problems-checkpoint.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(row)
    (tmp_path / "._problems.jsonl").write_bytes(b"\x00\x05\x16\x07\xff")
    assert load_questions(tmp_path, "train") == [Question("1+1?", "2")]


def test_a_folder_without_the_split_is_reported_with_what_it_has(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", {"question": "a", "answer": "1"})
    with pytest.raises(DataUnusable, match=r"no file is named after the test split .*found train\.jsonl"):
        load_questions(tmp_path, "test")
    (tmp_path / "train.jsonl").rename(tmp_path / "problems.jsonl")
    assert len(load_questions(tmp_path, "test")) == 1


def test_a_data_set_is_loaded_by_name_with_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*arguments: object) -> datasets.DatasetDict:
        asked.append(arguments)
        rows = {"question": ["q"], "answer": ["a\n#### 3"], "notes": ["n"]}
        return datasets.DatasetDict(train=datasets.Dataset.from_dict(rows), test=datasets.Dataset.from_dict(rows))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    fields = DataFields(dataset_name="openai/gsm8k:main")
    assert fields.training_questions() == fields.evaluation_questions() == [Question("q", "a\n#### 3")]
    assert {*asked} == {("openai/gsm8k", "main")}


EVALUATION_SETS = {
    "HuggingFaceH4/aime_2024": ("train", ["id", "problem", "solution", "answer", "url", "year"], "204"),
    "HuggingFaceH4/MATH-500": (
        "test",
        ["problem", "solution", "answer", "subject", "level", "unique_id"],
        r"\frac{1}{2}",
    ),
    "math-ai/amc23": ("test", ["id", "question", "answer", "url"], "27"),
    "math-ai/minervamath": ("test", ["question", "answer"], "4.5e33"),
    "math-ai/olympiadbench": ("test", ["id", "context", "question", "solution", "final_answer"], ["$69$,$84$"]),
}


@pytest.mark.parametrize("name", EVALUATION_SETS)
def test_the_evaluation_sets_are_read_in_the_columns_and_the_split_that_they_have(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Their cards on the hub name these: AIME has only a train split, OlympiadBench lists its answers."""
    assert name in EVAL_SETS.values()
    split, columns, answer = EVALUATION_SETS[name]
    row = {column: f"its {column}" for column in columns}
    row[next(column for column in columns if column in {"answer", "final_answer"})] = answer
    content = datasets.DatasetDict({split: datasets.Dataset.from_list([row])})
    monkeypatch.setattr(datasets, "load_dataset", lambda *asked: {(name, None): content}[asked])
    (read,) = load_questions(name, "test")
    assert read.question in {"its problem", "its question"}
    assert read.answer == (answer[0] if isinstance(answer, list) else answer)


def test_a_data_set_that_cannot_be_loaded_names_the_way_without_a_network() -> None:
    with pytest.raises(DataUnusable, match=r"'nobody/no-such-set' cannot be loaded .*--env\.data_path"):
        load_questions("nobody/no-such-set", "train")


def test_a_package_that_a_data_set_needs_is_named_and_not_the_one_that_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load_dataset(*_: object) -> None:
        raise ImportError("Please pip install zstandard")  # of the library itself, for files in that form

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataUnusable, match=r"cannot be loaded \(ImportError: Please pip install zstandard\)"):
        load_questions("org/compressed", "train")


def test_a_missing_source_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataUnusable, match=r"--env\.data_path or --env\.dataset_name"):
        DataFields().training_questions()
    with pytest.raises(DataUnusable, match=r"--env\.val_data_path"):
        DataFields().evaluation_questions()
    with pytest.raises(
        DataUnusable, match=r"one question, too few to hold one out.*steps_per_eval 0.*eval_at_start.*eval_at_end"
    ):
        DataFields(data_path=write(tmp_path / "d.jsonl", {"question": "a", "answer": "1"})).evaluation_questions()


@pytest.mark.parametrize("place", ["d.jsonl", "folder/problems.jsonl", "folder/train.jsonl"])
def test_of_data_without_test_data_a_share_is_held_out_and_said(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / place).parent.mkdir(exist_ok=True)
    rows = [{"prompt": str(number), "answer": str(number)} for number in range(60)]
    path = write(tmp_path / place, *rows)
    fields = DataFields(data_path=tmp_path / "folder" if "folder" in place else path, seed=1)
    held_out = fields.evaluation_questions()
    training = fields.training_questions(hold_out=True)
    assert (len(held_out), len(training)) == (3, 57)
    assert sorted(int(one.answer) for one in held_out + training) == list(range(60))
    assert "3 of the 60 questions" in caplog.text
    assert fields.model_copy(update={"seed": 2}).evaluation_questions() == held_out
    assert len(fields.training_questions()) == 60
    named = fields.model_copy(update={"val_data_path": path})
    assert len(named.evaluation_questions()) == len(named.training_questions(hold_out=True)) == 60
    half = fields.model_copy(update={"held_out_share": 0.5})
    assert len(half.evaluation_questions()) == len(half.training_questions(hold_out=True)) == 30


def test_each_epoch_has_every_item_once_in_an_order_of_its_own() -> None:
    draws = ShuffledEpochs(range(20), seed=1)
    epochs = [[draws[epoch * 20 + place] for place in range(20)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [ShuffledEpochs(range(20), seed=1)[45], draws[3]] == [epochs[2][5], epochs[0][3]]
    assert [ShuffledEpochs(range(20), seed=2)[place] for place in range(20)] != epochs[0]


def test_an_arithmetic_answer_is_a_number_alone_or_after_the_mark() -> None:
    questions = [Question("a", "1+1=2\n#### 2"), Question("b", "-3")]
    assert [problem.answer for problem in as_word_problems(questions)] == [2, -3]
    with pytest.raises(DataUnusable, match="'many' holds no whole number"):
        as_word_problems([Question("a", "many")])


def test_a_reference_with_thousands_as_gsm8k_writes_them_is_the_whole_number():
    read = as_word_problems([Question("a", "800 + 280 = 1,080\n#### 1,080"), Question("b", "1,080")])
    assert [problem.answer for problem in read] == [1080, 1080]
    with pytest.raises(DataUnusable, match="holds no whole number"):
        as_word_problems([Question("a", "half of 5\n#### 2.5")])


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_characters_that_end_a_line_elsewhere_and_a_byte_order_mark_do_not_cut_a_record(
    tmp_path: Path, suffix: str
) -> None:
    records = [{"question": f"a{mark}b", "answer": "1"} for mark in ("\u2028", "\x85", "\x1d", "\u2029")]
    lines = "\r\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    path = tmp_path / f"d.{suffix}"
    path.write_bytes(b"\xef\xbb\xbf" + lines.encode())
    assert [one.question for one in load_questions(path, "train")] == [record["question"] for record in records]


def hub(monkeypatch: pytest.MonkeyPatch, **splits: int) -> None:
    """Make any name that of a data set with these splits and this many questions in each."""
    content = datasets.DatasetDict(
        {
            name: datasets.Dataset.from_dict(
                {"question": [f"{name} {at}" for at in range(count)], "answer": ["1"] * count}
            )
            for name, count in splits.items()
        }
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: content)


def first_of(questions: list[Question]) -> str:
    return questions[0].question


def test_a_split_is_found_by_the_first_word_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, test_gen=1, test_sft=1, train_gen=1, train_sft=1)
    fields = DataFields(dataset_name="ultrachat")
    assert first_of(fields.training_questions(hold_out=True)) == "train_gen 0"
    assert first_of(fields.evaluation_questions()) == "test_gen 0"
    hub(monkeypatch, train_sft=1, train=1, validation=1)
    assert first_of(fields.training_questions()) == "train 0", "the usual name comes first"
    assert first_of(fields.evaluation_questions()) == "validation 0"


def test_a_split_may_be_named_behind_name_and_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, train_gen=1, train_sft=60, test_sft=1)
    fields = DataFields(dataset_name="ultrachat::train_sft")
    assert first_of(fields.training_questions()) == "train_sft 0"
    assert len(fields.evaluation_questions()) == 3, "held out, since no other split is named"
    with pytest.raises(DataUnusable, match="no split 'en'; it has train_gen, train_sft, test_sft"):
        load_questions("ultrachat:main:en", "train")
    hub(monkeypatch, english=1, french=1)
    with pytest.raises(
        DataUnusable, match=r"has no train split; it has english, french\. Name one of them as set:main:"
    ):
        load_questions("set:main", "train")


@pytest.mark.parametrize("splits", [{"train": 60}, {"train": 60, "prompts": 5}, {"test": 60}])
def test_a_data_set_is_never_evaluated_on_the_questions_that_are_trained_on(
    monkeypatch: pytest.MonkeyPatch, splits: dict[str, int]
) -> None:
    hub(monkeypatch, **splits)
    fields = DataFields(dataset_name="set")
    held_out, training = fields.evaluation_questions(), fields.training_questions(hold_out=True)
    assert (len(held_out), len(training)) == (3, 57)
    assert not {one.question for one in held_out} & {one.question for one in training}
    if len(splits) == 1:
        assert len(fields.evaluation_questions(trains=False)) == 60, "an evaluation alone has all"
