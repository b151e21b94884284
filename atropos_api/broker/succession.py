"""How runs follow one another: one is open at a time, and what belongs to the others is never mixed in."""

from __future__ import annotations

from typing import Literal

import msgspec

from atropos_api.broker.batches import Batches
from atropos_api.broker.state import State
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
        return run

    def _adopt_unowned(self, run: RunRow) -> None:
        """Groups that came while no run was open are this run's."""
        self._state.ledger.adopt_groups(run.run_id)
        for lane in self._state.queue.lanes:
            for group in lane:
                group.run_id = run.run_id

    def close_open(self, run: RunRow, end: Literal["closed", "finished"]) -> None:
        """What the run did not train stays on disk as left over, and is served to no other."""
        state = self._state
        state.runs.change(run, state=end)
        batched = [group for groups in state.batches.values() for group in groups]
        rest = batched + state.queue.clear()
        rest += [group for groups in state.kept.values() for group in groups]
        state.batches, state.kept = {}, {}
        if rest:
            state.left_over.setdefault(run.run_id, []).extend(rest)
            state.counters.groups_left_over_total += len(rest)

    def resume(self, run: RunRow, request: RunRequest) -> RunRow:
        state = self._state
        if run.state != "open":
            if state.runs.open is not None:
                self.close_open(state.runs.open, "closed")
            run = self._reopen(run)
        point = request.resume_from_batch
        self._keep_what_follows(run, point, request.batch_size)
        formed = max(state.batches, default=point)
        changed = msgspec.structs.replace(
            run,
            epoch=run.epoch + 1,
            batch_size=request.batch_size,
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

    def _keep_what_follows(self, run: RunRow, point: int, batch_size: int) -> None:
        """Formed batches after the checkpoint stay as they are if their size still fits; the rest is settled."""
        if run.committed_batch < point <= run.formed_batch:
            self._batches.commit(run, point)
        following = sorted(n for n in self._state.batches if n > point)
        unfit = {n for n in following if sum(group.size for group in self._state.batches[n]) != batch_size}
        rewound = point < run.committed_batch
        first_gap = min(unfit, default=None)
        dissolved = [n for n in following if rewound or (first_gap is not None and n >= first_gap)]
        self._batches.dissolve(dissolved)
