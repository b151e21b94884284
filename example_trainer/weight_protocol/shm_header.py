"""Policy versions, and the shared-memory files that carry them between trainer and inference server.

A publish writes the tensors between two stamps in a header that both processes map. While the stamps differ the
tensors are a mixture of two versions and must not be read. The header lives in a file of its own, on a CPU and on a
GPU alike, so that the server can judge the state of the weights after a trainer has died.

Files are named after the server's boot id and locked by it for as long as it lives; a file that nobody
holds a lock on belonged to a server that is gone and may be removed by anybody.
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
    """A shared-memory file cannot be made, opened or understood."""


class WriteRefused(TrainerError):
    """The server does not wait for a write now: its lease has lapsed, or no publish was begun."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeaderState:
    """What the header says about the tensors: the last complete version, and whether a write is under way."""

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
        """From here to `end_write` the tensors are neither the old version nor the new one.

        A write that has begun may be begun again, to give it another version. Raises `WriteRefused` where the server
        does not stand still for it, and leaves the header as it was: torn, if a write broke off before.
        """
        before = self.state()
        if version <= before.write_end:
            raise ValueError(
                f"version {version} is not above {before.write_end}, the last one written; versions are never reused"
            )
        # Stamp first, ask then; the server forbids first and looks at the stamp then. So either this write is refused
        # or the server sees it: never does it read tensors that are being written.
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
        """The server's word on whether it stands still for a write."""
        self._store(32, int(allowed))

    def close(self) -> None:
        self._memory.close()

    def _store(self, offset: int, value: int) -> None:
        struct.pack_into("<q", self._memory, offset, value)

    def _load(self, offset: int) -> int:
        (value,) = struct.unpack_from("<q", self._memory, offset)
        return int(value)


class SharedFile:
    """One file in shared memory, private to this user, locked by the process that made it until that process ends."""

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
    """Remove what the server with this boot id left in shared memory."""
    removed = sorted(SHARED_MEMORY_DIR.glob(f"{FILE_PREFIX}{boot_id}-*"))
    for path in removed:
        path.unlink(missing_ok=True)
    return removed


def sweep_stale_files() -> list[Path]:
    """Remove this user's shared files whose server is gone, however it ended."""
    candidates = sorted(SHARED_MEMORY_DIR.glob(f"{FILE_PREFIX}*"))
    return [path for path in candidates if _FILE_NAME.fullmatch(path.name) and _remove_if_unlocked(path)]


def _remove_if_unlocked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # another user's, or gone already
        return False
    try:
        if os.fstat(descriptor).st_uid != os.getuid() or os.fstat(descriptor).st_size == 0:
            return False  # an empty one is being made at this moment
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
        return True
    except OSError:  # locked: its server lives
        return False
    finally:
        os.close(descriptor)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamMapping:
    """One parameter of the server, by the server's own name for it."""

    ipc_handle: dict[str, Any]
    shape: list[int]
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """One block of shared memory: its handle is all that is needed to map it."""

    id: str
    handle: dict[str, Any]
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of a checkpoint tensor: which of its elements lie where in a storage. All counts are of elements."""

    storage: str
    offset: int
    shape: list[int]
    stride: list[int]
    source_offset: int
    source_shape: list[int]
    source_stride: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorMap:
    """Where a checkpoint tensor lies; vocabulary padding is left out."""

    pieces: list[Piece]
    shape: list[int]
    dtype: str
