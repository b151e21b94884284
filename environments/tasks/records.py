"""The module reads records from a file, a folder of files, or a Hugging Face data set.

Files are JSON Lines (`.jsonl`), JSON (a list of objects) or Parquet, in UTF-8 with or without a byte order mark. Files
and splits belong to training or evaluation by the first word of their names: `test_sft` and `test-00000` are test data.
`datasets` and `pyarrow` are imported only when a file or data set needs them.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from atropos_api.common.errors import AtroposError
from atropos_api.common.files import expand_home

ENCODING = "utf-8-sig"
"""UTF-8; a byte order mark, which editors on Windows write, is not part of the text."""
SUFFIXES = (".jsonl", ".json", ".parquet")
SPLIT_NAMES: Mapping[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "test": ("test", "validation", "valid", "val", "eval", "dev"),
}

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

Split = Literal["train", "test"]
Records = Iterable[tuple[int, Any]]
"""Records with the number of each, from 1: its line or row."""


class DataUnusable(AtroposError):
    """Questions that cannot be read: no such data, or records without a question and an answer."""


Choose = Callable[[Iterable[str]], Sequence[str] | None]
"""A function that gets the existing columns and returns those that are needed; None: all of them."""


def load_records(source: str | Path, split: Split, *, columns: Choose) -> Iterator[tuple[str, Records]]:
    """Yield the numbered records of each file of `source`, or of a data set, with the place that errors name."""
    path = local_path(source)
    if path.is_dir() or path.is_file():
        for file in files_of_split(path, split) if path.is_dir() else [path]:
            yield f"{file}:", read_records(file, columns=columns)
    elif isinstance(source, Path) or _looks_like_path(source):
        raise DataUnusable(f"{source}: cannot be read, since there is no such file or folder")
    else:
        yield _read_hub(source, split, columns)


def local_path(source: str | Path) -> Path:
    """Return the path at which data would be on this machine; raise `DataUnusable` for an empty text."""
    if source == "":  # as from a shell's unset variable; it would mean all files below the present directory
        raise DataUnusable("an empty text names no data; name a file, a folder or a Hugging Face data set")
    return expand_home(source)


def read_records(path: Path, suffix: str | None = None, *, columns: Choose) -> list[tuple[int, Any]]:
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
    """Return all readable files of the folder and its subfolders, sorted by path.

    Those with a dot before their name, or in such a folder, are no data: macOS, notebooks and interrupted copies leave
    them, with the same rows again or with none.
    """
    found = (path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    return sorted(path for path in found if not any(part[0] == "." for part in path.relative_to(folder).parts))


def files_of_split(folder: Path, split: Split) -> list[Path]:
    """Return the files named after the split, or in folders named so; all files if no name contains a split."""
    files = data_files(folder)
    named = {path: split_named_by(path.relative_to(folder)) for path in files}
    chosen = [path for path, named_split in named.items() if named_split == split]
    if not chosen and not any(named.values()):
        chosen = files
    if not chosen:
        found = ", ".join(str(path.relative_to(folder)) for path in files[:10]) or f"nothing of {', '.join(SUFFIXES)}"
        raise DataUnusable(
            f"{folder}: no file is named after the {split} split ({', '.join(SPLIT_NAMES[split])}); found {found}"
        )
    return chosen


def split_named_by(path: Path) -> str | None:
    """Return the split that a file or the nearest of its folders is named after; None if there is none."""
    for part in reversed((*path.parent.parts, path.stem)):
        first = _first_word(part)
        for split, names in SPLIT_NAMES.items():
            if first in names:
                return split
    return None


def _first_word(name: str) -> str:
    return re.split(r"[-_.]", name.lower())[0]


def _looks_like_path(source: str) -> bool:
    return source.startswith(("/", ".", "~")) or source.count("/") > 1 or Path(source).suffix in SUFFIXES


def _read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    # JSON may hold U+2028 and other characters at which str.splitlines would cut a line in two.
    for number, line in enumerate(path.read_text(encoding=ENCODING).split("\n"), 1):
        if line.strip():
            yield number, parse_line(line, f"{path}:{number}")


def _read_json(path: Path) -> Iterator[tuple[int, Any]]:
    """Read a list of records, or an object with one; a file of JSON lines is often named `.json` as well."""
    text = path.read_text(encoding=ENCODING)
    try:
        content = _loads(text)
    except (ValueError, RecursionError):
        return _read_lines(path)
    if isinstance(content, Mapping):
        lists = [value for value in content.values() if isinstance(value, list)]
        content = lists[0] if len(lists) == 1 else [content]
    return iter(enumerate(content if isinstance(content, list) else [content], 1))


def parse_line(line: str | bytes, where: str) -> Any:
    try:
        return _loads(line)
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, a number of too many digits
        raise DataUnusable(f"{where}: not a JSON object ({error})") from None


def _loads(text: str | bytes) -> Any:
    """Decode JSON; half a surrogate pair, as a text that was cut in an emoji ends in, becomes `?`: no tokenizer and no
    group can hold it.
    """
    content = json.loads(text)
    if _SURROGATE.search(text if isinstance(text, str) else text.decode("utf-8", "replace")) is None:
        return content
    written = json.dumps(content, ensure_ascii=False)
    readable = written.encode("utf-8", "replace").decode()
    return content if readable == written else json.loads(readable)


def _read_parquet(path: Path, columns: Choose) -> Iterator[tuple[int, Any]]:
    with open_parquet(path) as file:
        names = file.schema_arrow.names
        wanted = columns(names) or names
        rows = file.read(columns=list(wanted)).to_pylist()
    return iter(enumerate(rows, 1))


@contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """Open a Parquet file; raise `DataUnusable` if it is not one."""
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    try:
        with pq.ParquetFile(path) as file:
            yield file
    except pa.ArrowInvalid as error:
        raise DataUnusable(f"{path}: not a Parquet file ({error})") from error


def has_test_split(name: str) -> bool:
    """Return True if a data set of the hub has a split to evaluate on besides the one to train on."""
    splits = _load_hub(name)
    return len(splits) > 1 and _split_for(splits, "test") is not None


def _read_hub(name: str, split: Split, columns: Choose) -> tuple[str, Records]:
    splits = _load_hub(name)
    # Some evaluation sets have only one split, under any name.
    found = next(iter(splits)) if len(splits) == 1 else _split_for(splits, split)
    if found is None:
        raise DataUnusable(
            f"data set {name!r} has no {split} split; it has {', '.join(splits)}. Name one of them as "
            f"{':'.join([*name.split(':'), ''][:2])}:SPLIT"
        )
    rows = splits[found]
    wanted = columns(rows.column_names)
    return f"{name}/{found} row ", enumerate(rows.select_columns(list(wanted)) if wanted else rows, 1)


def _split_for(splits: Iterable[str], split: Split) -> str | None:
    """Return the split with the usual name for this use, else the first whose name begins with one; None if none."""
    named = list(splits)
    exact = (name for name in SPLIT_NAMES[split] if name in named)
    return next(exact, None) or next((name for name in named if _first_word(name) in SPLIT_NAMES[split]), None)


def _load_hub(name: str) -> Mapping[str, Any]:
    """Return the splits of a data set of the Hugging Face hub or its local cache: all, or the one that is named."""
    repository, configuration, wanted = [*name.split(":", 2), "", ""][:3]
    try:
        import datasets
    except ImportError as error:
        raise DataUnusable(
            f"data set {name!r} needs the package datasets: pip install 'atropos-grpo[environments]'"
        ) from error
    try:
        splits: Mapping[str, Any] = datasets.load_dataset(repository, configuration or None)
    except Exception as error:  # it raises whatever its builders, its cache and its HTTP library raise
        raise DataUnusable(
            f"data set {name!r} cannot be loaded ({type(error).__name__}: {_first_line(error)}); without a network "
            "name a local .jsonl, .json or .parquet file or a folder of them: --env.data_path and --env.val_data_path, "
            "or of atropos-sft --dataset"
        ) from error
    if wanted and wanted not in splits:
        raise DataUnusable(f"data set {name!r} has no split {wanted!r}; it has {', '.join(splits)}")
    return {wanted: splits[wanted]} if wanted else splits


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]


PlacedRecords = Sequence[tuple[str, Any]]
"""Records, each with the place that errors name."""


class _Lines:
    """The records of a JSON Lines file: it knows where each line begins, and reads one when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: list[tuple[int, int]] = []
        """Number and first byte of each line that is not blank."""
        offset = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    self._places.append((number, offset))
                offset += len(line)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> tuple[str, Any]:
        number, offset = self._places[index]
        with self._path.open("rb") as file:  # opened each time, so that worker processes share no place in the file
            file.seek(offset)
            where = f"{self._path}:{number}"
            return where, parse_line(file.readline(), where)


