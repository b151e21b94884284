"""Taking groups in: pressure, idempotency keys, and the write that makes them ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from atropos_api.broker.repeats import Repeats
from atropos_api.broker.state import State
from atropos_api.errors import InvalidGroup, QueueFull, StoreUnavailable
from atropos_api.store.base import NO_NEWS, NO_RUN, Answers, GroupRow, KeyRow
from atropos_api.store.steps import Step
from atropos_api.wire.payload import CheckedGroup, seal


class Keys:
    """Idempotency keys by owner (an environment's name), remembered until an hour after their groups are done."""

    def __init__(self, state: State, rows: Iterable[KeyRow]) -> None:
        self._state = state
        self._by_id = {row.key_id: row for row in rows}
        self._by_key = {(row.owner, row.key): row for row in self._by_id.values()}
        self._open_groups: dict[int, int] = {}
        self._last_id = max(self._by_id, default=0)

    def adopt(self, groups: Iterable[GroupRow]) -> None:
        """Count the groups found at start towards their keys; a key whose groups were all lost begins to age."""
        for group in groups:
            # A group that is kept for replay outlives its key, whose number nobody else may have then.
            self._last_id = max(self._last_id, group.key_id)
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
        return KeyRow(
            key_id=self._last_id + 1, owner=owner, key=key, group_count=group_count, used_at=self._state.clock()
        )

    def keep(self, row: KeyRow) -> None:
        self._last_id = max(self._last_id, row.key_id)
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


class Intake:
    """Checked groups become rows and bodies in the store, and then stand in the queue."""

    def __init__(self, state: State, keys: Keys) -> None:
        self._state = state
        self._keys = keys
        self.repeats = Repeats(state.settings.dedup_window_seconds, state.clock)
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
        if state.settings.require_versions:
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
            state.ledger.add_submission(rows, key, answers=self._news())
        except BaseException:
            state.bodies.discard(refs)
            raise
        self._forget_news()
        state.reach(Step.GROUPS_KEPT)
        self._enqueue(rows, run_id, key)
        state.latest_body, state.latest_form = sealed[-1], groups[-1].form
        self._count(groups)
        return rows

    def settle(
        self, rows: Iterable[GroupRow], repeated: Sequence[CheckedGroup] = (), *, lost: Sequence[CheckedGroup] = ()
    ) -> None:
        """The answer for these rows and repeats has left, or did not get through: then `lost` may all come again.

        That it has left becomes durable with the next submission; until then a crash makes it one that may have not.
        """
        self._answered += [row.seq for row in rows if not row.key_id]
        self.repeats.settle(repeated, lost)
        if lost:
            self._record()

    def resume(self, unanswered: Sequence[int]) -> None:
        """At start: what may come again of these rows is known to `repeats` by now, and so kept if they leave."""
        self._answered += unanswered
        if unanswered:
            self._record()

    def close(self) -> None:
        """Before an orderly end: what was answered needs no repeat, and the next process should know."""
        if self._answered or self.repeats.news():
            self._record()

    def _record(self) -> None:
        # What cannot be written now goes with the next submission; until then the rows count as unanswered.
        with suppress(StoreUnavailable):
            self._state.ledger.put_answers(self._news())
            self._forget_news()

    def _news(self) -> Answers:
        changed = self.repeats.news()
        return Answers(self._answered, changed) if self._answered or changed else NO_NEWS

    def _forget_news(self) -> None:
        if self._answered:
            self._answered = []
        self.repeats.forget_news()

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

    def check_version(self, group: CheckedGroup, where: str) -> None:
        """Refuse a group that does not say its policy versions, if the operator wants them all to."""
        if self._state.settings.require_versions and group.oldest_version is None:
            reason = "every sampled token needs a policy version (the broker runs with --require-versions)"
            raise InvalidGroup(f"{where}policy_versions", None, reason)

    def _count(self, groups: Sequence[CheckedGroup]) -> None:
        counters = self._state.counters
        for group in groups:
            counters.groups_received_total += 1
            counters.sequences_received_total += group.size
            counters.tokens_received_total += group.token_count
            counters.groups_without_version_total += group.oldest_version is None
