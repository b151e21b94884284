"""The log of bodies: append-only files of records, each with its length and checksum.

A record is a magic word, the body's length, its CRC-32, and the body. Each process writes segments of its own and never
touches the tail of an older one, so a tail torn by a crash is simply never read: no row points into it. A segment goes
when nothing in it is alive.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from isal import isal_zlib

from atropos_api.errors import StoreDamaged, StoreUnavailable
from atropos_api.store.base import BodyRef

logger = logging.getLogger(__name__)

HEADER: Final = struct.Struct("<4sII")
MAGIC: Final = b"ATR1"
SEGMENT_BYTES: Final = 64 * 2**20
SPARSE_FRACTION: Final = 0.25
OPEN_FILES: Final = 32
VECTOR_LIMIT: Final = 512


@dataclass(slots=True)
class _Segment:
    path: Path
    size_bytes: int
    live_bytes: int = 0
    live_count: int = 0


class SegmentLog:
    """Bodies in files of `segment_bytes` under one directory."""

    def __init__(self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        directory.mkdir(parents=True, exist_ok=True)
        self._segments = {int(path.stem): _Segment(path, path.stat().st_size) for path in directory.glob("*.log")}
        self._readers: OrderedDict[int, int] = OrderedDict()
        self._active = 0
        self._active_fd = -1
        # A sync in another thread must not see its descriptor closed.
        self._sync_lock = threading.Lock()
        self._new_file = False

    def append(self, bodies: Sequence[bytes]) -> list[BodyRef]:
        """Write bodies with one system call where possible; all of them are in the kernel's hands on return."""
        segment = self._writable()
        offset = segment.size_bytes
        pieces: list[bytes] = []
        refs = []
        for body in bodies:
            pieces += (HEADER.pack(MAGIC, len(body), isal_zlib.crc32(body)), body)
            refs.append(BodyRef(self._active, offset + HEADER.size, len(body)))
            offset += HEADER.size + len(body)
        self._write(segment, pieces, offset - segment.size_bytes)
        segment.size_bytes = offset
        segment.live_count += len(bodies)
        segment.live_bytes += sum(ref.length for ref in refs)
        return refs

    def read(self, refs: Sequence[BodyRef]) -> list[bytes]:
        return [self._read_one(ref) for ref in refs]

    def discard(self, refs: Iterable[BodyRef]) -> None:
        for ref in refs:
            segment = self._segments.get(ref.segment)
            if segment is None:
                continue
            segment.live_count -= 1
            segment.live_bytes -= ref.length
            if segment.live_count == 0 and ref.segment != self._active:
                self._remove(ref.segment)

    def adopt(self, refs: Iterable[BodyRef]) -> list[BodyRef]:
        newest = max(self._segments, default=0)
        for segment in self._segments.values():
            segment.live_count = segment.live_bytes = 0
        lost = []
        for ref in refs:
            # Only the newest segment can have been cut short by a loss of power; older ones are checked when read.
            if not self._is_there(ref, whole=ref.segment == newest):
                lost.append(ref)
                continue
            segment = self._segments[ref.segment]
            segment.live_count += 1
            segment.live_bytes += ref.length
        for number, segment in list(self._segments.items()):
            if segment.live_count == 0 and number != self._active:
                self._remove(number)
        return lost

    def sparse_segments(self) -> list[int]:
        return [
            number
            for number, segment in self._segments.items()
            if number != self._active and segment.live_bytes < SPARSE_FRACTION * segment.size_bytes
        ]

    def sync(self) -> None:
        """Force what was appended to the disk; may be called from another thread."""
        with self._sync_lock:
            if self._active_fd >= 0:
                self._sync_active()

    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self._segments.values())

    def close(self) -> None:
        for descriptor in self._readers.values():
            os.close(descriptor)
        self._readers.clear()
        with self._sync_lock:
            if self._active_fd >= 0:
                os.close(self._active_fd)
                self._active_fd = -1

    def _writable(self) -> _Segment:
        segment = self._segments.get(self._active)
        if segment is not None and segment.size_bytes < self._segment_bytes:
            return segment
        number = max(self._segments, default=0) + 1
        path = self._directory / f"{number:010d}.log"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise _unavailable(error) from error
        self._seal_active()
        self._active, self._active_fd, self._new_file = number, descriptor, True
        self._segments[number] = _Segment(path, 0)
        return self._segments[number]

    def _sync_active(self) -> None:
        os.fdatasync(self._active_fd)
        if self._new_file:
            self._new_file = False
            directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            os.fsync(directory)
            os.close(directory)

    def _seal_active(self) -> None:
        """Later syncs reach only the active segment, so this one is made safe before it is left."""
        if self._active_fd < 0:
            return
        with self._sync_lock:
            self._sync_active()
            os.close(self._active_fd)
            self._active_fd = -1
        if self._segments[self._active].live_count == 0:
            self._remove(self._active)

    def _write(self, segment: _Segment, pieces: Sequence[bytes], size: int) -> None:
        try:
            written = 0
            for start in range(0, len(pieces), VECTOR_LIMIT):
                written += os.writev(self._active_fd, pieces[start : start + VECTOR_LIMIT])
        except OSError as error:
            os.ftruncate(self._active_fd, segment.size_bytes)
            raise _unavailable(error) from error
        if written != size:
            os.ftruncate(self._active_fd, segment.size_bytes)
            raise StoreUnavailable(f"the disk took {written} of {size} bytes; free space on it, nothing was kept")

    def _read_one(self, ref: BodyRef) -> bytes:
        data = os.pread(self._reader(ref.segment), HEADER.size + ref.length, ref.offset - HEADER.size)
        body = data[HEADER.size :]
        if data[: HEADER.size] != HEADER.pack(MAGIC, ref.length, isal_zlib.crc32(body)):
            path = self._segments[ref.segment].path
            raise StoreDamaged(f"{path}: the record at byte {ref.offset} does not match its checksum")
        return body

    def _is_there(self, ref: BodyRef, *, whole: bool) -> bool:
        segment = self._segments.get(ref.segment)
        if segment is None or ref.offset + ref.length > segment.size_bytes:
            return False
        if not whole:
            return True
        try:
            self._read_one(ref)
        except StoreDamaged:
            return False
        return True

    def _reader(self, number: int) -> int:
        if number == self._active:
            return self._active_fd
        descriptor = self._readers.get(number)
        if descriptor is None:
            if len(self._readers) >= OPEN_FILES:
                os.close(self._readers.popitem(last=False)[1])
            descriptor = os.open(self._segments[number].path, os.O_RDONLY | os.O_CLOEXEC)
            self._readers[number] = descriptor
        self._readers.move_to_end(number)
        return descriptor

    def _remove(self, number: int) -> None:
        descriptor = self._readers.pop(number, None)
        if descriptor is not None:
            os.close(descriptor)
        self._segments.pop(number).path.unlink(missing_ok=True)


def _unavailable(error: OSError) -> StoreUnavailable:
    return StoreUnavailable(f"the store cannot be written ({error.strerror}); free space on its disk, nothing was kept")