class _ParquetRows:
    """The records of a Parquet file: one row group is kept, so reading in order reads each group once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._group = -1
        self._rows: list[Any] = []
        with open_parquet(path) as file:
            metadata = file.metadata
            counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._ends = list(accumulate(counts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> tuple[str, Any]:
        number = range(len(self))[index]
        group = bisect_right(self._ends, number)
        if group != self._group:
            with open_parquet(self._path) as file:
                self._rows, self._group = file.read_row_group(group).to_pylist(), group
        return f"{self._path}:{number + 1}", self._rows[number - self._ends[group]]


class _Joined:
    """The records of several files, one after the other."""

    def __init__(self, parts: Sequence[_Lines | _ParquetRows | PlacedRecords]) -> None:
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> tuple[str, Any]:
        number = range(len(self))[index]
        part = bisect_right(self._ends, number)
        return self._parts[part][number - self._ends[part]]


def records_of(source: str | Path | Sequence[Mapping[str, Any]], split: Split) -> _Joined | PlacedRecords:
    """Return the records of a data set, read on demand where that is possible."""
    if not isinstance(source, str | Path):
        return [(f"record {number}", record) for number, record in enumerate(source, 1)]
    path = local_path(source)
    if path.is_file() or path.is_dir():
        return _Joined([_records_of_file(file) for file in (files_of_split(path, split) if path.is_dir() else [path])])
    read = load_records(source, split, columns=lambda _: None)
    return [(f"{where}{number}", record) for where, records in read for number, record in records]


def _records_of_file(path: Path) -> _Lines | _ParquetRows | PlacedRecords:
    if path.suffix == ".jsonl":
        return _Lines(path)
    if path.suffix == ".parquet":
        return _ParquetRows(path)
    return [(f"{path}:{number}", record) for number, record in read_records(path, columns=lambda _: None)]
