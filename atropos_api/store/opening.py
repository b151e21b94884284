"""From the word on the command line to a store."""

from __future__ import annotations

from pathlib import Path

from atropos_api.store.base import BodyLog, Ledger
from atropos_api.store.directory import Fsync, open_directory
from atropos_api.store.memory import MemoryBodyLog, MemoryLedger


def open_store(place: str, *, fsync: Fsync = "interval", fresh: bool = False) -> tuple[Ledger, BodyLog]:
    """The store at `place`: a directory, or `memory`. `fresh` deletes what it holds first."""
    if place == "memory":
        return MemoryLedger(), MemoryBodyLog()
    return open_directory(Path(place).expanduser(), fsync=fsync, fresh=fresh)
