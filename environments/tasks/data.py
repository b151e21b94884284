"""The module reads questions with reference answers from a file, a folder of files, or a Hugging Face data set.

Files are JSON Lines (`.jsonl`), JSON (a list of objects) or Parquet. Several forms of record are read, among them
`question`/`answer` and `prompt`/`answer`; other columns are ignored. Where no test data is named, a share of the
training data is held out, the same share each time. `Draws` shuffles reproducibly. `datasets` and `pyarrow` are
imported only when a file or data set needs them.
"""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, Field

from atropos_api.common.errors import AtroposError

logger = logging.getLogger(__name__)

FORMS = (
    ("question", "answer"),
    ("prompt", "answer"),
    ("prompt", "response"),
    ("problem", "answer"),
    ("question", "final_answer"),
    ("problem", "solution"),
)
MOST_HELD_OUT = 500
SUFFIXES = (".jsonl", ".json", ".parquet")
SPLIT_NAMES: Mapping[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "test": ("test", "validation", "valid", "val", "eval", "dev"),
}

Split = Literal["train", "test"]
Records = Iterable[tuple[int, Any]]
"""Records with the number of each, from 1: its line or row."""
T = TypeVar("T")


class DataUnusable(AtroposError):
    """Questions that cannot be read: no such data, or records without a question and an answer."""


@dataclass(frozen=True, slots=True)
class Question:
    question: str
    answer: str


def form_of(columns: Iterable[str]) -> tuple[str, str] | None:
    """Return the names of the question and answer columns; None if there are none."""
    present = set(columns)
    return next((form for form in FORMS if present.issuperset(form)), None)


class DataFields(BaseModel):
    """These settings name the source of an environment's questions."""

    data_path: Path | None = Field(
        None, description="questions to train on: a .jsonl, .json or .parquet file, or a folder of them"
    )
    val_data_path: Path | None = Field(
        None, description="questions to evaluate on; default: the test files of data_path's folder, else dataset_name's"
    )
    held_out_share: float = Field(
        0.05,
        gt=0,
        le=0.5,
        description="share of data_path held out for evaluation if it has no test data; at most 500 questions",
    )
    dataset_name: str | None = Field(
        None, description="Hugging Face data set, NAME or NAME:CONFIG, used where no path is given"
    )
    seed: int = Field(0, description="seed of the order of the training questions")

    def training_questions(self, *, hold_out: bool = False) -> list[Question]:
        """Return all questions to train on; with `hold_out`, without those that are held out for evaluation."""
        if self.data_path is not None:
            questions = self.load(self.data_path, "train")
            return self._split(questions)[0] if hold_out and self._has_no_test_data() else questions
        if self.dataset_name is None:
            raise DataUnusable("there are no questions to train on; set --env.data_path or --env.dataset_name")
        return self.load(self.dataset_name, "train")

    def evaluation_questions(self) -> list[Question]:
        if self.val_data_path is not None:
            return self.load(self.val_data_path, "test")
        if self.data_path is not None:
            if self._has_no_test_data():
                training, held_out = self._split(self.load(self.data_path, "train"))
                logger.info(
                    "no test data is named: %d of the %d questions of %s are for evaluation and not trained on; "
                    "--env.val_data_path names others",
                    len(held_out),
                    len(held_out) + len(training),
                    self.data_path,
                )
                return held_out
            return self.load(self.data_path, "test")
        if self.dataset_name is None:
            raise DataUnusable(
                "there are no questions to evaluate on; set --env.val_data_path, or --env.steps_per_eval 0 for none"
            )
        return self.load(self.dataset_name, "test")

    def load(self, source: str | Path, split: Split) -> list[Question]:
        """Return all questions of `source` in its order; environments whose records have another form override it."""
        return load_questions(source, split)

    def _has_no_test_data(self) -> bool:
        path = self.data_path
        if self.val_data_path is not None or path is None:
            return False
        return not path.is_dir() or all(_split_named_by(file.relative_to(path)) != "test" for file in data_files(path))

    def _split(self, questions: list[Question]) -> tuple[list[Question], list[Question]]:
        """Return the questions to train on and those held out; the seed of the order does not change the split."""
        count = min(MOST_HELD_OUT, max(1, round(len(questions) * self.held_out_share)))
        if len(questions) < 2:
            raise DataUnusable(
                f"{self.data_path}: it has one question, too few to hold one out for evaluation; set "
                "--env.val_data_path, or --env.steps_per_eval 0 for no evaluation"
            )
        chosen = set(random.Random("held out").sample(range(len(questions)), count))
        held_out = [question for index, question in enumerate(questions) if index in chosen]
        return [question for index, question in enumerate(questions) if index not in chosen], held_out


