"""Policy versions, and the shared-memory header that carries them between trainer and inference server.

A publish writes the tensors between two stamps in a header that both processes map. While the stamps differ, the
tensors are a mixture of two versions and must not be read. The header is a file of its own, on a CPU and on a GPU
alike, so that the server can judge the state of the weights after a trainer has been killed.

Files are named after the server's boot id, and the server holds a lock on them until it exits. A file without a lock
belonged to a server that has ended, and any process may remove it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from example_trainer.errors import TrainerError

PolicyVersion = int

SHARED_MEMORY_DIR = Path("/dev/shm")  # noqa: S108  POSIX shared memory lives there
FILE_PREFIX = "atropos-"
NO_VERSION: PolicyVersion = -1
_LAYOUT = struct.Struct("<8sqqqq")
_FILE_NAME = re.compile(rf"{FILE_PREFIX}[0-9a-f]{{16}}-(header|weights)")
_MAGIC = b"ATROPOS1"


class SharedMemoryError(TrainerError):
    """A shared-memory file cannot be created, opened or understood."""


class WriteRefused(TrainerError):
    """The server does not allow a write now: the lease has lapsed, or no publish was begun."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeaderState:
    """The header's statement about the tensors: the last complete version, and the stamps of the newest write."""

    version: PolicyVersion
    write_begin: PolicyVersion
    write_end: PolicyVersion

    @property
    def torn(self) -> bool:
        return self.write_begin != self.write_end


class SegmentHeader:
    """The header of one server's shared weights, mapped into this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), _LAYOUT.size)
        except (OSError, ValueError) as error:
            raise SharedMemoryError(
                f"cannot map the header of the shared weights at {path}: {error}; is the vLLM server still running?"
            ) from error
        if self._memory[:8] != _MAGIC:
            raise SharedMemoryError(f"{path} is not a header of shared weights written by this release")

    @classmethod
    def initialise(cls, path: Path) -> SegmentHeader:
        """Write an empty header into an existing file of at least `nbytes()` and map it."""
        with path.open("r+b") as file:
            file.write(_LAYOUT.pack(_MAGIC, NO_VERSION, NO_VERSION, NO_VERSION, 1))
        return cls(path)

    @staticmethod
    def nbytes() -> int:
        return _LAYOUT.size

    def state(self) -> HeaderState:
        _, version, write_begin, write_end, _ = _LAYOUT.unpack_from(self._memory)
        return HeaderState(version=version, write_begin=write_begin, write_end=write_end)

    def begin_write(self, version: PolicyVersion) -> None:
        """Mark the start of a write: until `end_write` the tensors are neither the old version nor the new one.

        A write that has begun may be begun again, to give it another version. Raises `WriteRefused` if the server is
        not paused for it, and leaves the header as it was: torn, if an earlier write was interrupted.
        """
        before = self.state()
        if version <= before.write_end:
            raise ValueError(
                f"version {version} is not above {before.write_end}, the last one written; versions are never reused"
            )
        # The trainer stamps first and then reads the permission; the server withdraws the permission first and then
        # reads the stamp. So either this write is refused or the server sees it: it never reads tensors during a write.
        self._store(16, version)
        if not self._load(32):
            self._store(16, before.write_begin)
            raise WriteRefused(f"version {version} may not be written now: the publish has lapsed; begin a new one")

    def end_write(self, version: PolicyVersion) -> None:
        begun = self.state().write_begin
        if begun != version:
            raise ValueError(f"version {version} ends a write that version {begun} began")
        self._store(8, version)
        self._store(24, version)

    def allow_writes(self, allowed: bool) -> None:
        """Set the server's permission to write: True while it is paused for a publish."""
        self._store(32, int(allowed))

    def close(self) -> None:
        self._memory.close()

    def _store(self, offset: int, value: int) -> None:
        struct.pack_into("<q", self._memory, offset, value)

    def _load(self, offset: int) -> int:
        (value,) = struct.unpack_from("<q", self._memory, offset)
        return int(value)


class SharedFile:
    """One file in shared memory, private to this user and locked by the process that made it until it ends."""

    def __init__(self, path: Path, descriptor: int, nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes
        self._descriptor = descriptor

    @classmethod
    def create(cls, boot_id: str, label: str, nbytes: int) -> SharedFile:
        path = SHARED_MEMORY_DIR / f"{FILE_PREFIX}{boot_id}-{label}"
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise SharedMemoryError(
                f"cannot reserve {nbytes / 2**20:.0f} MiB in {SHARED_MEMORY_DIR}: {error.strerror}; "
                "free some or make it larger (in Docker: --shm-size)"
            ) from error
        return cls(path, descriptor, nbytes)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


def remove_shared_files(boot_id: str) -> list[Path]:
    """Remove the files that the server with this boot id left in shared memory."""
    removed = sorted(SHARED_MEMORY_DIR.glob(f"{FILE_PREFIX}{boot_id}-*"))
    for path in removed:
        path.unlink(missing_ok=True)
    return removed


def sweep_stale_files() -> list[Path]:
    """Remove this user's shared files whose server has ended, in whatever way it ended."""
    candidates = sorted(SHARED_MEMORY_DIR.glob(f"{FILE_PREFIX}*"))
    return [path for path in candidates if _FILE_NAME.fullmatch(path.name) and _remove_if_unlocked(path)]


def _remove_if_unlocked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # another user's file, or one that has just been removed
        return False
    try:
        if os.fstat(descriptor).st_uid != os.getuid() or os.fstat(descriptor).st_size == 0:
            return False  # an empty file is being created at this moment
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
        return True
    except OSError:  # locked: its server is still running
        return False
    finally:
        os.close(descriptor)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamMapping:
    """One parameter of the server, under the server's own name for it."""

    ipc_handle: dict[str, Any]
    shape: list[int]
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """One block of shared memory; its handle is all that is needed to map it."""

    id: str
    handle: dict[str, Any]
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of a checkpoint tensor and the region of a storage that holds it. All counts are of elements."""

    storage: str
    offset: int
    shape: list[int]
    stride: list[int]
    source_offset: int
    source_shape: list[int]
    source_stride: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorMap:
    """The location of a checkpoint tensor in the storages; vocabulary padding is left out."""

    pieces: list[Piece]
    shape: list[int]
    dtype: str
