"""The store that `--store` names: a directory, `memory`, or a Redis."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from atropos_api.errors import DataDirectoryInUse, StoreUnusable
from atropos_api.store import redis_ledger
from atropos_api.store.base import BodyLog, Ledger
from atropos_api.store.directory import Fsync, open_directory
from atropos_api.store.failpoints import Reach, ignore_failpoint
from atropos_api.store.memory import MemoryBodyLog, MemoryLedger
from atropos_api.store.redis_ledger import RedisBodyLog, RedisLedger
from atropos_api.store.redis_session import RedisSession, is_redis

LEASE_SECONDS: Final = 10.0


def open_store(
    place: str,
    *,
    fsync: Fsync = "interval",
    fresh: bool = False,
    reach: Reach = ignore_failpoint,
    lease_seconds: float = LEASE_SECONDS,
) -> tuple[Ledger, BodyLog]:
    """Open the store at `place`: a directory, `memory`, or a Redis. `fresh` deletes its contents first."""
    if place == "memory":
        return MemoryLedger(), MemoryBodyLog()
    if is_redis(place):
        session = open_session(place, lease_seconds=lease_seconds)
        if not session.acquire():
            raise DataDirectoryInUse(f"{session.place} is in use by another broker ({session.holder()}); stop it first")
        return open_held(session, fresh=fresh)
    try:
        directory = Path(place).expanduser()
    except RuntimeError as error:
        raise StoreUnusable(f"--store {place}: {error}") from None
    return open_directory(directory, fsync=fsync, fresh=fresh, reach=reach)


def open_session(place: str, *, lease_seconds: float) -> RedisSession:
    """Return a session with a Redis that meets the durability checks; it does not hold the lease yet."""
    session = RedisSession(place, lease_seconds=lease_seconds)
    session.check_promises()
    return session


def open_held(session: RedisSession, *, fresh: bool) -> tuple[RedisLedger, RedisBodyLog]:
    """Return the store of a session that holds the lease."""
    if fresh:
        runs = session.term.ask("HKEYS", redis_ledger.METRIC_NAMES)
        metrics = [redis_ledger.METRICS.format(run_id=run_id.decode()) for run_id in runs]
        session.term.stage("DEL", *redis_ledger.NAMES, redis_ledger.BODIES, *metrics)
        session.term.apply()
    return RedisLedger(session.term), RedisBodyLog(session.term)


def needs_sync(place: str, fsync: Fsync) -> bool:
    """Return True if an answer has to wait until this process has forced its data to the disk."""
    return fsync == "always" and place != "memory" and not is_redis(place)
