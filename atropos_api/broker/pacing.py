"""How much each environment should have under way: as much as can be trained before it is too old, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from atropos_api.broker.batches import Batches, max_staleness_of
from atropos_api.broker.group_sizes import GroupSizes
from atropos_api.broker.holds import Holds
from atropos_api.broker.state import State
from atropos_api.broker.units import amount, batch_in_sequences, in_unit
from atropos_api.store.base import EnvironmentRow, GroupRow, RunRow
from atropos_api.wire.messages import Pacing

PacingState = Literal["wait", "run", "finished"]


class Pacer:
    """What environments are told. Room is reckoned in the run's unit and told in sequences."""

    def __init__(self, state: State, batches: Batches, holds: Holds, sizes: GroupSizes) -> None:
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
        )

    def environment_state(self, row: EnvironmentRow) -> PacingState:
        """`finished` is told to those that took part in the run that ended, not to those that came for the next."""
        run = self._state.runs.open
        if run is not None:
            over = run.legacy and run.num_steps > 0 and run.starting_step + run.handed_batch >= run.num_steps
            return "finished" if over else "run"
        return "finished" if self._state.runs.has_finished(row.run_id) else "wait"

    def trained_steps(self, run: RunRow) -> int:
        if run.legacy:
            return run.starting_step + run.handed_batch
        return max(run.policy_step or 0, run.committed_batch)

    def outstanding_sequences(self, run: RunRow) -> int:
        """Queued, or in formed batches that no policy was trained on yet."""
        batched = sum(group.size for groups in self._untrained(run) for group in groups)
        return self._batches.packable_sequences(run) + batched

    def has_room(self) -> bool:
        run = self._state.runs.open
        if run is None:
            return False
        batches = self._state.census().most_batches_offpolicy
        return self._outstanding(run) < admission_limit(run, batches, max_staleness_of(self._state, run))

    def _outstanding(self, run: RunRow) -> int:
        """As `outstanding_sequences`, in the run's unit."""
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
            # Full or not, without a group of this environment the trainer would wait for ever.
            room = whole_group
        return room * row.group_size // whole_group


def admission_limit(run: RunRow, max_batches_offpolicy: int, max_staleness: int | None) -> int:
    """What may be queued, batched and in flight together, in the run's unit.

    What is begun now at place p of the line is trained in batch ceil(p / batch_size) from now, so it will be
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
    """What `environment` may have in flight: its share of the room by weight, `at_least` a whole group.

    `still_needed` is what the rest of the run can use at all; None if the run has no end.
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
