"""Pacing of environments: the group sizes that the open run can use, and how much each environment may have in flight.

`GroupSizes` judges all sizes together: 3 and 5 fill a batch of 8, neither does alone. An environment whose size cannot
fill a batch yet is not refused, because one that completes it may register a moment later: in the Atropos contract its
registration is answered with a request to retry, in v1 it is registered, and both produce nothing until then. A warning
shows the arithmetic. `Pacer` lets each environment have as much in flight as can be trained before it is too old, and
no more.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, Literal

from atropos_api.broker.batches import Batches, max_staleness_of
from atropos_api.broker.packing import amount, batch_in_sequences, can_fill, in_unit
from atropos_api.broker.policy_holds import PolicyHolds
from atropos_api.broker.state import State
from atropos_api.errors import UnusableGroupSize
from atropos_api.store.base import NO_RUN, EnvironmentRow, GroupRow, RunRow
from atropos_api.wire.messages import EnvironmentInfo, Pacing

logger = logging.getLogger(__name__)

ASKING_SECONDS: Final = 10.0
"""Time for which a registration that must wait is remembered; the Atropos contract retries each second."""


MOST_WARNINGS: Final = 1000
"""Maximum number of environments whose last warning is remembered, to avoid repeating it."""


class GroupSizes:
    """The group-size rules: which sizes may be registered, and which of them the open run can use now."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._asking: dict[tuple[str, int], float] = {}
        self._warnings: dict[str, str] = {}
        """The last warning about each waiting environment, by name."""

    def refuse_too_large(self, size: int) -> None:
        """Refuse a group size larger than a batch, which no other size can complete."""
        run = self._state.runs.open
        if run is not None and run.unit == "sequences" and size > run.batch_size:
            raise UnusableGroupSize(
                f"groups of {size} are larger than a batch of {run.batch_size} sequences: choose a smaller group size, "
                "or a larger batch size in the trainer",
                field="group_size",
                value=size,
                batch_size=run.batch_size,
            )

    def ask(self, name: str, size: int) -> str | None:
        """Request the registration of an environment: return None if it may register, else the reason to wait."""
        run = self._state.runs.open
        self._asking[name, size] = self._state.clock()
        if run is None or self.can_use(run, size):
            del self._asking[name, size]
            self._warnings.pop(name, None)
            return None
        self._warn_once(name, run, size)
        return self.explain(run, size)

    def can_use(self, run: RunRow, size: int, *, keeps_coming: bool = False) -> bool:
        """Return True if some batch can hold a group of this size, provided that groups of the registered sizes come.

        Of other sizes only the queued groups count, except for `size` itself if it `keeps_coming`.
        """
        if run.unit == "groups":
            return True
        known = self._state.registered_sizes()
        if run.batch_size % size == 0 and (keeps_coming or size in known):
            return True
        known = known | self._asked_for() | ({size} if keeps_coming else set())
        queued = self._state.queue.groups_by_size
        waiting = {other: count for other, count in queued.items() if other not in known}
        return can_fill(known, run.batch_size, containing=size, at_most=waiting)

    def can_be_used(self, size: int, environment: EnvironmentRow | None) -> bool:
        """Return True if a queued group of this size is `received`, False if it is only `buffered`.

        It is `received` if some batch can hold it, provided that the registered environments submit their groups. The
        group sizes of an unregistered sender are known only from its groups, so they are assumed to keep coming.
        """
        run = self._state.runs.open
        return run is None or self.can_use(run, size, keeps_coming=environment is None)

    def reason_to_pause(self, run: RunRow, row: EnvironmentRow) -> str | None:
        """Return the reason why no group of this environment can be trained now; None if some can."""
        return None if self.can_use(run, row.group_size) else self.explain(run, row.group_size)

    def warn(self) -> None:
        """Log once which registered environments the open run cannot use."""
        run = self._state.runs.open
        sizes = self._state.registered_sizes() if run is not None else ()
        useless = {size for size in sizes if run is not None and not self.can_use(run, size)}
        if not useless and not self._warnings:
            return
        for row in self._state.environments:
            if run is not None and row.connected and row.group_size in useless:
                self._warn_once(row.display_name, run, row.group_size)
            else:
                self._warnings.pop(row.display_name, None)

    def explain(self, run: RunRow, size: int) -> str:
        """Return the arithmetic of an unusable group size, and the changes that would help."""
        if size > run.batch_size:
            return f"groups of {size} are larger than a batch of {run.batch_size}; raise the trainer's batch size"
        others = sorted((self._state.registered_sizes() | self._asked_for()) - {size})
        combined = f" with those of {', '.join(map(str, others))}" if others else " alone"
        rest = run.batch_size % size
        return (
            f"groups of {size}{combined} never fill {run.batch_size} sequences; an environment with groups of {rest} "
            f"would complete them, or a batch size of {run.batch_size - rest} or {run.batch_size - rest + size}"
        )

    def _asked_for(self) -> frozenset[int]:
        """Return the sizes of environments that asked to register in the last 10 s and had to wait."""
        since = self._state.clock() - ASKING_SECONDS
        self._asking = {asked: when for asked, when in self._asking.items() if when >= since}
        return frozenset(size for _, size in self._asking)

    def _warn_once(self, name: str, run: RunRow, size: int) -> None:
        text = f"environment {name} waits in run {run.name}: {self.explain(run, size)}"
        if self._warnings.get(name) == text:
            return
        if len(self._warnings) >= MOST_WARNINGS:
            self._warnings.clear()
        self._warnings[name] = text
        logger.warning("%s", text)
        self._state.events.add("group-size-waits", name=name, group_size=size, batch_size=run.batch_size)


