"""Files that are there whole or not at all: written beside, renamed, and never in the place of one that is not ours.

Files that only their own user may read, written whole or not at all.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from atropos_api.common.errors import AtroposError

PART_SUFFIX = ".part"


class FileInTheWay(AtroposError):
    """Something is there already that a command would have to destroy."""


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace what `path` holds in one step; whatever happens meanwhile, the old or the new content is there."""
    data = content.encode() if isinstance(content, str) else content
    replace_whole(path, lambda beside: beside.write_bytes(data))


def replace_whole(path: Path, write: Callable[[Path], object]) -> None:
    """The same for content that `write` writes to the path that it is given, of the same suffix."""
    beside = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        write(beside)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


class OutputFile:
    """The file that a command writes: `PATH.part` until the block ends well, then `PATH`.

    An existing file is refused unless it is to be replaced, or added to. What a block that fails had written stays in
    `PATH.part`, because it may be all that is left of it; where that is nothing, nothing stays.
    """

    def __init__(self, path: Path, *, overwrite: bool = False, append: bool = False, hint: str = "") -> None:
        self.path = path
        self.part = path.with_name(path.name + PART_SUFFIX)
        self._replaces = overwrite or append
        self._append = append
        if path.is_dir() or (path.exists() and not self._replaces):
            raise FileInTheWay(f"{path} is there already and is left as it is; {hint or 'name another file'}")
        if self.part.exists():
            raise FileInTheWay(
                f"{self.part} is in the way: a command writes to it, or was interrupted; look at it, then remove it"
            )

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._file: IO[bytes] = self.part.open("xb")
        except FileExistsError:
            raise FileInTheWay(f"{self.part} is in the way: another command has just begun to write to it") from None
        if self._append and self.path.exists():
            with self.path.open("rb") as old:
                shutil.copyfileobj(old, self._file)
        self._begun_at = self._file.tell()
        return self

    def write_line(self, line: str) -> None:
        self._file.write(line.encode() + b"\n")
        self._file.flush()  # it may be of groups that a broker has no more

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        written = self._file.tell() > self._begun_at
        if error is None:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()
        if error is None:
            self._put_in_place()
        elif not written:
            self.part.unlink()

    @property
    def is_kept(self) -> bool:
        """Whether the block failed and left something behind."""
        return self.part.exists()

    def _put_in_place(self) -> None:
        if self._replaces:
            self.part.replace(self.path)
            return
        try:
            os.link(self.part, self.path)  # unlike a rename it fails where a file has appeared meanwhile
        except FileExistsError:
            raise FileInTheWay(f"{self.path} has appeared meanwhile; what was written is in {self.part}") from None
        except OSError:  # a file system without links
            self.part.replace(self.path)
            return
        self.part.unlink()


def free_path(path: Path) -> Path:
    """`path`, or with _1, _2, … at its stem when it is taken."""
    number = 0
    candidate = path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.stem}_{number}{path.suffix}")
    return candidate


def write_private(path: Path, text: str) -> None:
    """Write `text` beside `path` and rename it there; the file is readable by this user alone (mode 0600)."""
    descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mkstemp makes it 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(beside).replace(path)
    except OSError:
        Path(beside).unlink(missing_ok=True)
        raise
