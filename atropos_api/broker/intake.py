"""Taking groups in: pressure, idempotency keys, recognition of repeats, and the write that makes them ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from blake3 import blake3

from atropos_api.broker.state import State
from atropos_api.errors import InvalidGroup, QueueFull
from atropos_api.store.base import NO_RUN, GroupRow, KeyRow
from atropos_api.store.steps import Step
from atropos_api.wire.payload import CheckedGroup, seal


class Keys:
    """Idempotency keys by owner (an environment's name), remembered until an hour after their groups are done."""

    def __init__(self, state: State, rows: Iterable[KeyRow]) -> None:
        self._state = state
        self._by_id = {row.key_id: row for row in rows}
        self._by_key = {(row.owner, row.key): row for row in self._by_id.values()}
        self._open_groups: dict[int, int] = {}

    def adopt(self, groups: Iterable[GroupRow]) -> None:
        """Count the groups found at start towards their keys; a key whose groups were all lost begins to age."""
        for group in groups:
            if group.key_id in self._by_id:
                self._open_groups[group.key_id] = self._open_groups.get(group.key_id, 0) + 1
        for row in self._by_id.values():
            if row.done_at is None and row.key_id not in self._open_groups:
                row.done_at = self._state.clock()
                self._state.ledger.put_key(row)

    def withdraw(self, key_ids: Iterable[int]) -> None:
        """Forget the keys of submissions that did not survive: their repetition is news."""
        for key_id in key_ids:
            row = self._by_id.pop(key_id)
            del self._by_key[row.owner, row.key]
        self._state.ledger.forget_keys(list(key_ids))

    def find(self, owner: str, key: str) -> KeyRow | None:
        return self._by_key.get((owner, key))

    def make(self, owner: str, key: str, group_count: int) -> KeyRow:
        key_id = next(reversed(self._by_id), 0) + 1
        return KeyRow(key_id=key_id, owner=owner, key=key, group_count=group_count, used_at=self._state.clock())

    def keep(self, row: KeyRow) -> None:
        self._by_id[row.key_id] = row
        self._by_key[row.owner, row.key] = row
        self._open_groups[row.key_id] = row.group_count

    def finish(self, groups: Iterable[GroupRow]) -> None:
        """Groups left for good: their keys begin to age, and keys old enough are forgotten."""
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
            # Keys were made in order of time; the first young one ends the search, done or not.
            if row.used_at > limit:
                break
            if row.done_at is not None and row.done_at <= limit:
                old.append(row)
        for row in old:
            del self._by_id[row.key_id]
            del self._by_key[row.owner, row.key]
        if old:
            self._state.ledger.forget_keys([row.key_id for row in old])


class Repeats:
    """Submissions without a key whose answer may not have arrived: the same bytes again, soon, are no news."""

    def __init__(self, window_seconds: float, clock: Callable[[], float]) -> None:
        self._window_seconds = window_seconds
        self._clock = clock
        self._until: dict[bytes, float] = {}

    def expect(self, env_id: int | None, *parts: bytes | memoryview) -> None:
        """A group of this environment may come again; `parts` are its bytes."""
        if self._window_seconds > 0:
            self._until[_fingerprint(env_id, parts)] = self._clock() + self._window_seconds

    def expect_all(self, groups: Iterable[CheckedGroup]) -> None:
        for group in groups:
            self.expect(group.env_id, *_parts(group))

    def split(self, groups: Sequence[CheckedGroup]) -> tuple[list[CheckedGroup], list[CheckedGroup]]:
        """The groups that are new, and those that are such repeats.

        Each repeat is recognised once, so equal groups that follow are taken.
        """
        if not self._until:
            return list(groups), []
        now = self._clock()
        self._until = {print_: until for print_, until in self._until.items() if until >= now}
        fresh: list[CheckedGroup] = []
        repeated: list[CheckedGroup] = []
        for group in groups:
            known = self._until.pop(_fingerprint(group.env_id, _parts(group)), None)
            (fresh if known is None else repeated).append(group)
        return fresh, repeated


class Intake:
    """Checked groups become rows and bodies in the store, and then stand in the queue."""

    def __init__(self, state: State, keys: Keys) -> None:
        self._state = state
        self._keys = keys
        self.repeats = Repeats(state.settings.dedup_window_seconds, state.clock)
        self.answered_seq = 0
        self._unanswered: set[int] = set()

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
            self.check_version(group, f"groups[{index}].")
        version = state.runs.open.policy_version if state.runs.open is not None else None
        sealed = [seal(group, version) for group in groups]
        now = state.clock()
        state.reach(Step.SUBMISSION_CHECKED)
        refs = state.bodies.append(sealed)
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
            )
            for index, (group, env_id, ref) in enumerate(zip(groups, env_ids, refs, strict=True))
        ]
        try:
            state.reach(Step.GROUPS_STAGED)
            state.ledger.add_submission(rows, key, answered_seq=self.answered_seq)
        except BaseException:
            state.bodies.discard(refs)
            raise
        state.reach(Step.GROUPS_KEPT)
        self._enqueue(rows, run_id, key)
        state.latest_body, state.latest_form = sealed[-1], groups[-1].form
        self._count(groups)
        return rows

    def settle(self, rows: Sequence[GroupRow]) -> None:
        """The answer for these groups has left, or its failure is noted; a crash from now on makes no repeat of them.

        It becomes durable with the next submission: only what is younger can be unanswered after a crash.
        """
        self._unanswered.difference_update(row.seq for row in rows)
        self.answered_seq = min(self._unanswered, default=self._state.next_seq) - 1

    def _enqueue(self, rows: Sequence[GroupRow], run_id: str, key: KeyRow | None) -> None:
        state = self._state
        state.next_seq += len(rows)
        if key is not None:
            self._keys.keep(key)
        else:
            self._unanswered.update(row.seq for row in rows)
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
        sequences = state.queue.sequences + sum(group.size for group in groups)
        body_bytes = state.queue.body_bytes + sum(group.byte_count for group in groups)
        if sequences > state.settings.max_queued_sequences or body_bytes > state.settings.max_queued_bytes:
            raise QueueFull(
                f"the queue holds {state.queue.sequences} sequences ({state.queue.body_bytes} bytes); try again later",
                queued_sequences=state.queue.sequences,
                queued_bytes=state.queue.body_bytes,
            )

    def check_version(self, group: CheckedGroup, where: str) -> None:
        """Refuse a group that does not say its policy versions, if the operator wants them all to."""
        if self._state.settings.require_versions and group.oldest_version is None:
            reason = "every sampled token needs a policy version (the broker runs with --require-versions)"
            raise InvalidGroup(f"{where}policy_versions", None, reason)

    def _count(self, groups: Sequence[CheckedGroup]) -> None:
        counters = self._state.counters
        counters.groups_received_total += len(groups)
        counters.sequences_received_total += sum(group.size for group in groups)
        counters.tokens_received_total += sum(group.token_count for group in groups)
        counters.groups_without_version_total += sum(group.oldest_version is None for group in groups)


def _parts(group: CheckedGroup) -> tuple[bytes | memoryview, ...]:
    return (group.text,) if group.columns is None else (group.text, group.columns)


def _fingerprint(env_id: int | None, parts: Iterable[bytes | memoryview]) -> bytes:
    hasher = blake3(f"{env_id}:".encode())
    for part in parts:
        hasher.update(part)
    return hasher.digest()
