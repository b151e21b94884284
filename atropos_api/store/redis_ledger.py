"""The ledger and the log of bodies in Redis: a hash for each kind of row, and one hash of numbered bodies.

Every transaction is one script. Bodies are written together with the rows that point at them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, TypeVar

import msgspec

from atropos_api.errors import NoBackup, StoreDamaged, StoreUnavailable
from atropos_api.store.backup import OpenSegment
from atropos_api.store.base import (
    KEPT_EVENTS,
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
from atropos_api.store.redis_session import RedisTerm

RUNS: Final = "atropos:runs"
ENVIRONMENTS: Final = "atropos:environments"
POLICIES: Final = "atropos:policies"
KEYS: Final = "atropos:keys"
GROUPS: Final = "atropos:groups"
PLACES: Final = "atropos:places"
EVENTS: Final = "atropos:events"
UNANSWERED: Final = "atropos:unanswered"
EXPECTED: Final = "atropos:expected"
METRIC_NAMES: Final = "atropos:metric-names"
METRICS: Final = "atropos:metrics:{run_id}"
"""A sorted set for each run: its rows by step."""
NAMES: Final = (RUNS, ENVIRONMENTS, POLICIES, KEYS, GROUPS, PLACES, EVENTS, UNANSWERED, EXPECTED, METRIC_NAMES)
RowT = TypeVar("RowT")

_encoder = msgspec.json.Encoder()


class RedisLedger:
    """Rows as JSON. Groups are also kept in memory, because a change of one is written as the whole row."""

    def __init__(self, term: RedisTerm) -> None:
        self._term = term
        self._groups: dict[int, GroupRow] = {}
        self._added: list[int] = []
        self._depth = 0

    def load(self) -> Snapshot:
        places = {name.decode(): int(value) for name, value in self._term.ask("HGETALL", PLACES).items()}
        groups = sorted(self._read(GROUPS, GroupRow), key=lambda row: row.seq)
        self._groups = {row.seq: row for row in groups}
        return Snapshot(
            runs=self._read(RUNS, RunRow),
            environments=sorted(self._read(ENVIRONMENTS, EnvironmentRow), key=lambda row: row.environment_id),
            groups=groups,
            keys=sorted(self._read(KEYS, KeyRow), key=lambda row: row.key_id),
            events=[msgspec.json.decode(event, type=Event) for event in self._term.ask("LRANGE", EVENTS, 0, -1)],
            policies=sorted(self._read(POLICIES, PolicyRow), key=lambda row: row.version),
            next_seq=places.get("next_seq", 1),
            unanswered=sorted(int(seq) for seq in self._term.ask("SMEMBERS", UNANSWERED)),
            expected={fingerprint: int(count) for fingerprint, count in self._term.ask("HGETALL", EXPECTED).items()},
        )

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Keep all writes or none; a transaction inside another is a part of it."""
        before = self._term.staged
        self._depth += 1
        try:
            yield
            if self._depth == 1:
                self._term.apply()
        except BaseException:
            self._term.unstage(before)
            for seq in self._added:
                self._groups.pop(seq, None)
            raise
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._added.clear()

    def put_run(self, row: RunRow) -> None:
        self._put(RUNS, row.run_id, row)

    def put_environment(self, row: EnvironmentRow) -> None:
        self._put(ENVIRONMENTS, row.environment_id, row)

    def put_policy(self, row: PolicyRow) -> None:
        self._put(POLICIES, f"{row.run_id}:{row.version}", row)

    def put_key(self, row: KeyRow) -> None:
        self._put(KEYS, row.key_id, row)

    def forget_keys(self, key_ids: Sequence[int]) -> None:
        with self.transaction():
            self._term.stage_many("HDEL", KEYS, key_ids)

    def add_event(self, event: Event) -> None:
        self._term.stage("RPUSH", EVENTS, _encoder.encode(event))
        self._term.stage("LTRIM", EVENTS, -KEPT_EVENTS, -1)

    def add_groups(self, rows: Sequence[GroupRow], *, answers: Answers = NO_CHANGES) -> None:
        with self.transaction():
            self._keep(rows)
            self._added += [row.seq for row in rows]
            if rows:
                self._term.stage("HSET", PLACES, "next_seq", rows[-1].seq + 1)
            self._term.stage_many("SADD", UNANSWERED, [row.seq for row in rows if not row.key_id])
            self.put_answers(answers)

    def add_submission(self, rows: Sequence[GroupRow], key: KeyRow | None, *, answers: Answers = NO_CHANGES) -> None:
        with self.transaction():
            self.add_groups(rows, answers=answers)
            if key is not None:
                self.put_key(key)

    def put_answers(self, answers: Answers) -> None:
        with self.transaction():
            self._term.stage_many("SREM", UNANSWERED, answers.answered)
            for fingerprint, count in answers.expected:
                if count:
                    self._term.stage("HSET", EXPECTED, fingerprint, count)
                else:
                    self._term.stage("HDEL", EXPECTED, fingerprint)

    def probe(self) -> None:
        with self.transaction():
            self._term.stage("HSET", PLACES, "probed", 1)

    def assign_batch(self, seqs: Sequence[int], batch: int) -> None:
        self._change({seq: {"batch": batch} for seq in seqs})

    def adopt_groups(self, run_id: str) -> None:
        self._change({seq: {"run_id": run_id} for seq, row in self._groups.items() if row.run_id == NO_RUN})

    def move_groups(self, places: Iterable[tuple[int, BodyRef]]) -> None:
        self._change({seq: {"body": body} for seq, body in places})

    def drop_groups(self, seqs: Sequence[int]) -> None:
        with self.transaction():
            self._term.stage_many("HDEL", GROUPS, seqs)
            for seq in seqs:
                self._groups.pop(seq, None)

    def metric_names(self) -> dict[str, list[str]]:
        rows = self._term.ask("HGETALL", METRIC_NAMES)
        return {run_id.decode(): msgspec.json.decode(names, type=list[str]) for run_id, names in rows.items()}

    def put_metric_names(self, run_id: str, names: Sequence[str]) -> None:
        with self.transaction():
            self._term.stage("HSET", METRIC_NAMES, run_id, _encoder.encode(list(names)))

    def put_metrics(self, run_id: str, rows: Sequence[MetricsRow]) -> None:
        with self.transaction():
            for row in rows:
                self.drop_metrics(run_id, row.step, row.step)
                self._term.stage("ZADD", METRICS.format(run_id=run_id), row.step, msgspec.msgpack.encode(row))

    def metrics_after(self, run_id: str, step: int, limit: int) -> list[MetricsRow]:
        key = METRICS.format(run_id=run_id)
        rows = self._term.ask("ZRANGEBYSCORE", key, f"({step}", "+inf", "LIMIT", 0, limit)
        return [msgspec.msgpack.decode(row, type=MetricsRow) for row in rows]

    def drop_metrics(self, run_id: str, first: int, last: int) -> None:
        with self.transaction():
            self._term.stage("ZREMRANGEBYSCORE", METRICS.format(run_id=run_id), first, last)

    def forget_metrics(self, run_id: str) -> None:
        with self.transaction():
            self._term.stage("DEL", METRICS.format(run_id=run_id))
            self._term.stage("HDEL", METRIC_NAMES, run_id)

    def dump(self) -> bytes:
        raise NoBackup("the store is in Redis; back up Redis' data")

    def sync(self) -> None:
        """Do nothing: Redis forces each write to its disk before it answers."""

    def close(self) -> None:
        """Apply what is staged, and release the lease."""
        with suppress(StoreUnavailable):
            self._term.end()

    def _put(self, name: str, field: str | int, row: msgspec.Struct) -> None:
        with self.transaction():
            self._term.stage("HSET", name, field, _encoder.encode(row))

    def _change(self, changes: dict[int, dict[str, object]]) -> None:
        with self.transaction():
            self._keep([msgspec.structs.replace(self._groups[seq], **values) for seq, values in changes.items()])

    def _keep(self, rows: Sequence[GroupRow]) -> None:
        members: list[int | bytes] = []
        for row in rows:
            self._groups[row.seq] = row
            members += (row.seq, _encoder.encode(row))
        self._term.stage_many("HSET", GROUPS, members)

    def _read(self, name: str, kind: type[RowT]) -> list[RowT]:
        return [msgspec.json.decode(row, type=kind) for row in self._term.ask("HGETALL", name).values()]