class Draws(Generic[T]):
    """An endless sequence: `draws[n]` is the n-th draw; each item is drawn once per epoch, in a new order each epoch.

    The order depends only on the items and the seed, on every machine, so that a resumed run continues where it was.
    """

    def __init__(self, items: Sequence[T], seed: int | str) -> None:
        self._items = items
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def __getitem__(self, number: int) -> T:
        epoch, place = divmod(number, len(self._items))
        if epoch != self._epoch:
            self._order = random.Random(f"{self._seed}/{epoch}").sample(range(len(self._items)), len(self._items))
            self._epoch = epoch
        return self._items[self._order[place]]


def load_questions(source: str | Path, split: Split) -> list[Question]:
    """Return all questions of `source` in its order: a path, or the name of a Hugging Face data set."""
    tables = load_records(source, split, columns=form_of)
    return [question for where, records in tables for question in _collect(records, where)]


Choose = Callable[[Iterable[str]], Sequence[str] | None]
"""A function from the columns there are to those that are needed; None: all of them."""


def load_records(source: str | Path, split: Split, *, columns: Choose) -> Iterator[tuple[str, Records]]:
    """Yield the numbered records of each file of `source`, or of a data set, with the place that errors name."""
    path = Path(source).expanduser()
    if path.is_dir() or path.is_file():
        for file in files_of_split(path, split) if path.is_dir() else [path]:
            yield f"{file}:", read_records(file, columns=columns)
    elif isinstance(source, Path) or _looks_like_path(source):
        raise DataUnusable(f"{source}: cannot be read, since there is no such file or folder")
    else:
        yield _read_hub(source, split, columns)


def read_questions(path: Path) -> list[Question]:
    """Return every question of one file, in its order."""
    return _collect(read_records(path), f"{path}:")


def read_records(path: Path, suffix: str | None = None, *, columns: Choose = form_of) -> list[tuple[int, Any]]:
    """Return the records of one file, numbered from 1: lines of JSON Lines, else rows; the suffix gives the format."""
    parquet = partial(_read_parquet, columns=columns)
    readers: Mapping[str, Callable[[Path], Iterator[tuple[int, Any]]]] = {
        ".jsonl": _read_lines,
        ".json": _read_json,
        ".parquet": parquet,
    }
    reader = readers.get(suffix or path.suffix)
    if reader is None:
        raise DataUnusable(f"{path}: the file type is not supported; supported are {', '.join(SUFFIXES)}")
    try:
        return list(reader(path))
    except (OSError, UnicodeDecodeError) as error:
        raise DataUnusable(f"{path}: cannot be read ({error})") from error


def data_files(folder: Path) -> list[Path]:
    """Return all readable files of the folder and its subfolders, sorted by path."""
    return sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())


def files_of_split(folder: Path, split: Split) -> list[Path]:
    """Return the files named after the split, or in folders named so; all files where no name names any split."""
    files = data_files(folder)
    named = {path: _split_named_by(path.relative_to(folder)) for path in files}
    chosen = [path for path, named_split in named.items() if named_split == split]
    if not chosen and not any(named.values()):
        chosen = files
    if not chosen:
        found = ", ".join(str(path.relative_to(folder)) for path in files[:10]) or f"nothing of {', '.join(SUFFIXES)}"
        raise DataUnusable(
            f"{folder}: no file is named after the {split} split ({', '.join(SPLIT_NAMES[split])}); found {found}"
        )
    return chosen


def _split_named_by(path: Path) -> str | None:
    for part in reversed((*path.parent.parts, path.stem)):
        first = re.split(r"[-_.]", part.lower())[0]
        for split, names in SPLIT_NAMES.items():
            if first in names:
                return split
    return None


