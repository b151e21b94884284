"""A file of records that are soon written elsewhere: cheap to append to, whole or absent after a crash.

A record is its length, its CRC-32, and the bytes. Reading ends at the first record that is not whole: only the last
append before a crash can be, and nobody was told that it was kept.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Final

from isal import isal_zlib

from atropos_api.errors import StoreUnavailable

HEADER: Final = struct.Struct("<II")


class Journal:
    """An append-only file that is emptied from time to time."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.size_bytes = os.fstat(self._descriptor).st_size

    def read(self) -> list[bytes]:
        data = os.pread(self._descriptor, self.size_bytes, 0)
        records = []
        place = 0
        while place + HEADER.size <= len(data):
            length, checksum = HEADER.unpack_from(data, place)
            record = data[place + HEADER.size : place + HEADER.size + length]
            # Power that fails may leave a file of its length and zeroes in it.
            if not record or len(record) != length or isal_zlib.crc32(record) != checksum:
                break
            records.append(record)
            place += HEADER.size + length
        return records

    def append(self, record: bytes) -> None:
        """The record is in the kernel's hands on return, or nothing of it is in the file."""
        data = HEADER.pack(len(record), isal_zlib.crc32(record)) + record
        try:
            written = os.write(self._descriptor, data)
        except OSError as error:
            raise StoreUnavailable(
                f"the store cannot be written ({error.strerror}); free space on its disk, nothing was kept"
            ) from error
        if written != len(data):
            os.ftruncate(self._descriptor, self.size_bytes)
            raise StoreUnavailable(f"the disk took {written} of {len(data)} bytes; free space on it, nothing was kept")
        self.size_bytes += len(data)

    def clear(self) -> None:
        os.ftruncate(self._descriptor, 0)
        self.size_bytes = 0

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class JournalPair:
    """Two files in turn: the records of one wait until the database that has them is safe, the other takes new ones."""

    def __init__(self, path: Path) -> None:
        self._both = (Journal(path), Journal(path.with_name(f"{path.name}-2")))
        self._active, self._waiting = self._both
        self._waits_for = 0

    @property
    def size_bytes(self) -> int:
        return sum(journal.size_bytes for journal in self._both)

    def read(self) -> list[bytes]:
        return [record for journal in self._both for record in journal.read()]

    def append(self, record: bytes) -> None:
        self._active.append(record)

    def turn(self, number: int) -> None:
        """The database has all records, of which the last is `number`; from then on that is safe, they may go."""
        if self._active.size_bytes and not self._waiting.size_bytes:
            self._active, self._waiting = self._waiting, self._active
            self._waits_for = number

    def forget(self, safe: int) -> None:
        """Records up to this number are safe in the database."""
        if self._waiting.size_bytes and safe >= self._waits_for:
            self._waiting.clear()

    def clear(self) -> None:
        for journal in self._both:
            journal.clear()

    def sync(self) -> None:
        """May be called from another thread."""
        for journal in self._both:
            if journal.size_bytes:
                journal.sync()

    def close(self) -> None:
        for journal in self._both:
            journal.close()
