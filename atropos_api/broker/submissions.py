"""Submissions: queue limits, idempotency keys, deduplication, and the write that stores groups.

A submission without a key whose answer may have been lost is expected again: the same bytes within a short window are a
repeat, and are not accepted twice. The expected repeats are also in the ledger, so that they survive any number of
crashes; `Deduplication.pending_changes` returns those that the ledger lacks. A recognised repeat stays expected in the
ledger until its own answer was sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from blake3 import blake3

from atropos_api.broker.state import State
from atropos_api.errors import InvalidGroup, QueueFull, StoreUnavailable
from atropos_api.store.base import NO_CHANGES, NO_RUN, Answers, GroupRow, KeyRow
from atropos_api.store.failpoints import Failpoint
from atropos_api.wire.group_json import CheckedGroup, finish_text
from atropos_api.wire.messages import ITEM_KEY


class Deduplication:
    """Counts of groups that may come again, by environment and bytes, each until its window ends."""

    def __init__(self, window_seconds: float, clock: Callable[[], float]) -> None:
        self._window_seconds = window_seconds
        self._clock = clock
        self._counts: Counter[bytes] = Counter()
        self._until: dict[bytes, float] = {}
        self._recognised: Counter[bytes] = Counter()
        """Recognised repeats whose own answer is not sent yet."""
        self._changed: set[bytes] = set()

    def adopt(self, counts: Mapping[bytes, int]) -> None:
        """Load, at start, the repeats that the ledger expects.

        The window restarts, because no client could repeat while no broker ran.
        """
        for fingerprint, count in counts.items():
            self._expect(fingerprint, count)

    def expect(self, env_id: int | None, *parts: bytes | memoryview) -> None:
        """Expect a group of this environment again; `parts` are its bytes."""
        self._expect(_digest(env_id, parts), 1)

    def split(self, groups: Sequence[CheckedGroup]) -> tuple[list[CheckedGroup], list[CheckedGroup]]:
        """Return the new groups and the repeats; the caller reports to `settle` whether their answer was sent.

        Each expected repeat is recognised once, so that equal groups that follow are accepted.
        """
        if not self._until:
            return list(groups), []
        self._forget_before(self._clock())
        fresh: list[CheckedGroup] = []
        repeated: list[CheckedGroup] = []
        for group in groups:
            fingerprint = _fingerprint(group)
            if fingerprint in self._until:
                self._take_one(fingerprint)
                self._recognised[fingerprint] += 1
                repeated.append(group)
            else:
                fresh.append(group)
        return fresh, repeated

    def settle(self, repeated: Iterable[CheckedGroup], lost: Iterable[CheckedGroup]) -> None:
        """Record that the answer for these repeats was sent or lost; groups in `lost` may come again."""
        for group in repeated:
            fingerprint = _fingerprint(group)
            if self._recognised[fingerprint] > 1:
                self._recognised[fingerprint] -= 1
            elif not self._recognised.pop(fingerprint, 0) and fingerprint in self._until:
                # The store was read again after this repeat was recognised, so it is expected once more: remove it.
                self._take_one(fingerprint)
            self._changed.add(fingerprint)
        for group in lost:
            self._expect(_fingerprint(group), 1)

    def pending_changes(self) -> list[tuple[bytes, int]]:
        """Return the fingerprints whose expected count changed since `forget_changes`, with their new counts."""
        if not self._changed:
            return []
        return [
            (fingerprint, self._counts[fingerprint] + self._recognised[fingerprint]) for fingerprint in self._changed
        ]

    def forget_changes(self) -> None:
        self._changed.clear()

    def _expect(self, fingerprint: bytes, count: int) -> None:
        self._changed.add(fingerprint)
        if self._window_seconds > 0:
            self._counts[fingerprint] += count
            self._until[fingerprint] = self._clock() + self._window_seconds

    def _take_one(self, fingerprint: bytes) -> None:
        self._counts[fingerprint] -= 1
        if not self._counts[fingerprint]:
            self._forget(fingerprint)

    def _forget_before(self, now: float) -> None:
        for fingerprint in [fingerprint for fingerprint, until in self._until.items() if until < now]:
            self._forget(fingerprint)

    def _forget(self, fingerprint: bytes) -> None:
        del self._counts[fingerprint], self._until[fingerprint]
        self._changed.add(fingerprint)


def _fingerprint(group: CheckedGroup) -> bytes:
    parts = (group.text,) if group.columns is None else (group.text, group.columns)
    return _digest(group.env_id, parts)


def _digest(env_id: int | None, parts: Iterable[bytes | memoryview]) -> bytes:
    hasher = blake3(f"{env_id}:".encode())
    for part in parts:
        hasher.update(part)
    return hasher.digest()


class IdempotencyKeys:
    """Idempotency keys by owner (an environment's name), remembered until an hour after their groups are done.

    The key of a leased item's group is remembered until the item is settled: after a power cut its environment may be
    started the next day, and would have the item trained a second time. A repeat after that is recognised by the item.
    """

    def __init__(self, state: State, rows: Iterable[KeyRow]) -> None:
        self._state = state
        self._by_id = {row.key_id: row for row in rows}
        self._by_key = {(row.owner, row.key): row for row in self._by_id.values()}
        self._open_groups: dict[int, int] = {}
        self._last_id = max(self._by_id, default=0)

    def adopt(self, groups: Iterable[GroupRow]) -> None:
        """Count the groups found at start for their keys; a key whose groups were all lost begins to age.

        If the machine's clock has been set back since, a key ages from now on.
        """
        for group in groups:
            # A group that is kept for replay outlives its key, and the id of that key must not be used again.
            self._last_id = max(self._last_id, group.key_id)
            if group.key_id in self._by_id:
                self._open_groups[group.key_id] = self._open_groups.get(group.key_id, 0) + 1
        now = self._state.clock()
        for row in self._by_id.values():
            row.used_at = min(row.used_at, now)
            if row.done_at is not None:
                row.done_at = min(row.done_at, now)
            elif row.key_id not in self._open_groups:
                row.done_at = now
                self._state.ledger.put_key(row)

    def withdraw(self, key_ids: Iterable[int]) -> None:
        """Forget the keys of submissions that did not survive, so that a repeat is accepted as new."""
        for key_id in key_ids:
            row = self._by_id.pop(key_id)
            del self._by_key[row.owner, row.key]
        self._state.ledger.forget_keys(list(key_ids))

    def find(self, owner: str, key: str) -> KeyRow | None:
        return self._by_key.get((owner, key))

    def is_repeat(self, owner: str, key: str) -> bool:
        """Return True if groups came under this key before, or if its item is settled.

        A process that was stopped for longer than a key is remembered may send its group late, when the item has been
        trained with the group of another process.
        """
        return self.find(owner, key) is not None or self._is_open(owner, key) is False

    def make(self, owner: str, key: str, group_count: int) -> KeyRow:
        return KeyRow(
            key_id=self._last_id + 1, owner=owner, key=key, group_count=group_count, used_at=self._state.clock()
        )

    def keep(self, row: KeyRow) -> None:
        self._last_id = max(self._last_id, row.key_id)
        self._by_id[row.key_id] = row
        self._by_key[row.owner, row.key] = row
        self._open_groups[row.key_id] = row.group_count

    def finish(self, groups: Iterable[GroupRow]) -> None:
        """Record that these groups are done: their keys begin to age, and keys old enough are forgotten."""
        now = self._state.clock()
        for group in groups:
            left = self._open_groups.get(group.key_id)
            if left is None:
                continue
            self._open_groups[group.key_id] = left - 1
            if left == 1:
                del self._open_groups[group.key_id]
                row = self._by_id[group.key_id]
                row.done_at = now
                self._state.ledger.put_key(row)
        self._forget_before(now - self._state.settings.key_memory_seconds)

    def _forget_before(self, limit: float) -> None:
        old = []
        for row in self._by_id.values():
            # Keys are in order of time, so the search can stop at the first recent one.
            if row.used_at > limit:
                break
            if row.done_at is not None and row.done_at <= limit and not self._is_open(row.owner, row.key):
                old.append(row)
        for row in old:
            del self._by_id[row.key_id]
            del self._by_key[row.owner, row.key]
        if old:
            self._state.ledger.forget_keys([row.key_id for row in old])

    def _is_open(self, owner: str, key: str) -> bool | None:
        """Return True if the key is of an item that may be rolled out again, False if of a settled one, else None."""
        item = ITEM_KEY.fullmatch(key)
        if item is None:
            return None
        return self._state.environments.item_is_open(owner, item["run_id"], int(item["number"]))


class Submissions:
    """The path of checked groups into the store: they are written as rows and bodies, and then queued."""

    def __init__(self, state: State, keys: IdempotencyKeys) -> None:
        self._state = state
        self._keys = keys
        self.repeats = Deduplication(state.settings.dedup_window, state.clock)
        self._answered: list[int] = []

    def take(
        self,
        groups: Sequence[CheckedGroup],
        env_ids: Sequence[int | None],
        *,
        run_id: str,
        key: KeyRow | None = None,
    ) -> list[GroupRow]:
        """Write the groups and queue them. Either all of them are kept or none is."""
        state = self._state
        self._check_pressure(groups)
        for index, group in enumerate(groups):
            self.check(group, f"groups[{index}].")
        version = state.runs.open.policy_version if state.runs.open is not None else None
        bodies = [finish_text(group, version) for group in groups]
        now = state.clock()
        state.reach(Failpoint.SUBMISSION_CHECKED)
        refs = state.bodies.append(bodies)
        rows = [
            GroupRow(
                seq=state.next_seq + index,
                run_id=run_id,
                env_id=env_id,
                size=group.size,
                token_count=group.token_count,
                body=ref,
                received_version=version,
                oldest_version=group.oldest_version,
                arrived_at=now,
                key_id=key.key_id if key is not None else 0,
                form=group.form,
                policy=group.policy,
            )
            for index, (group, env_id, ref) in enumerate(zip(groups, env_ids, refs, strict=True))
        ]
        try:
            state.reach(Failpoint.GROUPS_STAGED)
            state.ledger.add_submission(rows, key, answers=self._pending_changes())
        except BaseException:
            state.bodies.discard(refs)
            raise
        self._forget_changes()
        state.reach(Failpoint.GROUPS_KEPT)
        self._enqueue(rows, run_id, key)
        for listener in state.on_queued:
            listener(groups, rows)
        state.latest_body, state.latest_form = bodies[-1], groups[-1].form
        self._count(groups)
        return rows

    def settle(
        self, rows: Iterable[GroupRow], repeated: Sequence[CheckedGroup] = (), *, lost: Sequence[CheckedGroup] = ()
    ) -> None:
        """Record that the answer for these rows and repeats was sent or, for those in `lost`, was lost: these may come
        again.

        A sent answer becomes durable with the next submission; after a crash before that, it counts as possibly lost.
        """
        self._answered += [row.seq for row in rows if not row.key_id]
        self.repeats.settle(repeated, lost)
        if lost:
            self._record()

    def resume(self, unanswered: Sequence[int]) -> None:
        """Record at start that `repeats` now expects these unanswered rows again, even after the rows are deleted."""
        self._answered += unanswered
        if unanswered:
            self._record()

    def close(self) -> None:
        """Record before an orderly exit which answers were sent, so that the next process expects no repeats."""
        if self._answered or self.repeats.pending_changes():
            self._record()

    def _record(self) -> None:
        # If this write fails, the next submission writes the record; until then the rows count as unanswered.
        with suppress(StoreUnavailable):
            self._state.ledger.put_answers(self._pending_changes())
            self._forget_changes()

    def _pending_changes(self) -> Answers:
        changed = self.repeats.pending_changes()
        return Answers(self._answered, changed) if self._answered or changed else NO_CHANGES

    def _forget_changes(self) -> None:
        if self._answered:
            self._answered = []
        self.repeats.forget_changes()

    def _enqueue(self, rows: Sequence[GroupRow], run_id: str, key: KeyRow | None) -> None:
        state = self._state
        state.next_seq += len(rows)
        if key is not None:
            self._keys.keep(key)
        open_id = state.runs.open.run_id if state.runs.open is not None else NO_RUN
        if run_id == open_id:
            for row in rows:
                state.queue.add(row)
            state.groups_changed()
        else:
            state.left_over.setdefault(run_id, []).extend(rows)
            state.counters.groups_left_over_total += len(rows)

    def _check_pressure(self, groups: Sequence[CheckedGroup]) -> None:
        state = self._state
        sequences, body_bytes = state.queue.sequences, state.queue.body_bytes
        for group in groups:
            sequences += group.size
            body_bytes += group.byte_count
        if sequences > state.settings.max_queued_sequences or body_bytes > state.settings.max_queued_bytes:
            raise QueueFull(
                f"the queue holds {state.queue.sequences} sequences ({state.queue.body_bytes} bytes); try again later",
                queued_sequences=state.queue.sequences,
                queued_bytes=state.queue.body_bytes,
            )

    def check(self, group: CheckedGroup, where: str) -> None:
        """Refuse a group of another policy than the open run trains, or one without versions if they are required."""
        run = self._state.runs.open
        if run is not None and group.policy not in (None, run.policy):
            raise InvalidGroup(f"{where}policy", group.policy, f"the open run trains the policy {run.policy!r}")
        if self._state.settings.require_versions and group.oldest_version is None:
            reason = "every sampled token needs a policy version (the broker runs with --require-versions)"
            raise InvalidGroup(f"{where}policy_versions", None, reason)

    def _count(self, groups: Sequence[CheckedGroup]) -> None:
        counters, run = self._state.counters, self._state.runs.open
        self._state.activity.collected_run = None if run is None else run.run_id
        for group in groups:
            counters.groups_received_total += 1
            counters.sequences_received_total += group.size
            counters.tokens_received_total += group.token_count
            counters.groups_without_version_total += group.oldest_version is None
