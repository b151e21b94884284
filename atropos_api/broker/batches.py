"""Numbered batches: each is formed once, is the same for every caller, and is dropped when a checkpoint covers it.

Before a batch is formed, groups that would be too old for it (`--max-staleness`) leave the queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from atropos_api.broker.packing import (
    adds_up,
    can_fill,
    choose_groups,
    in_unit,
    lanes_in_unit,
    most_that_fits,
    part_of_batch,
    queued_by_environment,
)
from atropos_api.broker.queue import version_of
from atropos_api.broker.state import State
from atropos_api.errors import BatchOutOfOrder, CommittedBatch
from atropos_api.store.base import LOST, EnvironmentRow, GroupRow, RunRow
from atropos_api.store.failpoints import Failpoint

TRAINED = "trained"
"""The outcome of groups in a committed batch."""


class Batches:
    """The batches of the open run: this class forms, commits and dissolves them."""

    def __init__(self, state: State, finish_keys: Callable[[Iterable[GroupRow]], None]) -> None:
        self._state = state
        self._finish_keys = finish_keys
        self._blocked_since: float | None = None

    @property
    def retry_at(self) -> float | None:
        """The time at which a batch that only waits for some environment's minimum may be formed without it.

        It comes after `min_allocation_wait`, or when the environment has been silent for so long that it no
        longer counts as alive.
        """
        if self._blocked_since is None:
            return None
        settings = self._state.settings
        alive = [row for row in self._state.alive_environments() if row.min_batch_allocation]
        silent = (row.seen_at + settings.environment_timeout for row in alive)
        return min([self._blocked_since + settings.min_allocation_wait, *silent])

    def minima_missing(self, run: RunRow) -> list[str]:
        """Return the names of the environments of which less is queued than their minimum."""
        queued = queued_by_environment(run, self._state.queue.lanes)
        short = [env_id for env_id, need in self._minima(run).items() if queued.get(env_id, 0) < need]
        return [self._state.environments.get(env_id).display_name for env_id in short]

    def stop_waiting(self) -> None:
        """Restart the wait for minima, because another trainer or run begins."""
        self._blocked_since = None

    def obtain(self, run: RunRow, number: int) -> list[GroupRow] | None:
        """Return the groups of batch `number`; form it now if it is the next one and the queue can fill it."""
        self._check_number(run, number)
        groups = self._state.batches.get(number)
        return groups if groups is not None else self._form(run, number)

    def commit(self, run: RunRow, number: int) -> None:
        """Forget all batches up to `number`, except those kept for replay."""
        if number > run.formed_batch:
            raise BatchOutOfOrder(
                f"batch {number} cannot be committed: the last one formed is {run.formed_batch}",
                number=number,
                formed_batch=run.formed_batch,
            )
        if number <= run.committed_batch:
            return
        state = self._state
        covered = {n: groups for n, groups in state.batches.items() if n <= number}
        kept = {**state.replayable, **covered}
        outdated = [n for n in kept if n <= number - state.settings.keep_batches]
        dropped = [group for n in outdated for group in kept.pop(n)]
        with state.change():
            state.runs.change(run, committed_batch=number, handed_batch=max(run.handed_batch, number))
            state.ledger.drop_groups([group.seq for group in dropped])
            trained = [group for groups in covered.values() for group in groups if group.body != LOST]
            state.environments.count_outcome(TRAINED, trained)
            self._finish_keys(group for groups in covered.values() for group in groups)
            state.reach(Failpoint.COMMIT_STAGED)
        state.reach(Failpoint.COMMIT_KEPT)
        state.replayable = kept
        for n in covered:
            del state.batches[n]
        state.possibly_delivered.difference_update(covered)
        state.discard(group.body for group in dropped)
        state.reach(Failpoint.BODIES_DISCARDED)
        state.counters.batches_committed_total += len(covered)
        state.events.add("batch-committed", run_id=run.run_id, number=number)
        state.pacing_changed()

    def dissolve(self, numbers: Iterable[int]) -> None:
        """Put the groups of formed batches back into the queue, at their old places."""
        state = self._state
        for number in list(numbers):
            groups = [group for group in state.batches[number] if group.body != LOST]
            state.ledger.drop_groups([group.seq for group in state.batches[number] if group.body == LOST])
            state.ledger.assign_batch([group.seq for group in groups], 0)
            del state.batches[number]
            state.possibly_delivered.discard(number)
            for group in groups:
                group.batch = 0
            state.queue.put_back(groups)

    def drop(self, groups: Sequence[GroupRow], outcome: str) -> None:
        """Remove groups from the queue and from the store."""
        self.forget(groups, outcome)
        for group in groups:
            self._state.queue.remove(group)

    def forget(self, groups: Sequence[GroupRow], outcome: str) -> None:
        """Delete groups from the store; a key whose last group is deleted begins to age."""
        state = self._state
        with state.change():
            state.ledger.drop_groups([group.seq for group in groups])
            state.environments.count_outcome(outcome, filter(self._is_counted, groups))
            self._finish_keys(groups)
        state.discard(group.body for group in groups)

    def expire(self, run: RunRow, upcoming: int) -> int:
        """Drop queued groups that would be too old in batch `upcoming`; return how many."""
        state = self._state
        budget = max_staleness_of(state, run)
        step_then = max(run.policy_step or 0, upcoming - 1)
        reasons: dict[str, list[GroupRow]] = {}
        for version in state.queue.versions():
            step = state.runs.step_of(run, version)
            orphaned = state.settings.drop_orphaned and state.runs.is_orphaned(run, version)
            too_old = budget is not None and step is not None and step_then - step > budget
            if orphaned or too_old:
                reasons.setdefault("orphaned" if orphaned else "too-old", []).extend(state.queue.of_version(version))
        expired = sum(map(len, reasons.values()))
        if expired:
            for reason, groups in reasons.items():
                self.drop(groups, reason)
                state.drops.count(groups, reason)
            state.counters.groups_expired_total += expired
            state.events.add("groups-expired", run_id=run.run_id, groups=expired, step=step_then)
            state.pacing_changed()
        return expired

    def packable_sequences(self, run: RunRow) -> int:
        """Return the number of queued sequences that some batch can hold."""
        queue = self._state.queue
        stuck = sum(size * queue.groups_by_size[size] for size in self.unpackable_sizes(run))
        return queue.sequences - stuck

    def unpackable_sizes(self, run: RunRow) -> list[int]:
        """Return the queued group sizes that no batch can ever hold.

        These are the sizes that no sum of registered and queued sizes, in any number, can use to fill a batch.
        """
        sizes = self._state.queue.groups_by_size.keys()
        if run.unit == "groups" or not any(map(run.batch_size.__mod__, sizes)):
            return []
        known = self._state.registered_sizes() | sizes
        return sorted(size for size in sizes if not can_fill(known, run.batch_size, containing=size))

    def count_unpackable(self, groups: Sequence[GroupRow]) -> None:
        """Count those of these new groups that no batch can ever hold."""
        run = self._state.runs.open
        if run is not None and (stuck := self.unpackable_sizes(run)):
            self._state.counters.groups_unpackable_total += sum(group.size in stuck for group in groups)

    def is_short_of(self, run: RunRow, row: EnvironmentRow) -> bool:
        """Return True if the next batch needs more groups of this environment, although enough is queued.

        Its own minimum is not met, or no subset of the queue fills a batch exactly and less than a batch of its size is
        queued. (If a whole batch of every registered size is queued, an exact subset exists, unless no queue can have
        one.)
        """
        counts = self._state.queue.groups_by_size
        if in_unit(run, counts) < run.batch_size:
            return False
        if row.min_batch_allocation and row.connected:
            need = self._minima(run).get(row.environment_id, 0)
            own = queued_by_environment(run, self._state.queue.lanes_of(row.environment_id))
            if own.get(row.environment_id, 0) < need:
                return True
        if run.unit == "groups" or counts.get(row.group_size, 0) * row.group_size >= run.batch_size:
            return False
        return not adds_up(counts, run.batch_size)

    def drop_unpackable(self, run: RunRow) -> None:
        """Drop, at a run's end, the queued groups that no batch can hold: no later group will complete them."""
        sizes = self.unpackable_sizes(run)
        stuck = [group for size in sizes for lane in self._state.queue.lanes_of_size(size) for group in lane]
        if stuck:
            self.drop(stuck, "unpackable")
            self._state.drops.count(stuck, "unpackable")
            self._state.events.add("unpackable-dropped", run_id=run.run_id, groups=len(stuck), sizes=sizes)

    def _is_counted(self, group: GroupRow) -> bool:
        """Return False for a group left over from a run before the one that its environment's counts are of."""
        run, row = self._state.runs.open, self._state.environments.find(group.env_id)
        present = run.run_id if run is not None else None
        return row is None or group.run_id in {row.outcomes.run_id, row.run_id, present}

    def _check_number(self, run: RunRow, number: int) -> None:
        if number <= run.committed_batch:
            raise CommittedBatch(
                f"batch {number} is committed and no longer stored; the next one is {run.committed_batch + 1}",
                number=number,
                committed_batch=run.committed_batch,
            )
        # A trainer commits at checkpoints: the batches between two of them, and the prefetched one, have to fit.
        allowed = max(self._state.settings.max_uncommitted, run.checkpoint_interval + 2)
        last = min(run.formed_batch + 1, run.committed_batch + allowed)
        if number > last:
            raise BatchOutOfOrder(
                f"batch {number} is out of order: {run.committed_batch} is committed, {run.formed_batch} formed, "
                f"at most {allowed} may be open (--max-uncommitted); {last} is the highest to ask for",
                number=number,
                committed_batch=run.committed_batch,
                formed_batch=run.formed_batch,
            )

    def _form(self, run: RunRow, number: int) -> list[GroupRow] | None:
        state = self._state
        self.expire(run, number)
        if in_unit(run, state.queue.groups_by_size) < run.batch_size:
            self._blocked_since = None
            return None
        groups = self._choose(run)
        if groups is None:
            return None
        state.reach(Failpoint.BATCH_CHOSEN)
        with state.change():
            state.ledger.assign_batch([group.seq for group in groups], number)
            # A batch that was lost and is formed again need not be the last one.
            changed = state.runs.change(run, formed_batch=max(number, run.formed_batch))
            state.reach(Failpoint.BATCH_STAGED)
        state.reach(Failpoint.BATCH_KEPT)
        for group in groups:
            state.queue.remove(group)
            group.batch = number
        state.batches[number] = groups
        for listener in state.on_formed:
            listener(run.run_id, number, groups)
        self._count_formed(changed, number, groups)
        return groups

    def _choose(self, run: RunRow) -> list[GroupRow] | None:
        """Choose groups that meet the minima of the alive environments.

        After `min_allocation_wait` without success, meet as many minima as possible.
        """
        state = self._state
        lanes = lanes_in_unit(run, state.queue.lanes)
        minima = self._minima(run)
        groups = choose_groups(lanes, run.batch_size, minima)
        if groups is not None or not minima:
            self._blocked_since = None
            return groups
        without = choose_groups(lanes, run.batch_size, {})
        if without is None:
            self._blocked_since = None
            return None
        now = state.clock()
        if self._blocked_since is None:
            self._blocked_since = now
        if now - self._blocked_since < state.settings.min_allocation_wait:
            return None
        self._blocked_since = None
        return self._waive(run, minima) or without

    def _waive(self, run: RunRow, minima: dict[int, int]) -> list[GroupRow] | None:
        """Meet each minimum as far as possible: first those that can be met in full, then as much as is queued."""
        state = self._state
        lanes = lanes_in_unit(run, state.queue.lanes)
        queued = queued_by_environment(run, state.queue.lanes)
        due: dict[int, int] = {}
        for env_id in sorted(minima, key=lambda env_id: (queued.get(env_id, 0) < minima[env_id], env_id)):
            most = min(minima[env_id], queued.get(env_id, 0))
            due[env_id] = most_that_fits(lanes, run.batch_size, due, env_id, most)
        waived = sorted(env_id for env_id, need in minima.items() if due[env_id] < need)
        state.counters.minima_waived_total += len(waived)
        state.events.add("minimum-waived", run_id=run.run_id, environment_ids=waived)
        return choose_groups(lanes, run.batch_size, due)

    def _minima(self, run: RunRow) -> dict[int, int]:
        """Return the minimum of each alive environment, scaled down where they add up to more than a batch."""
        due = {
            row.environment_id: part_of_batch(run.batch_size, row.min_batch_allocation)
            for row in self._state.alive_environments()
            if row.min_batch_allocation
        }
        total = sum(due.values())
        if total > run.batch_size:
            due = {env_id: int(need * run.batch_size / total) for env_id, need in due.items()}
        return {env_id: need for env_id, need in due.items() if need > 0}

    def _count_formed(self, run: RunRow, number: int, groups: Sequence[GroupRow]) -> None:
        state = self._state
        state.counters.batches_formed_total += 1
        versions = Counter(map(version_of, groups))
        orphaned = sum(count for version, count in versions.items() if state.runs.is_orphaned(run, version))
        state.counters.groups_orphaned_total += orphaned
        state.events.add("batch-formed", run_id=run.run_id, number=number, groups=len(groups), orphaned_groups=orphaned)


def max_staleness_of(state: State, run: RunRow) -> int | None:
    """Return the stricter of the limits set by the run and by the operator; None if neither sets one."""
    bounds = [bound for bound in (run.max_staleness, state.settings.max_staleness) if bound is not None]
    return min(bounds, default=None)


def slice_for_rank(groups: Sequence[GroupRow], rank: int, world_size: int) -> list[GroupRow]:
    """Return the whole groups that one trainer rank gets.

    Groups are assigned heaviest first, each to the rank with the fewest tokens so far.
    """
    # Each group goes to the first of the lightest ranks, so no rank after as many as there are groups gets any.
    loads = [0] * min(world_size, len(groups))
    mine = []
    for group in sorted(groups, key=lambda row: (-row.token_count, row.seq)):
        lightest = loads.index(min(loads))
        loads[lightest] += group.token_count
        if lightest == rank:
            mine.append(group)
    return sorted(mine, key=lambda row: row.seq)