BODIES: Final = "atropos:bodies"


class RedisBodyLog:
    """Bodies by number, the offset of their `BodyRef`. What `append` stages is kept with the next transaction."""

    def __init__(self, term: RedisTerm) -> None:
        self._term = term
        self._next_number = max(self._numbers(), default=0) + 1
        self._size_bytes = 0

    def append(self, bodies: Sequence[bytes]) -> list[BodyRef]:
        refs = []
        for body in bodies:
            self._term.stage_body("HSET", BODIES, self._next_number, body)
            refs.append(BodyRef(0, self._next_number, len(body)))
            self._next_number += 1
            self._size_bytes += len(body)
        return refs

    def read(self, refs: Sequence[BodyRef]) -> list[bytes]:
        if not refs:
            return []
        bodies = self._term.ask("HMGET", BODIES, *[ref.offset for ref in refs])
        missing = [ref for ref, body in zip(refs, bodies, strict=True) if body is None or len(body) != ref.length]
        if missing:
            raise StoreDamaged(f"{self._term.place}: body {missing[0].offset} is missing", refs=missing)
        return list(bodies)

    def discard(self, refs: Iterable[BodyRef]) -> None:
        """Stage the deletion of bodies for the next transaction; if there is none, the next start deletes them."""
        gone = list(refs)
        self._size_bytes -= sum(ref.length for ref in gone)
        self._term.stage_removal(BODIES, [ref.offset for ref in gone])

    def adopt(self, refs: Iterable[BodyRef]) -> list[BodyRef]:
        alive = list(refs)
        known = self._numbers()
        lost = [ref for ref in alive if ref.offset not in known]
        orphans = known - {ref.offset for ref in alive}
        self._term.stage_removal(BODIES, sorted(orphans))
        self._size_bytes = sum(ref.length for ref in alive) - sum(ref.length for ref in lost)
        return lost

    def sparse_segments(self) -> list[int]:
        return []

    def sync(self) -> None:
        """Do nothing: Redis forces each write to its disk before it answers."""

    def is_safe(self, refs: Iterable[BodyRef]) -> bool:  # noqa: ARG002 - the protocol's form
        return True

    def open_all(self) -> list[OpenSegment]:
        raise NoBackup("the store is in Redis; back up Redis' data")

    def size_bytes(self) -> int:
        return self._size_bytes

    def close(self) -> None:
        """Do nothing: the ledger ends the term that both share."""

    def _numbers(self) -> set[int]:
        return {int(number) for number in self._term.ask("HKEYS", BODIES)}
