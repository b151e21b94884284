"""A store in memory, lost when the process exits: for tests, and for runs that need no recovery (`--store memory`)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from atropos_api.errors import NoBackup
from atropos_api.store.backup import OpenSegment
from atropos_api.store.base import (
    NO_CHANGES,
    NO_RUN,
    Answers,
    BodyRef,
    EnvironmentRow,
    Event,
    GroupRow,
    KeyRow,
    MetricsRow,
    PolicyRow,
    RunRow,
    Snapshot,
)


class MemoryLedger:
    """Rows in dictionaries. They are the broker's own objects, so keeping them costs one reference each."""

    def __init__(self) -> None:
        self._runs: dict[str, RunRow] = {}
        self._environments: dict[int, EnvironmentRow] = {}
        self._policies: dict[tuple[str, int], PolicyRow] = {}
        self._keys: dict[int, KeyRow] = {}
        self._groups: dict[int, GroupRow] = {}
        self._next_seq = 1
        self._unanswered: set[int] = set()
        self._expected: dict[bytes, int] = {}
        self._metric_names: dict[str, list[str]] = {}
        self._metrics: dict[str, dict[int, MetricsRow]] = {}

    def load(self) -> Snapshot:
        return Snapshot(
            runs=list(self._runs.values()),
            environments=list(self._environments.values()),
            groups=list(self._groups.values()),
            keys=list(self._keys.values()),
            policies=list(self._policies.values()),
            events=[],
            next_seq=self._next_seq,
            unanswered=sorted(self._unanswered),
            expected=dict(self._expected),
        )

    @contextmanager
    def transaction(self) -> Iterator[None]:
        yield

    def put_run(self, row: RunRow) -> None:
        self._runs[row.run_id] = row

    def put_environment(self, row: EnvironmentRow) -> None:
        self._environments[row.environment_id] = row

    def put_policy(self, row: PolicyRow) -> None:
        self._policies[row.run_id, row.version] = row

    def put_key(self, row: KeyRow) -> None:
        self._keys[row.key_id] = row

    def forget_keys(self, key_ids: Sequence[int]) -> None:
        for key_id in key_ids:
            self._keys.pop(key_id, None)

    def add_event(self, event: Event) -> None:
        """Do nothing: no later process reads this store."""

    def add_groups(self, rows: Sequence[GroupRow], *, answers: Answers = NO_CHANGES) -> None:
        for row in rows:
            self._groups[row.seq] = row
            self._next_seq = max(self._next_seq, row.seq + 1)
            if not row.key_id:
                self._unanswered.add(row.seq)
        self.put_answers(answers)

    def add_submission(self, rows: Sequence[GroupRow], key: KeyRow | None, *, answers: Answers = NO_CHANGES) -> None:
        with self.transaction():
            self.add_groups(rows, answers=answers)
            if key is not None:
                self.put_key(key)

    def put_answers(self, answers: Answers) -> None:
        self._unanswered.difference_update(answers.answered)
        for fingerprint, count in answers.expected:
            self._expected[fingerprint] = count
            if not count:
                del self._expected[fingerprint]

    def probe(self) -> None:
        """Do nothing: memory accepts every write."""

    def assign_batch(self, seqs: Sequence[int], batch: int) -> None:
        for seq in seqs:
            self._groups[seq].batch = batch

    def adopt_groups(self, run_id: str) -> None:
        for row in self._groups.values():
            if row.run_id == NO_RUN:
                row.run_id = run_id

    def move_groups(self, places: Iterable[tuple[int, BodyRef]]) -> None:
        for seq, body in places:
            self._groups[seq].body = body

    def drop_groups(self, seqs: Sequence[int]) -> None:
        for seq in seqs:
            self._groups.pop(seq, None)

    def metric_names(self) -> dict[str, list[str]]:
        return dict(self._metric_names)

    def put_metric_names(self, run_id: str, names: Sequence[str]) -> None:
        self._metric_names[run_id] = list(names)

    def put_metrics(self, run_id: str, rows: Sequence[MetricsRow]) -> None:
        self._metrics.setdefault(run_id, {}).update((row.step, row) for row in rows)

    def metrics_after(self, run_id: str, step: int, limit: int) -> list[MetricsRow]:
        rows = self._metrics.get(run_id, {})
        steps = sorted(rows)
        first = bisect_right(steps, step)
        return [rows[at] for at in steps[first : first + limit]]

    def drop_metrics(self, run_id: str, first: int, last: int) -> None:
        rows = self._metrics.get(run_id, {})
        self._metrics[run_id] = {step: row for step, row in rows.items() if not first <= step <= last}

    def forget_metrics(self, run_id: str) -> None:
        self._metrics.pop(run_id, None)
        self._metric_names.pop(run_id, None)

    def dump(self) -> bytes:
        raise NoBackup("a store in memory has no files")

    def sync(self) -> None:
        """Do nothing: memory cannot be made more durable."""

    def close(self) -> None:
        """Do nothing: no resource is open."""


class MemoryBodyLog:
    """Bodies in a dictionary; a discarded body is freed at once."""

    def __init__(self) -> None:
        self._bodies: dict[int, bytes] = {}
        self._next_offset = 1
        self._size_bytes = 0

    def append(self, bodies: Sequence[bytes]) -> list[BodyRef]:
        refs = []
        for body in bodies:
            self._bodies[self._next_offset] = body
            refs.append(BodyRef(0, self._next_offset, len(body)))
            self._next_offset += 1
            self._size_bytes += len(body)
        return refs

    def read(self, refs: Sequence[BodyRef]) -> list[bytes]:
        return [self._bodies[ref.offset] for ref in refs]

    def discard(self, refs: Iterable[BodyRef]) -> None:
        for ref in refs:
            if self._bodies.pop(ref.offset, None) is not None:
                self._size_bytes -= ref.length

    def adopt(self, refs: Iterable[BodyRef]) -> list[BodyRef]:
        return [ref for ref in refs if ref.offset not in self._bodies]

    def sparse_segments(self) -> list[int]:
        return []

    def sync(self) -> None:
        """Do nothing: memory cannot be made more durable."""

    def is_safe(self, refs: Iterable[BodyRef]) -> bool:  # noqa: ARG002 - the protocol's form
        return True

    def open_all(self) -> list[OpenSegment]:
        raise NoBackup("a store in memory has no files")

    def size_bytes(self) -> int:
        return self._size_bytes

    def close(self) -> None:
        """Do nothing: no resource is open."""
