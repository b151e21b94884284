"""The module reads questions with reference answers from a file, a folder of files, or a Hugging Face data set.

Files are JSON Lines (`.jsonl`), JSON (a list of objects) or Parquet. Several forms of record are read, among them
`question`/`answer` and `prompt`/`answer`; other columns are ignored. Where there is no test data, a share of the
training data is held out, the same share each time. `ShuffledEpochs` shuffles reproducibly.
"""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, Field, field_validator

from atropos_api.common.files import expand_home, named_path
from environments.rewards.protocol import reference_text
from environments.tasks.records import (
    DataUnusable,
    Records,
    Split,
    data_files,
    has_test_split,
    load_records,
    split_named_by,
)

logger = logging.getLogger(__name__)

FORMS = (
    ("question", "answer"),
    ("prompt", "answer"),
    ("prompt", "response"),
    ("problem", "answer"),
    ("question", "final_answer"),
    ("problem", "solution"),
)
PARTS = ("choices", "options", "context", "input")
"""Columns with parts of a question, such as the options in MMLU or the text asked about in SQuAD and Alpaca; the prompt
has them only if the question column contains them."""
OFTEN_EMPTY = "input"
"""The column of `PARTS` that has nothing in most rows of Alpaca's form, or in all."""
MOST_HELD_OUT = 500
ROW = "row"
"""The key of a group's `group_overrides` under which the live page shows what the data says; no trainer reads it."""
MOST_SHOWN_COLUMNS = 20
LONGEST_SHOWN_TEXT = 1000
T = TypeVar("T")


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
        None, description="Questions to train on: a .jsonl, .json or .parquet file, or a folder of them."
    )
    val_data_path: Path | None = Field(
        None,
        description="Questions to evaluate on; default: the test files of data_path's folder, else dataset_name's.",
    )
    held_out_share: float = Field(
        0.05,
        gt=0,
        le=0.5,
        description="Share of the data held out for evaluation if it has no test data; at most 500 questions.",
    )
    dataset_name: str | None = Field(
        None,
        description="Hugging Face data set, used where no path is given: NAME, NAME:CONFIG or NAME:CONFIG:SPLIT "
        "(NAME::SPLIT without a configuration).",
    )
    seed: int = Field(0, description="Seed of the order of the training questions.")

    _find_questions = field_validator("data_path", "val_data_path", mode="before")(named_path)

    def training_questions(self, *, hold_out: bool = False) -> list[Question]:
        """Return all questions to train on; with `hold_out`, without those that are held out for evaluation."""
        source = self.data_path if self.data_path is not None else self.dataset_name
        if source is None:
            raise DataUnusable("there are no questions to train on; set --env.data_path or --env.dataset_name")
        questions = self.load(source, "train")
        return self._split(questions)[0] if hold_out and self._has_no_test_data() else questions

    def evaluation_questions(self, *, trains: bool = True) -> list[Question]:
        """Return the questions to evaluate on; unless `trains`, a data set with a single split is used whole."""
        source = self.val_data_path or self.data_path or self.dataset_name
        if source is None:
            raise DataUnusable(
                "there are no questions to evaluate on; set --env.val_data_path, or for no evaluation "
                "--env.steps_per_eval 0, --env.eval_at_start false and --env.eval_at_end false"
            )
        if not self._has_no_test_data() or (self.data_path is None and not trains):
            return self.load(source, "test")
        training, held_out = self._split(self.load(source, "train"))
        logger.info(
            "no test data is named: %d of the %d questions of %s are for evaluation, and a run that evaluates does not "
            "train on them; --env.val_data_path names others",
            len(held_out),
            len(held_out) + len(training),
            source,
        )
        return held_out

    def load(self, source: str | Path, split: Split) -> list[Question]:
        """Return all questions of `source` in its order; environments whose records have another form override it."""
        return load_questions(source, split)

    def _has_no_test_data(self) -> bool:
        path = None if self.data_path is None else expand_home(self.data_path)
        if self.val_data_path is not None:
            return False
        if path is None:
            return self.dataset_name is not None and not has_test_split(self.dataset_name)
        return not path.is_dir() or all(split_named_by(file.relative_to(path)) != "test" for file in data_files(path))

    def _split(self, questions: list[Question]) -> tuple[list[Question], list[Question]]:
        """Return the questions to train on and those held out; the seed of the order does not change the split."""
        count = min(MOST_HELD_OUT, max(1, round(len(questions) * self.held_out_share)))
        if len(questions) < 2:
            raise DataUnusable(
                f"{self.data_path or self.dataset_name}: it has one question, too few to hold one out for evaluation; "
                "set --env.val_data_path, or --env.steps_per_eval 0, --env.eval_at_start false and --env.eval_at_end "
                "false for no evaluation"
            )
        chosen = set(random.Random("held out").sample(range(len(questions)), count))
        held_out = [question for index, question in enumerate(questions) if index in chosen]
        return [question for index, question in enumerate(questions) if index not in chosen], held_out