def _looks_like_path(source: str) -> bool:
    return source.startswith(("/", ".", "~")) or source.count("/") > 1 or Path(source).suffix in SUFFIXES


def _read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            yield number, parse_line(line, f"{path}:{number}")


def _read_json(path: Path) -> Iterator[tuple[int, Any]]:
    """Read a list of records, or an object with one; a file of JSON lines is often named `.json` as well."""
    text = path.read_text(encoding="utf-8")
    try:
        content = json.loads(text)
    except json.JSONDecodeError:
        return _read_lines(path)
    if isinstance(content, Mapping):
        lists = [value for value in content.values() if isinstance(value, list)]
        content = lists[0] if len(lists) == 1 else [content]
    return iter(enumerate(content if isinstance(content, list) else [content], 1))


def parse_line(line: str | bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataUnusable(f"{where}: not a JSON object ({error})") from None


def _read_parquet(path: Path, columns: Choose) -> Iterator[tuple[int, Any]]:
    with open_parquet(path) as file:
        names = file.schema_arrow.names
        wanted = columns(names) or names
        rows = file.read(columns=list(wanted)).to_pylist()
    return iter(enumerate(rows, 1))


@contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """Open a Parquet file; raise `DataUnusable` if it is none."""
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    try:
        with pq.ParquetFile(path) as file:
            yield file
    except pa.ArrowInvalid as error:
        raise DataUnusable(f"{path}: not a Parquet file ({error})") from error


def _read_hub(name: str, split: Split, columns: Choose) -> tuple[str, Records]:
    """Read a data set of the Hugging Face hub or its local cache; take the first split whose name fits."""
    repository, _, configuration = name.partition(":")
    try:
        import datasets

        splits = datasets.load_dataset(repository, configuration or None)
    except ImportError as error:
        raise DataUnusable(
            f"data set {name!r} needs the package datasets: pip install 'atropos-grpo[environments]'"
        ) from error
    except Exception as error:  # it raises whatever its builders, its cache and its HTTP library raise
        raise DataUnusable(
            f"data set {name!r} cannot be loaded ({type(error).__name__}: {_first_line(error)}); without a network "
            "name a local .jsonl, .json or .parquet file or a folder of them: --env.data_path and --env.val_data_path"
        ) from error
    # Some evaluation sets have only one split, under any name.
    found = next((each for each in SPLIT_NAMES[split] if each in splits), None)
    if found is None and len(splits) == 1:
        found = next(iter(splits))
    if found is None:
        raise DataUnusable(f"data set {name!r} has no {split} split; it has {', '.join(splits)}")
    rows = splits[found]
    wanted = columns(rows.column_names)
    return f"{name}/{found} row ", enumerate(rows.select_columns(list(wanted)) if wanted else rows, 1)


def _collect(records: Records, where: str) -> list[Question]:
    """Convert numbered records to questions; records without a question or an answer are left out and counted."""
    questions: list[Question] = []
    unanswered = 0
    for number, record in records:
        form = form_of(record) if isinstance(record, Mapping) else None
        if form is None:
            raise DataUnusable(f"{where}{number}: it has neither {_forms()}; {_found(record)}")
        question, answer = (read_cell(record[column]) for column in form)
        if question and answer:
            questions.append(Question(question, answer))
        else:
            unanswered += 1
    if unanswered:
        logger.warning("%s %d records without a question or an answer are left out", where.rstrip(": "), unanswered)
    if not questions:
        raise DataUnusable(f"{where.rstrip(': ')}: it has no question; a record needs question and answer")
    return questions


def read_cell(value: Any) -> str:
    """Return a cell as text: for a chat its last message, for a list its items joined by commas."""
    if value is None:
        return ""
    if isinstance(value, list):
        if value and isinstance(value[-1], Mapping):
            return str(value[-1].get("content", ""))
        return ", ".join(map(str, value))
    return str(value)


def _forms() -> str:
    return " nor ".join(f"{question} and {answer}" for question, answer in FORMS)


def _found(record: Any) -> str:
    if isinstance(record, Mapping):
        return f"its columns are {', '.join(map(str, record))}"
    return f"it is {json.dumps(record, default=str)[:80]}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]
