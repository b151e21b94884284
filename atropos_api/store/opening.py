"""From the word on the command line to a store."""

from __future__ import annotations

from pathlib import Path

from atropos_api.store.base import BodyLog, Ledger
from atropos_api.store.directory import Fsync, open_directory
from atropos_api.store.memory import MemoryBodyLog, MemoryLedger
from atropos_api.store.steps import Reach, pass_by


def open_store(
    place: str, *, fsync: Fsync = "interval", fresh: bool = False, reach: Reach = pass_by
) -> tuple[Ledger, BodyLog]:
    """The store at `place`: a directory, or `memory`. `fresh` deletes what it holds first."""
    if place == "memory":
        return MemoryLedger(), MemoryBodyLog()
    return open_directory(Path(place).expanduser(), fsync=fsync, fresh=fresh, reach=reach)
