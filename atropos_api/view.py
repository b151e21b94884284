"""The live page over a run that has ended, for `atropos view`: a broker over a copy of the run's store.

The store itself is only read, whereas a broker changes a store that it opens. The page's calls are answered from the
copy, to which is added what the run's files hold and the store has forgotten: the newest trained groups, and the
metrics of a run whose broker was elsewhere. All other calls are refused, and with them all that change something.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from atropos_api.broker import Broker
from atropos_api.common.errors import AtroposError
from atropos_api.config import BrokerConfig
from atropos_api.errors import DataDirectoryInUse
from atropos_api.http.auth import AcceptedToken
from atropos_api.server.app import BrokerApp, create_app
from atropos_api.server.serve import BrokerServer, bind
from atropos_api.store.base import LOST, GroupRow
from atropos_api.store.factory import open_store
from atropos_api.wire.messages import RunRequest
from atropos_api.wire.reports import MOST_STEPS_A_REPORT, HealthSign, RunReport, StepMetrics, TokenReport

LOOPBACK: Final = "127.0.0.1"
PAGE_CALLS: Final = re.compile(r"/|/page/.*|/health|/livez|/readyz|/v1/status|/v1/events(/recent)?|/v1/runs(/.*)?")
MOST_RECENT_BYTES: Final = 256 * 2**20
LEDGER: Final = "ledger.sqlite"
SEGMENT_SUFFIX: Final = ".log"
FIRST_SEQ: Final = -(2**40)
"""`seq` of the first recorded group of a batch: negative, because those of the store are positive."""


class StoreNotCopied(AtroposError):
    """The page needs a copy of the store, and it cannot be made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedBatch:
    """Groups of a batch that were trained, by their index in it, and the trainer's values of their tokens."""

    run_id: str
    number: int
    groups: Mapping[int, Mapping[str, Any]]
    """The fields of each group, as a submission has them."""
    values: TokenReport
    time: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun:
    """A run as recorded in the files of its directory."""

    name: str
    num_steps: int
    steps: Sequence[StepMetrics] = ()
    signs: Sequence[HealthSign] = ()
    batches: Sequence[RecordedBatch] = field(default_factory=tuple)
    """The oldest first."""


def serve_view(store: Path | None, recorded: RecordedRun, scratch: Path, *, port: int = 0) -> Iterator[str]:
    """Yield the page's address once it listens, then serve it until a signal comes; `store` is copied to `scratch`."""
    with bind(LOOPBACK, port) as listener, opened_view(store, recorded, scratch) as app:
        yield f"http://{LOOPBACK}:{listener.getsockname()[1]}/"
        BrokerServer(app, app.context.config, app.context.stop).run(sockets=[listener])


@contextmanager
def opened_view(store: Path | None, recorded: RecordedRun, scratch: Path) -> Iterator[BrokerApp]:
    """Provide the application that answers the page's calls, and no others."""
    place = "memory" if store is None else str(copy_store(store, scratch / "store"))
    config = BrokerConfig(store=place, fsync="never", recent_bytes=MOST_RECENT_BYTES)
    ledger, bodies = open_store(place, fsync="never")
    broker = Broker(ledger, bodies, settings=config)
    try:
        add_recorded(broker, recorded)
        broker.state.ended = True
        yield create_app(config, broker, AcceptedToken(), only=PAGE_CALLS)
    finally:
        broker.close()


def has_store(place: Path) -> bool:
    """Return True if a broker has kept its store in this directory."""
    return (place / LEDGER).is_file()


def copy_store(place: Path, copy: Path) -> Path:
    """Copy the store of a broker that has ended; raises `DataDirectoryInUse` if one still works on it."""
    lock = place / "lock"
    if lock.exists():
        with lock.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = file.read().decode("utf-8", "replace").strip()
                raise DataDirectoryInUse(
                    f"{place} is in use by a broker (pid {pid or 'unknown'}), so its run has not ended; open the page "
                    "of that broker, whose address the launcher and its log tell"
                ) from None
            return _copied(place, copy)
    return _copied(place, copy)


