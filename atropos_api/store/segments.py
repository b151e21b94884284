"""The log of bodies: append-only segment files of records, each with its length and checksum.

A record is a magic word, the body's length, its CRC-32, and the body. Each process writes its own segments and never
appends to an older one, so a record torn by a crash is never read: no row points at it. Segments that are not known to
have been forced to the disk (`ForcedMark`, a file of one number next to them) are read and checked in full when a
process starts, because a power failure may have damaged any part of them.

A segment without live bodies is deleted. If data is forced to the disk, the file is kept until the ledger that no
longer points at it is on the disk (`sweep`): after a power failure before that, the rows may have their old positions.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from isal import isal_zlib

from atropos_api.common.files import sync_path
from atropos_api.errors import StoreDamaged, StoreUnavailable
from atropos_api.store.backup import OpenSegment
from atropos_api.store.base import BodyRef
from atropos_api.store.disk import PASSING, ForcedMark, not_forced, unavailable
from atropos_api.store.failpoints import Failpoint, Reach, ignore_failpoint

logger = logging.getLogger(__name__)

HEADER: Final = struct.Struct("<4sII")
MAGIC: Final = b"ATR1"
SEGMENT_BYTES: Final = 64 * 2**20
SPARSE_FRACTION: Final = 0.25
OPEN_FILES: Final = 32
VECTOR_LIMIT: Final = 512
READ_BYTES: Final = 1 << 18
"""Most bytes of bodies read in one call; larger bodies would be copied without any gain."""


@dataclass(slots=True)
class _Segment:
    path: Path
    size_bytes: int
    live_bytes: int = 0
    live_count: int = 0
    inode: tuple[int, int] | None = None
    """Device and inode number of the file; None for a segment of an earlier process."""


class SegmentLog:
    """Bodies in files of `segment_bytes` in one directory. `syncs`: True if the owner calls `sync`, then `sweep`."""

    def __init__(
        self,
        directory: Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        syncs: bool = False,
        reach: Reach = ignore_failpoint,
    ) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._syncs = syncs
        self._reach = reach
        directory.mkdir(parents=True, exist_ok=True)
        paths = [path for path in directory.glob("*.log") if path.stem.isdigit()]
        self._segments = {int(path.stem): _Segment(path, path.stat().st_size) for path in paths}
        self._forced = ForcedMark(directory)
        # A new segment with a number that was forced before, of one deleted since, would count as forced itself.
        self._last_number = max([self._forced.number, *self._segments])
        self._readers: OrderedDict[int, int] = OrderedDict()
        self._active = 0
        self._active_fd = -1
        # `_lock` guards what the syncing and the writing thread share; `_sync_turn` admits one sync at a time.
        self._lock = threading.Lock()
        self._sync_turn = threading.Lock()
        self._sealed: list[int] = []
        self._directory_changed = syncs
        self._safe_until = (self._last_number, 0)
        self._adopted = False
        self._doomed: list[Path] = []
        self._removable: list[Path] = []
        self._sync_failure: str | None = None
        if syncs:
            # An earlier process may have ended before it forced these to the disk.
            for path in paths:
                sync_path(path)

    def append(self, bodies: Sequence[bytes]) -> list[BodyRef]:
        """Write bodies with one system call where possible; on return the kernel has all of them."""
        self._refuse_after_failed_sync()
        segment = self._writable()
        offset = segment.size_bytes
        pieces: list[bytes] = []
        refs = []
        for body in bodies:
            pieces += (HEADER.pack(MAGIC, len(body), isal_zlib.crc32(body)), body)
            refs.append(BodyRef(self._active, offset + HEADER.size, len(body)))
            offset += HEADER.size + len(body)
        size = offset - segment.size_bytes
        self._write(segment, pieces, size)
        segment.size_bytes = offset
        segment.live_count += len(bodies)
        segment.live_bytes += size - HEADER.size * len(bodies)
        return refs

    def read(self, refs: Sequence[BodyRef]) -> list[bytes]:
        try:
            return [body for run in _runs(refs) for body in self._read_run(run)]
        except StoreDamaged as error:
            damaged = [ref for ref in refs if not self._is_there(ref, whole=True)]
            raise StoreDamaged(str(error), refs=damaged) from error

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
        # Segments not forced to the disk may be cut short or have holes; the others are checked when they are read. A
        # log that is never forced promises nothing after a power failure, so only its last two segments are read whole.
        unforced = self._forced.number + 1 if self._syncs else max(self._segments, default=0) - 1
        for segment in self._segments.values():
            segment.live_count = segment.live_bytes = 0
        lost = []
        for ref in refs:
            if not self._is_there(ref, whole=ref.segment >= unforced):
                lost.append(ref)
                continue
            segment = self._segments[ref.segment]
            segment.live_count += 1
            segment.live_bytes += ref.length
        for number, segment in list(self._segments.items()):
            if segment.live_count == 0 and number != self._active:
                self._remove(number)
        self._adopted = True
        return lost

    def sparse_segments(self) -> list[int]:
        return [
            number
            for number, segment in self._segments.items()
            if number != self._active and segment.live_bytes < SPARSE_FRACTION * segment.size_bytes
        ]

    def sync(self) -> None:
        """Force what was appended to the disk; may be called from another thread."""
        if not self._syncs:
            return
        with self._sync_turn:
            self._refuse_after_failed_sync()  # after a failed sync, the next one may succeed without its data
            with self._lock:
                active = self._duplicate_active()
                sealed, self._sealed = self._sealed, []
                directory_changed, self._directory_changed = self._directory_changed, False
                self._removable, self._doomed = self._removable + self._doomed, []
                segment = self._segments.get(self._active)
                reached = (self._active, segment.size_bytes if segment is not None else 0)
            self._force(sealed, active, directory_changed=directory_changed)
            self._safe_until = max(self._safe_until, reached)
            if self._adopted:  # `adopt` found earlier processes' bodies whole, or no row points at them
                self._forced.note(reached[0] - 1)
        self._reach(Failpoint.BODIES_SYNCED)

    def is_safe(self, refs: Iterable[BodyRef]) -> bool:
        return not self._syncs or all((ref.segment, ref.offset + ref.length) <= self._safe_until for ref in refs)

    def removable(self) -> list[Path]:
        """Return the files that were dead when the last sync began."""
        with self._lock:
            return list(self._removable)

    def sweep(self, paths: Sequence[Path]) -> None:
        """Delete those of these files that are removable, after a sync of the ledger that began when they were."""
        with self._lock:
            removable = [path for path in self._removable if path in paths]
            self._removable = [path for path in self._removable if path not in paths]
        left = [path for path in removable if not self._delete(path)]
        with self._lock:
            self._removable += left  # the next call tries again

    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self._segments.values())

    def open_all(self) -> list[OpenSegment]:
        opened: list[OpenSegment] = []
        try:
            for _, segment in sorted(self._segments.items()):
                descriptor = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
                name = f"{self._directory.name}/{segment.path.name}"
                opened.append(OpenSegment(name, segment.size_bytes, descriptor))
        except OSError as error:
            for one in opened:
                os.close(one.descriptor)
            raise StoreUnavailable(f"{error.filename} cannot be opened ({error.strerror}); try again later") from error
        return opened

    def close(self) -> None:
        for descriptor in self._readers.values():
            os.close(descriptor)
        self._readers.clear()
        with self._sync_turn, self._lock:
            for descriptor in (*self._sealed, self._active_fd):
                if descriptor >= 0:
                    os.close(descriptor)
            self._sealed, self._active_fd = [], -1

    def _writable(self) -> _Segment:
        segment = self._segments.get(self._active)
        is_open = segment is not None and self._active_fd >= 0 and segment.size_bytes < self._segment_bytes
        if segment is not None and is_open and self._is_in_place(segment):
            return segment
        number = self._last_number + 1
        path = self._directory / f"{number:010d}.log"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise unavailable(error) from error
        made = os.fstat(descriptor)
        self._seal_active()
        with self._lock:
            self._active, self._active_fd, self._directory_changed = number, descriptor, True
        self._last_number = number
        self._segments[number] = _Segment(path, 0, inode=(made.st_dev, made.st_ino))
        self._reach(Failpoint.SEGMENT_BEGUN)
        return self._segments[number]

    def _is_in_place(self, segment: _Segment) -> bool:
        """Return False if someone has removed, replaced or cut the active segment: nothing written to it would last."""
        try:
            found = os.stat(segment.path)  # noqa: PTH116 - three times as fast, at each append
        except OSError:
            found = None
        if found is not None and found.st_size == segment.size_bytes and (found.st_dev, found.st_ino) == segment.inode:
            return True
        logger.error("%s was removed, replaced or cut by someone else; its groups are lost", segment.path)
        return False

    def _seal_active(self) -> None:
        """Stop writing to the active segment; its descriptor stays open until the next sync has covered it."""
        if self._active_fd < 0:
            return
        with self._lock:
            if self._syncs:
                self._sealed.append(self._active_fd)
            else:
                os.close(self._active_fd)
            self._active_fd = -1
        if self._segments[self._active].live_count == 0:
            self._remove(self._active)

    def _duplicate_active(self) -> list[int]:
        """Return a descriptor of the active segment for the syncing thread: the writer may close its own meanwhile."""
        try:
            return [os.dup(self._active_fd)] if self._active_fd >= 0 else []
        except OSError as error:
            raise self.note_failed_sync(error) from error

    def _force(self, sealed: list[int], active: list[int], *, directory_changed: bool) -> None:
        try:
            for descriptor in (*sealed, *active):
                os.fdatasync(descriptor)
            if directory_changed:
                sync_path(self._directory)
        except OSError as error:
            with self._lock:
                self._sealed += sealed
                self._directory_changed |= directory_changed
            raise self.note_failed_sync(error) from error
        else:
            for descriptor in sealed:
                os.close(descriptor)
        finally:
            for descriptor in active:
                os.close(descriptor)

    def _refuse_after_failed_sync(self) -> None:
        if self._sync_failure is not None:
            raise StoreUnavailable(self._sync_failure)

    def note_failed_sync(self, error: OSError) -> StoreUnavailable:
        """Return the error for a failed sync; unless the disk or a table of files is full, refuse all further writes.

        Either may have room again. After any other failure the kernel may have dropped the data that it could not
        write, and a second sync would succeed without it, so all writes are refused until a new process has read
        what the disk has.
        """
        if error.errno in PASSING:
            return not_forced(error)
        self._sync_failure = (
            f"the disk failed to keep data that it had accepted ({error.strerror}); repair it and restart the broker, "
            "which then drops the lost groups and accepts them again if clients repeat them"
        )
        logger.error("%s", self._sync_failure)
        return StoreUnavailable(self._sync_failure)

    def _write(self, segment: _Segment, pieces: Sequence[bytes], size: int) -> None:
        try:
            written = 0
            for start in range(0, len(pieces), VECTOR_LIMIT):
                written += os.writev(self._active_fd, pieces[start : start + VECTOR_LIMIT])
        except OSError as error:
            self._cut_back(segment)
            raise unavailable(error, size) from error
        if written != size:
            self._cut_back(segment)
            raise StoreUnavailable(
                f"the disk took {written} of {size} bytes; free space on it, nothing was kept", refused_bytes=size
            )
        self._reach(Failpoint.BODIES_WRITTEN)

    def _cut_back(self, segment: _Segment) -> None:
        """Cut a torn record off the end of the active segment; if even that fails, stop writing to the segment."""
        try:
            os.ftruncate(self._active_fd, segment.size_bytes)
        except OSError as error:
            logger.warning("%s: an incomplete record remains at its end (%s)", segment.path, error.strerror)
            self._seal_active()

    def _read_run(self, run: Sequence[BodyRef]) -> Iterator[bytes]:
        """Yield the bodies of adjacent records, read in one call."""
        first, last = run[0], run[-1]
        segment = self._segments.get(first.segment)
        if segment is None:
            raise StoreDamaged(f"{self._directory}: segment {first.segment} is missing")
        begin = first.offset - HEADER.size
        try:
            data = os.pread(self._reader(first.segment), last.offset + last.length - begin, begin)
        except OSError as error:
            if error.errno in PASSING:  # the bodies are there, and must not be given up as damaged
                raise unavailable(error) from error
            raise StoreDamaged(f"{segment.path}: byte {first.offset} cannot be read ({error.strerror})") from error
        for ref in run:
            start = ref.offset - begin
            body = data[start : start + ref.length]
            if data[start - HEADER.size : start] != HEADER.pack(MAGIC, ref.length, isal_zlib.crc32(body)):
                raise StoreDamaged(f"{segment.path}: the record at byte {ref.offset} does not match its checksum")
            yield body

    def _is_there(self, ref: BodyRef, *, whole: bool) -> bool:
        segment = self._segments.get(ref.segment)
        if segment is None or ref.offset + ref.length > segment.size_bytes:
            return False
        if not whole:
            return True
        try:
            list(self._read_run([ref]))
        except StoreDamaged:
            return False
        return True

    def _reader(self, number: int) -> int:
        if number == self._active and self._active_fd >= 0:
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
        path = self._segments.pop(number).path
        if self._syncs:
            with self._lock:
                self._doomed.append(path)
        else:
            self._delete(path)

    def _delete(self, path: Path) -> bool:
        """Delete a dead segment; if the system refuses, return False: the next start deletes what is left."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s holds nothing that is needed and cannot be deleted (%s)", path, error.strerror)
            return False
        self._reach(Failpoint.SEGMENT_REMOVED)
        return True


def _runs(refs: Sequence[BodyRef]) -> Iterator[Sequence[BodyRef]]:
    """Split `refs`, in order, into runs of adjacent small records that are read in one call.

    A call for each would cost more than the records themselves.
    """
    start = size = 0
    for index, ref in enumerate(refs):
        former = refs[index - 1]
        follows = (former.segment, former.offset + former.length + HEADER.size) == (ref.segment, ref.offset)
        if index > start and (not follows or size + ref.length > READ_BYTES):
            yield refs[start:index]
            start, size = index, 0
        size += ref.length
    if refs:
        yield refs[start:]
