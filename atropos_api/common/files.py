"""Files that are written whole or not at all: data goes to a file next to the target, which is then renamed.

`OutputFile` does not replace an existing file unless asked to; `write_private` makes files that only their own user may
read.
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
    """A file exists already that a command would have to destroy."""


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace the content of `path` in one step: after a failure, either the old or the new content is there."""
    data = content.encode() if isinstance(content, str) else content
    replace_whole(path, lambda temporary: temporary.write_bytes(data))


def replace_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Replace `path` in one step by the file that `write` writes; it gets a temporary path of the same suffix."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        write(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class OutputFile:
    """The file that a command writes: it is `PATH.part` until the block ends without an error, then `PATH`.

    An existing file is refused unless it is to be overwritten or appended to. If the block fails, what it wrote stays
    in `PATH.part`, because that may be the only copy; if it wrote nothing, that file is deleted.
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
        self._file.flush()  # it may hold groups that the broker no longer has

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
        """True if the block failed and left what it wrote."""
        return self.part.exists()

    def _put_in_place(self) -> None:
        if self._replaces:
            self.part.replace(self.path)
            return
        try:
            os.link(self.part, self.path)  # unlike a rename, this fails if a file has appeared meanwhile
        except FileExistsError:
            raise FileInTheWay(f"{self.path} has appeared meanwhile; what was written is in {self.part}") from None
        except OSError:  # a file system without hard links
            self.part.replace(self.path)
            return
        self.part.unlink()


def free_path(path: Path) -> Path:
    """Return `path`, or if it exists, the first free path with _1, _2, … after its stem."""
    number = 0
    candidate = path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.stem}_{number}{path.suffix}")
    return candidate


def write_private(path: Path, text: str) -> None:
    """Write `text` to a temporary file and rename it to `path`; only this user may read it (mode 0600)."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mkstemp makes it 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
