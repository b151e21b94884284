"""A backup of a directory store while its broker works: a tar of the ledger and of all segments that it points at.

The ledger is copied and the segments are opened between two calls, so they belong together. Segments are only appended
to, and one that is deleted meanwhile can still be read by those who have it open. An unpacked backup is a store: the
ledger and `segments/`, without the mark of what was forced to the disk, so that the first start reads all bodies.
"""

from __future__ import annotations

import os
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from atropos_api.errors import StoreDamaged

PIECE_BYTES: Final = 1 << 20
LEDGER_NAME: Final = "ledger.sqlite"


@dataclass(frozen=True, slots=True)
class OpenSegment:
    """A segment file that stays readable: its name below the store, its size when it was opened, and its descriptor."""

    name: str
    size_bytes: int
    descriptor: int


class Backup:
    """A store as it was at one moment. Read `pieces` once, then `close`."""

    def __init__(self, ledger: bytes, segments: Sequence[OpenSegment]) -> None:
        self._ledger = ledger
        self._segments = segments
        self._made_at = time.time()

    @property
    def size_bytes(self) -> int:
        """The size of the tar."""
        sizes = [len(self._ledger), *(segment.size_bytes for segment in self._segments)]
        return sum(tarfile.BLOCKSIZE + _padded(size) for size in sizes) + 2 * tarfile.BLOCKSIZE

    def pieces(self) -> Iterator[bytes]:
        """Yield the tar, piece by piece; may be called from another thread."""
        yield self._header(LEDGER_NAME, len(self._ledger))
        for start in range(0, len(self._ledger), PIECE_BYTES):
            yield self._ledger[start : start + PIECE_BYTES]
        yield _padding(len(self._ledger))
        for segment in self._segments:
            yield self._header(segment.name, segment.size_bytes)
            for start in range(0, segment.size_bytes, PIECE_BYTES):
                wanted = min(PIECE_BYTES, segment.size_bytes - start)
                piece = os.pread(segment.descriptor, wanted, start)
                if len(piece) != wanted:
                    raise StoreDamaged(
                        f"{segment.name} ends before byte {segment.size_bytes}; nothing of it is backed up"
                    )
                yield piece
            yield _padding(segment.size_bytes)
        yield bytes(2 * tarfile.BLOCKSIZE)

    def close(self) -> None:
        for segment in self._segments:
            os.close(segment.descriptor)
        self._segments = ()

    def _header(self, name: str, size_bytes: int) -> bytes:
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode, entry.mtime = size_bytes, 0o600, int(self._made_at)
        return entry.tobuf(tarfile.USTAR_FORMAT)


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _padding(size_bytes: int) -> bytes:
    return bytes(_padded(size_bytes) - size_bytes)
