"""Succession of runs: one is open at a time, and groups of different runs are never mixed."""

from __future__ import annotations

import logging
from typing import Literal

import msgspec

from atropos_api.broker import runs
from atropos_api.broker.batches import TRAINED, Batches
from atropos_api.broker.pacing import GroupSizes
from atropos_api.broker.packing import amount
from atropos_api.broker.runs import make_run
from atropos_api.broker.state import State
from atropos_api.errors import InvalidRequest, RunInProgress
from atropos_api.store.base import LOST, RunRow
from atropos_api.store.failpoints import Failpoint
from atropos_api.wire.messages import RunRequest

logger = logging.getLogger(__name__)


class RunSuccession:
    """The succession of runs: it opens, resumes and ends them, with an event and a log line for each."""

    def __init__(self, state: State, batches: Batches, sizes: GroupSizes) -> None:
        self._state = state
        self._batches = batches
        self._sizes = sizes

    def begin(self, request: RunRequest) -> RunRow:
        """Begin a run of the v1 contract, or resume the one of that name where the trainer's checkpoint left it."""
        state = self._state
        open_run = state.runs.open
        same = open_run is not None and not open_run.legacy and open_run.name == request.name
        if not (same or request.take_over):
            self.refuse_rival(request.name)
        known = state.runs.find_by_name(request.name) if request.resume else None
        if known is not None and known.policy != request.policy:
            raise InvalidRequest(
                f"{named(known)} trains the policy {known.policy!r}, not {request.policy!r}; resume it with its own",
                field="policy",
                value=request.policy,
            )
        if known is None:
            return self.begin_new(make_run(request, state.clock(), first_after=request.resume_from_batch))
        with state.change():
            run = self._resume(known, request)
            state.reach(Failpoint.RUN_STAGED)
        state.reach(Failpoint.RUN_KEPT)
        logger.info("%s taken over: epoch %d, from batch %d on", named(run), run.epoch, run.committed_batch + 1)
        self._note_begun(run, former=None if open_run is known else open_run)
        return run

    def begin_new(self, run: RunRow) -> RunRow:
        """Close the open run, if any, and open `run`, in one transaction."""
        state = self._state
        former = state.runs.open
        run.began_at = state.runs.time_after_all(run.began_at)
        with state.change():
            if former is not None:
                self._close_open(former, "closed")
            state.runs.keep(run)
            self._adopt_unowned(run)
            self._batches.stop_waiting()
            state.reach(Failpoint.RUN_STAGED)
        state.reach(Failpoint.RUN_KEPT)
        logger.info("%s begun: batches of %d %s, %d steps", named(run), run.batch_size, run.unit, run.num_steps)
        self._note_begun(run, former=former)
        return run

    def refuse_rival(self, name: str) -> None:
        """Raise `RunInProgress` if a trainer of another name is at work on the open run."""
        try:
            runs.refuse_rival(self._state.runs.open, self._state.clock())
        except RunInProgress as error:
            logger.warning("a trainer of run %s was refused: %s", name, error)
            raise

    def finish(self, run: RunRow) -> None:
        """End a run: its environments are asked to stop. Ending it twice is harmless."""
        state = self._state
        if run.state == "finished":
            return
        with state.change():
            if run.state == "open":
                self._close_open(run, "finished")
            else:
                state.runs.change(run, state="finished")
        state.events.add("run-finished", run_id=run.run_id)
        logger.info("%s finished%s", named(run), self._left_of(run))
        state.pacing_changed()

    def close(self, run: RunRow) -> None:
        """Close the open run without a successor; its untrained groups become left over."""
        with self._state.change():
            self._close_open(run, "closed")

    def _note_begun(self, run: RunRow, *, former: RunRow | None) -> None:
        state = self._state
        if former is not None:
            logger.info("%s closed for it%s", named(former), self._left_of(former))
        state.events.add("run-began", run_id=run.run_id, name=run.name, epoch=run.epoch)
        # A new run has no proven server: those of the run before serve another policy's weights.
        state.servers.prove(run.policy, run.policy_servers)
        self._sizes.warn()
        state.pacing_changed()
        state.groups_changed()

    def _adopt_unowned(self, run: RunRow) -> None:
        """Assign the groups that came while no run was open to this run."""
        state = self._state
        queued = [group for lane in state.queue.lanes for group in lane]
        others = [group for group in queued if group.policy not in (None, run.policy)]
        if others:
            self._batches.drop(others, "other-policy")
            state.drops.count(others, "other-policy")
        state.ledger.adopt_groups(run.run_id)
        for group in queued:
            group.run_id = run.run_id

    def _close_open(self, run: RunRow, end: Literal["closed", "finished"]) -> None:
        """Close the open run; its untrained groups stay on disk as left over, and no other run gets them.

        A run that can be resumed keeps the groups that no batch could hold, because its next trainer may ask for larger
        batches.
        """
        state = self._state
        if end == "finished" or run.legacy:
            self._batches.drop_unpackable(run)
        state.runs.change(run, state=end)
        batched = [group for groups in state.batches.values() for group in groups]
        rest = batched + state.queue.clear()
        rest += [group for groups in state.replayable.values() for group in groups]
        state.batches, state.replayable = {}, {}
        state.possibly_delivered.clear()  # the next run's batches have the same numbers
        if rest:
            state.left_over.setdefault(run.run_id, []).extend(rest)
            state.counters.groups_left_over_total += len(rest)
            self._trim_left_over()

    def _resume(self, run: RunRow, request: RunRequest) -> RunRow:
        state = self._state
        if run.state != "open":
            if state.runs.open is not None:
                self._close_open(state.runs.open, "closed")
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
            batches_dir=request.batches_dir,
            wandb_project=request.wandb_project,
            wandb_group=request.wandb_group,
            max_staleness=request.max_staleness,
            committed_batch=point,
            formed_batch=formed,
            handed_batch=point,
            policy_step=min(run.policy_step, point) if run.policy_step is not None else None,
        )
        runs.note_registration(changed, state.clock())
        state.runs.keep(changed)
        state.runs.orphan_policies(run.run_id, point)
        return changed

    def _reopen(self, run: RunRow) -> RunRow:
        """Reopen a closed run with its left-over groups; groups without a run join it."""
        state = self._state
        reopened = state.runs.change(run, state="open")
        queued = []
        for group in state.left_over.pop(run.run_id, []):
            if group.batch > run.committed_batch:
                state.batches.setdefault(group.batch, []).append(group)
            elif group.batch:
                state.replayable.setdefault(group.batch, []).append(group)
            else:
                queued.append(group)
        for groups in state.batches.values():
            groups.sort(key=lambda group: group.seq)
        state.queue.put_back(queued)
        self._adopt_unowned(reopened)
        return reopened

    def _keep_what_follows(self, run: RunRow, point: int) -> None:
        """Keep the batches after the checkpoint while their size still fits; put the other groups back into the queue.

        A trainer that resumes from before its last commit gets the batches that were kept for replay, if any.
        """
        state = self._state
        covered = min(point, run.formed_batch)
        if covered > run.committed_batch:
            self._batches.commit(run, covered)
        for number in [n for n in state.replayable if n > point]:
            state.batches[number] = state.replayable.pop(number)
            trained = (group for group in state.batches[number] if group.body != LOST)
            state.environments.count_outcome(TRAINED, trained, sign=-1)
        last = point
        while last + 1 in state.batches and amount(run, state.batches[last + 1]) == run.batch_size:
            last += 1
        self._batches.dissolve([n for n in state.batches if n > last])

    def _left_of(self, run: RunRow) -> str:
        left = len(self._state.left_over.get(run.run_id, ()))
        return f" after batch {run.committed_batch}, {left} groups are left over"

    def _trim_left_over(self) -> None:
        """Delete left-over groups, oldest run first, to fit `max_left_over_bytes`; the newest run's always stay."""
        state = self._state
        sizes = {run_id: sum(group.body.length for group in rest) for run_id, rest in state.left_over.items()}
        oldest_first = sorted(sizes, key=lambda run_id: state.runs.find(run_id).began_at)
        total = sum(sizes.values())
        for run_id in oldest_first[:-1]:
            if total <= state.settings.max_left_over_bytes:
                return
            total -= sizes[run_id]
            self._batches.forget(state.left_over.pop(run_id), "left-over")


def named(run: RunRow) -> str:
    """Return the name and id by which log lines identify a run."""
    return f"run {run.name} ({run.run_id})"
