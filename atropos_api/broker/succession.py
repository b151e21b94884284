"""How runs follow one another: one is open at a time, and what belongs to the others is never mixed in."""

from __future__ import annotations

from typing import Literal

import msgspec

from atropos_api.broker.batches import Batches
from atropos_api.broker.state import State
from atropos_api.broker.units import amount
from atropos_api.store.base import RunRow
from atropos_api.wire.messages import RunRequest


class Succession:
    """Opens, closes and resumes runs; the caller gives the transaction."""

    def __init__(self, state: State, batches: Batches) -> None:
        self._state = state
        self._batches = batches

    def open_new(self, run: RunRow) -> RunRow:
        state = self._state
        if state.runs.open is not None:
            self.close_open(state.runs.open, "closed")
        state.runs.keep(run)
        self._adopt_unowned(run)
        self._batches.stop_waiting()
        return run

    def _adopt_unowned(self, run: RunRow) -> None:
        """Groups that came while no run was open are this run's."""
        self._state.ledger.adopt_groups(run.run_id)
        for lane in self._state.queue.lanes:
            for group in lane:
                group.run_id = run.run_id

    def close_open(self, run: RunRow, end: Literal["closed", "finished"]) -> None:
        """What the run did not train stays on disk as left over, and is served to no other.

        A run that can be resumed keeps what no batch could hold, for its next trainer may ask for larger ones.
        """
        state = self._state
        if end == "finished" or run.legacy:
            self._batches.drop_unpackable(run)
        state.runs.change(run, state=end)
        batched = [group for groups in state.batches.values() for group in groups]
        rest = batched + state.queue.clear()
        rest += [group for groups in state.kept.values() for group in groups]
        state.batches, state.kept = {}, {}
        if rest:
            state.left_over.setdefault(run.run_id, []).extend(rest)
            state.counters.groups_left_over_total += len(rest)
            self._trim_left_over()

    def resume(self, run: RunRow, request: RunRequest) -> RunRow:
        state = self._state
        if run.state != "open":
            if state.runs.open is not None:
                self.close_open(state.runs.open, "closed")
            run = self._reopen(run)
        point = request.resume_from_batch
        run = state.runs.change(run, batch_size=request.batch_size, unit=request.unit)
        self._keep_what_follows(run, point)
        self._batches.stop_waiting()
        run = state.runs.require_open()
        formed = max(state.batches, default=point)
        changed = msgspec.structs.replace(
            run,
            epoch=run.epoch + 1,
            max_token_length=request.max_token_length,
            num_steps=request.num_steps,
            checkpoint_dir=request.checkpoint_dir,
            checkpoint_interval=request.checkpoint_interval,
            wandb_project=request.wandb_project,
            wandb_group=request.wandb_group,
            max_staleness=request.max_staleness,
            committed_batch=point,
            formed_batch=formed,
            handed_batch=point,
            policy_step=min(run.policy_step, point) if run.policy_step is not None else None,
        )
        state.runs.keep(changed)
        state.runs.orphan_policies(run.run_id, point)
        return changed

    def _reopen(self, run: RunRow) -> RunRow:
        """Open a closed run again with what it left over; unowned groups join it."""
        state = self._state
        reopened = state.runs.change(run, state="open")
        queued = []
        for group in state.left_over.pop(run.run_id, []):
            if group.batch > run.committed_batch:
                state.batches.setdefault(group.batch, []).append(group)
            elif group.batch:
                state.kept.setdefault(group.batch, []).append(group)
            else:
                queued.append(group)
        for groups in state.batches.values():
            groups.sort(key=lambda group: group.seq)
        state.queue.put_back(queued)
        self._adopt_unowned(reopened)
        return reopened

    def _keep_what_follows(self, run: RunRow, point: int) -> None:
        """Batches after the checkpoint stay as they are while their size still fits; the rest goes back into the queue.

        A trainer that comes back to before its last commit gets the batches that were kept for replay, if any.
        """
        state = self._state
        covered = min(point, run.formed_batch)
        if covered > run.committed_batch:
            self._batches.commit(run, covered)
        for number in [n for n in state.kept if n > point]:
            state.batches[number] = state.kept.pop(number)
        last = point
        while last + 1 in state.batches and amount(run, state.batches[last + 1]) == run.batch_size:
            last += 1
        self._batches.dissolve([n for n in state.batches if n > last])

    def _trim_left_over(self) -> None:
        """Left-over groups are deleted, oldest run first, once they take more than their share of the disk."""
        state = self._state
        sizes = {run_id: sum(group.body.length for group in rest) for run_id, rest in state.left_over.items()}
        oldest_first = sorted(sizes, key=lambda run_id: state.runs.find(run_id).began_at)
        total = sum(sizes.values())
        for run_id in oldest_first[:-1]:
            if total <= state.settings.max_left_over_bytes:
                return
            total -= sizes[run_id]
            self._batches.forget(state.left_over.pop(run_id))