PacingState = Literal["wait", "run", "finished"]


class Pacer:
    """The pacing of each environment: room is computed in the run's unit and returned in sequences."""

    def __init__(self, state: State, batches: Batches, holds: PolicyHolds, sizes: GroupSizes) -> None:
        self._state = state
        self._batches = batches
        self._holds = holds
        self._sizes = sizes

    def pacing(self, row: EnvironmentRow) -> Pacing:
        state = self.environment_state(row)
        run = self._state.runs.open
        if run is None and state == "finished":
            run = self._state.runs.find(row.run_id or "")
        running = run is not None and state == "run"
        obstacle = self._sizes.reason_to_pause(run, row) if run and running else None
        return Pacing(
            state=state,
            revision=self._state.revision,
            current_step=self.trained_steps(run) if run else 0,
            num_steps=run.num_steps if run else 0,
            batch_size=batch_in_sequences(run, row.group_size) if run else 0,
            outstanding_sequences=self.outstanding_sequences(run) if run and running else 0,
            room_sequences=self._room(run, row) if run and running and obstacle is None else 0,
            policy_version=run.policy_version if run else None,
            policy_step=run.policy_step if run else None,
            policy_held_seconds=self._holds.seconds(run) if run else 0.0,
            policy_name=run.policy_name if run else None,
            paused_because=obstacle,
            run_id=run.run_id if run else None,
            epoch=run.epoch if run else None,
        )

    def environment_info(self, row: EnvironmentRow) -> EnvironmentInfo:
        """Return an environment's id and pacing, and the settings of the run that it takes part in."""
        run = self._state.runs.open
        return EnvironmentInfo(
            environment_id=row.environment_id,
            display_name=row.display_name,
            pacing=self.pacing(row),
            run_id=run.run_id if run else None,
            batch_size=batch_in_sequences(run, row.group_size) if run else 0,
            max_token_length=run.max_token_length if run else 0,
            num_steps=run.num_steps if run else 0,
            checkpoint_dir=run.checkpoint_dir if run else "",
            checkpoint_interval=run.checkpoint_interval if run else 0,
            wandb_project=run.wandb_project if run else "",
            wandb_group=run.wandb_group if run else "",
        )

    def environment_state(self, row: EnvironmentRow) -> PacingState:
        """Return the state of an environment's work.

        It is `finished` for environments that took part in the run that ended; one that registered for the next run
        waits.
        """
        run = self._state.runs.open
        if run is not None:
            over = run.legacy and run.num_steps > 0 and run.starting_step + run.handed_batch >= run.num_steps
            return "finished" if over else "run"
        return "finished" if self._state.runs.has_finished(row.run_id) else "wait"

    def run_for(self, row: EnvironmentRow | None) -> str:
        """Return the run that a group belongs to: late groups of a finished run do not go to the next one."""
        run = self._state.runs.open
        if run is not None:
            return run.run_id
        if row is not None and row.run_id is not None and self.environment_state(row) == "finished":
            return row.run_id
        return NO_RUN

    def trained_steps(self, run: RunRow) -> int:
        if run.legacy:
            return run.starting_step + run.handed_batch
        return max(run.policy_step or 0, run.committed_batch)

    def outstanding_sequences(self, run: RunRow) -> int:
        """Count the sequences that are queued, or in formed batches that no policy was trained on yet."""
        batched = sum(group.size for groups in self._untrained(run) for group in groups)
        return self._batches.packable_sequences(run) + batched

    def has_room(self) -> bool:
        run = self._state.runs.open
        if run is None:
            return False
        outstanding, limit = self.budget(run)
        return outstanding < limit

    def budget(self, run: RunRow) -> tuple[int, int]:
        """Return the amount queued or batched, and the amount from which on environments may start no more groups.

        Both are in the run's unit.
        """
        batches = self._state.liveness().most_batches_offpolicy
        return self._outstanding(run), admission_limit(run, batches, max_staleness_of(self._state, run))

    def _outstanding(self, run: RunRow) -> int:
        """Return `outstanding_sequences` in the run's unit."""
        if run.unit == "sequences":
            return self.outstanding_sequences(run)
        queued = in_unit(run, self._state.queue.groups_by_size)
        return queued + sum(amount(run, groups) for groups in self._untrained(run))

    def _untrained(self, run: RunRow) -> list[list[GroupRow]]:
        trained = run.committed_batch if run.legacy else self.trained_steps(run)
        return [groups for number, groups in self._state.batches.items() if number > trained]

    def _room(self, run: RunRow, row: EnvironmentRow) -> int:
        outstanding = self._outstanding(run)
        budget = max_staleness_of(self._state, run)
        remaining = (run.num_steps - self.trained_steps(run)) * run.batch_size - outstanding
        whole_group = row.group_size if run.unit == "sequences" else 1
        room = room_for(
            row,
            self._state.alive_environments(),
            limit=admission_limit(run, row.max_batches_offpolicy, budget),
            outstanding=outstanding,
            still_needed=remaining if run.num_steps > 0 else None,
            at_least=whole_group,
        )
        ended = run.num_steps > 0 and run.starting_step + run.formed_batch >= run.num_steps
        if room <= 0 and not ended and self._batches.is_short_of(run, row):
            # The trainer would wait forever without a group of this environment, so one is admitted to a full queue.
            room = whole_group
        return room * row.group_size // whole_group