class ShuffledEpochs(Generic[T]):
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
    parts: set[str] = set()

    def choose(columns: Iterable[str]) -> tuple[str, ...] | None:
        """Return the columns to read. A long part is not read to see if it is empty: HotpotQA's took two gigabytes."""
        present = set(columns)
        parts.update(present.intersection(PARTS) - {OFTEN_EMPTY})
        form = form_of(present)
        return None if form is None else (*form, *present.intersection({OFTEN_EMPTY}))

    tables = load_records(source, split, columns=choose)
    questions = [question for where, records in tables for question in _collect(records, where, parts)]
    warn_of_parts(source, parts)
    return questions


def parts_in(record: Mapping[str, Any]) -> set[str]:
    """Return the columns of `PARTS` that have a value here."""
    return {name for name in PARTS if not is_blank(record.get(name))}


def warn_of_parts(source: str | Path, parts: Iterable[str]) -> None:
    """Log a warning for each of these columns: a model that is not shown them can only guess."""
    for name in sorted(parts):
        logger.warning(
            "%s: the model is not shown the column %s; if the questions do not hold what is in it, write it there",
            source,
            name,
        )


def _collect(records: Records, where: str, parts: set[str]) -> list[Question]:
    """Convert numbered records to questions, and add their `parts_in`; records without a question or an answer are left
    out and counted.
    """
    questions: list[Question] = []
    unanswered = 0
    for number, record in records:
        form = form_of(record) if isinstance(record, Mapping) else None
        if form is None:
            raise DataUnusable(f"{where}{number}: it has neither {_forms()}; {_found(record)}")
        question, answer = (read_cell(record[column]) for column in form)
        if question and answer:
            questions.append(Question(question, answer))
            parts |= parts_in(record)
        else:
            unanswered += 1
    if unanswered:
        logger.warning("%s %d records without a question or an answer are left out", where.rstrip(": "), unanswered)
    if not questions:
        raise DataUnusable(f"{where.rstrip(': ')}: it has no question; a record needs question and answer")
    return questions


def shown_row(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns with a text, a number or a truth value, cut to a size that each group can carry."""
    shown = {str(name): _shown_cell(value) for name, value in columns.items()}
    return dict([(name, cell) for name, cell in shown.items() if cell is not None][:MOST_SHOWN_COLUMNS])


def _shown_cell(value: Any) -> str | int | float | bool | None:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bool):
        return value
    if isinstance(value, int):  # JSON of other languages has no more than 64 bits
        return value if abs(value) < 2**63 else _cut(str(value))
    return _cut(value) if isinstance(value, str) and value else None


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_SHOWN_TEXT else f"{text[:LONGEST_SHOWN_TEXT]}…"


def is_missing(value: Any) -> bool:
    """Return True for a cell without a value: null, or the NaN that pandas writes for it in a column of numbers."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def is_blank(value: Any) -> bool:
    """Return True for no value, a text without a visible character, and a list without an entry."""
    return is_missing(value) or not (value.strip() if isinstance(value, str) else value)


def read_cell(value: Any) -> str:
    """Return a cell as text, as a reward reads a reference; "" for one without a value."""
    return "" if is_missing(value) else reference_text(value)


def _forms() -> str:
    return " nor ".join(f"{question} and {answer}" for question, answer in FORMS)


def _found(record: Any) -> str:
    if isinstance(record, Mapping):
        return f"its columns are {', '.join(map(str, record))}"
    return f"it is {json.dumps(record, default=str)[:80]}"