def _copied(place: Path, copy: Path) -> Path:
    try:
        _require_room(place, copy)
        ignored = shutil.ignore_patterns("lock", "*-shm")
        shutil.copytree(place, copy, ignore=ignored, copy_function=_link_or_copy)
    except OSError as error:
        reason = error.strerror or error.args[0][0][-1]  # `copytree` raises a list of (source, target, reason)
        raise StoreNotCopied(
            f"the page needs a copy of {place}, which cannot be made in {copy.parent} ({reason}); if it has no room, "
            "name a folder on the run's own disk by TMPDIR=FOLDER, where the groups are linked and take none"
        ) from error
    return copy


def _require_room(place: Path, copy: Path) -> None:
    """Raise an `OSError` before anything is copied: a full disk would fail other programs, too."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    is_linked = place.stat().st_dev == copy.parent.stat().st_dev
    sizes = [path.stat().st_size for path in place.rglob("*") if not (is_linked and path.suffix == SEGMENT_SUFFIX)]
    if sum(sizes) > shutil.disk_usage(copy.parent).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _link_or_copy(source: str, target: str) -> object:
    """Link a segment, which no broker writes to once the one that made it has ended; copy other files."""
    if source.endswith(SEGMENT_SUFFIX):
        with suppress(OSError):  # it is on another file system, on one without links, or another user's
            os.link(source, target)
            return target
    return shutil.copy2(source, target)


def add_recorded(broker: Broker, recorded: RecordedRun) -> None:
    """Add to a broker what it does not know of the run: metrics and signs if it has none, and trained groups."""
    runs = broker.state.runs.all()
    run_id = runs[-1].run_id if runs else _begun(broker, recorded)
    if not broker.metrics.has(run_id):
        for start in range(0, len(recorded.steps), MOST_STEPS_A_REPORT):
            steps = list(recorded.steps[start : start + MOST_STEPS_A_REPORT])
            broker.reports.take_run(run_id, RunReport(steps=steps))
        broker.reports.take_run(run_id, RunReport(signs=list(recorded.signs)))
    if not runs:
        broker.finish_run(run_id)
    known = {row.run_id for row in broker.state.runs.all()}
    kept = broker.state.batches.keys() | broker.state.replayable.keys()
    for batch in recorded.batches:
        owner = batch.run_id if batch.run_id in known else run_id
        open_run = broker.state.runs.open
        if open_run is None or open_run.run_id != owner or batch.number not in kept:
            _add_batch(broker, owner, batch)


def _begun(broker: Broker, recorded: RecordedRun) -> str:
    last = recorded.steps[-1].step if recorded.steps else 0
    request = RunRequest(
        name=recorded.name,
        batch_size=1,
        max_token_length=0,
        num_steps=recorded.num_steps,
        resume=True,
        resume_from_batch=last,
    )
    return broker.begin_run(request).run_id


def _add_batch(broker: Broker, run_id: str, batch: RecordedBatch) -> None:
    rows = [_row(run_id, batch, index) for index in range(max(batch.groups, default=-1) + 1)]
    bodies = [msgspec.json.encode(batch.groups[index]) for index in sorted(batch.groups)]
    broker.recent.add({batch.number: rows}, [rows[index] for index in sorted(batch.groups)], bodies, time.time())
    broker.recent.add_report(run_id, batch.number, 0, msgspec.json.encode(batch.values))


def _row(run_id: str, batch: RecordedBatch, index: int) -> GroupRow:
    """Return the row of a group; one that was not recorded keeps its place in the batch, with no content."""
    fields = batch.groups.get(index, {})
    tokens = fields.get("tokens") or []
    versions = [span[2] for spans in fields.get("policy_versions") or () for span in spans if span[2] is not None]
    return GroupRow(
        seq=FIRST_SEQ + index,
        run_id=run_id,
        env_id=fields.get("env_id"),
        size=len(tokens),
        token_count=sum(map(len, tokens)),
        body=LOST,
        received_version=fields.get("received_version"),
        oldest_version=min(versions, default=None),
        arrived_at=batch.time,
        batch=batch.number,
    )