def admission_limit(run: RunRow, max_batches_offpolicy: int, max_staleness: int | None) -> int:
    """Return how much may be queued, batched and in flight together, in the run's unit.

    A group begun now at position p of the queue is trained in batch ceil(p / batch_size) from now, so it will be
    ceil(p / batch_size) - 1 steps old: within the budget as long as p is at most (budget + 1) batches.
    """
    batches = max_batches_offpolicy
    if max_staleness is not None:
        batches = min(batches, max_staleness + 1)
    return batches * run.batch_size


def room_for(
    environment: EnvironmentRow,
    alive: Sequence[EnvironmentRow],
    *,
    limit: int,
    outstanding: int,
    still_needed: int | None,
    at_least: int,
) -> int:
    """Return how much `environment` may have in flight: its share of the room by weight, at least `at_least`.

    `at_least` is one whole group. `still_needed` is what the rest of the run can use at all; None if the run has no
    end.
    """
    room = limit - outstanding
    if still_needed is not None:
        room = min(room, still_needed)
    if room <= 0:
        return 0
    weights = {row.environment_id: max(0.0, row.weight) for row in alive}
    weights.setdefault(environment.environment_id, max(0.0, environment.weight))
    total = sum(weights.values())
    share = 1.0 / len(weights) if total <= 0 else weights[environment.environment_id] / total
    return max(int(room * share), at_least)
