"""Files and directories that are written whole or not at all: data is written next to the target and then renamed.

`write_directory` and `move_link` do so for directories and links; `sync_path` forces one to the disk, so that a power
failure cannot undo it. `OutputFile` does not replace an existing file unless asked to; `write_private` makes files that
only their own user may read. `read_json_object` reads what may be missing. `RecentLines` is a file of lines that stays
small.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO, Self

from atropos_api.common.errors import AtroposError

PART_SUFFIX = ".part"


class FileInTheWay(AtroposError):
    """A file exists already that a command would have to destroy."""


class FileUnwritable(AtroposError):
    """A command cannot create the file that it is to write."""


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


def sync_path(path: Path) -> None:
    """Force a file's content, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def write_directory(directory: Path, *, synced: bool = False) -> Iterator[Path]:
    """Yield a new directory, which replaces `directory` when the block ends without an error.

    With `synced` its files are forced to the disk before the rename; the caller syncs the parent to force the rename.
    An error removes what was written, which may have filled the disk; if the process is killed, `.NAME.part` stays next
    to it until the next call.
    """
    partial, old = (directory.with_name(f".{directory.name}.{suffix}") for suffix in ("part", "old"))
    shutil.rmtree(partial, ignore_errors=True)
    if old.exists() and not directory.exists():  # a process was killed between the two renames below
        old.rename(directory)
    shutil.rmtree(old, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if synced:
            for path in partial.iterdir():
                sync_path(path)
            sync_path(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if directory.exists():
        directory.rename(old)
    partial.rename(directory)
    shutil.rmtree(old, ignore_errors=True)


def move_link(link: Path, target: str) -> None:
    """Make a link, or an older link of that name, lead to `target` in one rename."""
    partial = link.with_name(f".{link.name}.part")
    partial.unlink(missing_ok=True)
    partial.symlink_to(target, target_is_directory=True)
    partial.rename(link)


class OutputFile:
    """The file that a command writes: it is `PATH.part` until the block ends without an error, then `PATH`.

    An existing file is refused unless it is to be overwritten or appended to. If the block fails, what it wrote stays
    in `PATH.part`, because that may be the only copy; if it wrote nothing, that file is deleted.
    """

    def __init__(self, path: Path, *, overwrite: bool = False, append: bool = False, hint: str = "") -> None:
        self.path = path
        self._replaces = overwrite or append
        self._append = append
        if path.is_dir() or (path.exists() and not self._replaces):
            raise FileInTheWay(f"{path} is there already and is left as it is; {hint or 'name another file'}")
        self.part = path.with_name(path.name + PART_SUFFIX)
        if self.part.exists():
            raise FileInTheWay(
                f"{self.part} is in the way: a command writes to it, or was interrupted; look at it, then remove it"
            )

    def __enter__(self) -> Self:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = self.part.open("xb")
        except OSError as error:
            if isinstance(error, FileExistsError) and self.part.exists():
                what = f"{self.part} is in the way: another command has just begun to write to it"
                raise FileInTheWay(what) from None
            raise FileUnwritable(f"{self.path}: cannot be written ({error.strerror}); name another file") from error
        try:
            if self._append and self.path.exists():
                with self.path.open("rb") as old:
                    shutil.copyfileobj(old, self._file)
        except BaseException:
            self.part.unlink()  # it holds nothing of the command's own
            with suppress(OSError):
                self._file.close()
            raise
        self._begun_at = self._file.tell()
        return self

    def write_line(self, line: str) -> None:
        self._file.write(line.encode() + b"\n")
        self._file.flush()  # the line may hold a group that the broker no longer has

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


class RecentLines:
    """A file of the newest lines: at most twice `keep` lines and twice `most_bytes` while it is open, half once closed.

    A line is flushed when `append` returns. A file of an earlier process is continued; a line that it left incomplete
    is dropped.
    """

    def __init__(self, path: Path, *, keep: int, most_bytes: int) -> None:
        self.path = path
        self._keep = keep
        self._most_bytes = most_bytes
        self._lines = self._bytes = 0
        self._file: BinaryIO | None = None

    def append(self, line: bytes) -> None:
        """Add a line, given without its line break."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.trim()
            self._file = self.path.open("ab")
        self._file.write(line + b"\n")
        self._file.flush()
        self._lines, self._bytes = self._lines + 1, self._bytes + len(line) + 1
        if self._lines >= 2 * self._keep or self._bytes >= 2 * self._most_bytes:
            self.close()
            self.trim()

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # closing tries once more to write a line that could not be written
                file.close()

    def trim(self) -> None:
        """Reduce the closed file to its newest complete lines."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            newest = deque((line for line in file if line.endswith(b"\n")), maxlen=self._keep)
        size = sum(map(len, newest))
        while len(newest) > 1 and size > self._most_bytes:
            size -= len(newest.popleft())
        write_whole(self.path, b"".join(newest))
        self._lines, self._bytes = len(newest), size


def expand_home(path: str | Path) -> Path:
    """Return `path` with the home directory for its `~`; like a shell, keep a `~` that leads to no home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def named_path(value: object) -> object:
    """Return a path as a user has written it with the home directory for its `~`; refuse an empty text."""
    if value == "":  # as from a shell's unset variable; it would mean the present directory
        raise ValueError("an empty text is not a path; name one, or leave the option out")
    # A shell does not expand the ~ in a run file or in --run-dir=~/runs, so a folder named ~ would be made.
    # `Path.expanduser` would turn --resume ./auto, a path, into the word auto.
    return os.path.expanduser(value) if isinstance(value, str | Path) else value  # noqa: PTH111


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is none that can be read."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


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
    except BaseException:  # also a signal's: what is left may hold a secret
        Path(temporary).unlink(missing_ok=True)
        raise
