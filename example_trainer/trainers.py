"""The training loop, the same for every weight bridge.

Batch n is step n. The post-step (`step.post_step`) keeps one order, so that a resume after a crash between any two
parts can safely repeat them: publish the weights, tell the broker the version, write the checkpoint if one is due,
commit what it covers.

```
             batch n+1 is fetched and prepared (thread)
main:        take n ─ forward/backward n ─ [join post-step n-1] ─ optimizer step n ─┐
post-step n:                                                 publish ─ announce ─ checkpoint ─ commit
```

With `--overlap-publish` the post-step of step n runs in a thread during forward and backward of batch n + 1 and is
joined before the weights change again; otherwise it runs in place. It only reads the masters, as the forward does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atropos_api.common import metric_names as names
from atropos_api.common.errors import AtroposError
from atropos_api.common.tracing import NO_TRACING, Span, Tracing, running
from atropos_api.wire import Batch, RunRequest
from example_trainer.api import BatchFeed, BrokerSession, batch_path, write_batch
from example_trainer.checkpointing import begun_version, continue_at, find_checkpoint, note_begun, read_state
from example_trainer.data import report_logprobs
from example_trainer.distributed.ranks import Ranks
from example_trainer.errors import WaitStopped
from example_trainer.monitoring.broker_reports import RunReporter
from example_trainer.monitoring.health import ANY_SIGN, HealthEvent, HealthMonitor, parse_limits
from example_trainer.monitoring.trackers import METRICS_FILE, ROLLOUTS, RunTrackers, Tracker, TrackerSet, last_line
from example_trainer.resume_settings import refuse_changed_settings
from example_trainer.state import Phases, Progress, TrainerState
from example_trainer.step import metrics as step_metrics
from example_trainer.step.metrics import PreparedBatch, StepClock
from example_trainer.step.post_step import PostStep
from example_trainer.step.start_check import refuse_unusable
from example_trainer.step.token_values import TokenTexts, record_batch
from example_trainer.step.train_step import StepTraining, TrainStep, make_train_step
from example_trainer.training import StopRequestedError

if TYPE_CHECKING:
    from example_trainer.config import TrainingConfig
    from example_trainer.weights.base import WeightBridge

logger = logging.getLogger(__name__)

_PUBLISH, _BATCH, _STOP = "publish", "batch", "stop"
"""The tasks that rank 0 gives the others while a batch is awaited: publish with it, take a share, or stop."""


class Trainer:
    """The training loop of one run: it trains from the first to the last batch; see the module's docstring."""

    def __init__(
        self,
        config: TrainingConfig,
        *,
        session: BrokerSession,
        bridge: WeightBridge,
        trackers: RunTrackers,
        should_stop: Callable[[], bool] = lambda: False,
        ranks: Ranks | None = None,
        reporter: RunReporter | None = None,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        """Keep the arguments; `reporter` sends what the page shows, and belongs to rank 0."""
        self.config = config
        self._ranks = ranks or Ranks()
        self.progress = Progress()
        self.stopped_by: HealthEvent | None = None
        """The health sign that ended the run through `--stop-on`; None if none did."""
        self._session = session
        self._bridge = bridge
        self._trackers = trackers
        self._tracing = tracing
        self._should_stop = should_stop
        self._reporter = reporter
        self._phases = Phases() if reporter is None else reporter.phases
        self._texts = TokenTexts(config.model_name)
        self._health = HealthMonitor(parse_limits(config.health_limits or ()))
        self._train_step: TrainStep
        self._post_step: PostStep
        self._tracker: Tracker

    def run(self) -> bool:
        """Call `set_up`, then `train`."""
        self.set_up()
        return self.train()

    def train(self) -> bool:
        """Train to the last step; return False if the run was stopped earlier, after writing a checkpoint."""
        try:
            finished = self._train()
            self._post_step.finish(finished)
        except AtroposError as error:
            self._post_step.keep_steps(error)
            raise
        finally:
            self._tracker.close()
        return finished

    def log_fields(self) -> dict[str, str | int | None]:
        """Return run, step and policy version, for log records."""
        info = self._session.begun
        return {
            "run": self.config.name,
            "run_id": None if info is None else info.run_id,
            "step": self.progress.step,
            "policy_version": self.progress.version or None,
        }

    def set_up(self) -> None:
        """Wait for broker and server, load or resume the policy, and publish the run's first version."""
        config = self.config
        refuse_unusable(config)
        self._session.wait_until_ready(config.wait_timeout)
        checkpoint = self._ranks.on_main(lambda: find_checkpoint(config.resume, config.checkpoint_root))
        state = None if checkpoint is None else read_state(checkpoint)
        if state is not None:
            refuse_changed_settings(state, config)
        used_version = None if config.resume is None else self._ranks.on_main(lambda: begun_version(config))
        resumes = state is not None or used_version is not None
        self._ranks.on_main(self._trackers.open)
        try:
            self._begin(checkpoint, state, used_version, resumes=resumes)
        except BaseException:
            self._trackers.close()
            raise

    def _begin(
        self, checkpoint: Path | None, state: TrainerState | None, used_version: int | None, *, resumes: bool
    ) -> None:
        """Begin the run at the broker, after `set_up`'s checks; load the policy and publish the first version."""
        config = self.config
        info = self._session.begin(_run_request(config, state, resumes=resumes))
        self._ranks.on_main(lambda: note_begun(config, info.run_id, used_version or 0))
        self._build()
        self.progress.version = max(info.highest_policy_version, self._bridge.highest_version(), used_version or 0)
        if checkpoint is not None and state is not None:
            self._train_step.resume(checkpoint, state)
            # Only once it is loaded: `--resume auto` takes the checkpoint that this records, so it must be usable.
            self._ranks.on_main(partial(continue_at, config.checkpoint_root, checkpoint))
        self._tracker = self._trackers.at(self.progress.step if resumes else None)
        if self._reporter is not None:
            self._reporter.begin(info.run_id, info.epoch)
            self._tracker = TrackerSet([self._tracker, self._reporter])
        if state is not None:
            self._ranks.on_main(partial(self._catch_up, state))
        self._post_step.publish()

    def _build(self) -> None:
        """Load the policy through the bridge, and build the train step and the post-step that work on it."""
        config = self.config
        self._train_step = train_step = make_train_step(config, self._bridge.prepare(), self._ranks)
        self.progress = train_step.progress
        self._post_step = PostStep(
            config,
            self.progress,
            learner=train_step.learner,
            alignment=train_step.alignment,
            session=self._session,
            bridge=self._bridge,
            phases=self._phases,
            should_stop=self._all_should_stop,
        )

    def _train(self) -> bool:
        """Run the loop over steps; return False if a stop was requested."""
        feed = self._make_feed()
        try:
            return all(self._step(step, feed) for step in range(self.progress.step + 1, self.config.training_steps + 1))
        except (StopRequestedError, WaitStopped):
            return False
        finally:
            feed.close()

    def _step(self, step: int, feed: BatchFeed[PreparedBatch]) -> bool:
        """Run one step, from its batch to its line of metrics; return False if the run ends with it."""
        with running(self._tracing.begin("step", run=self.config.name, step=step)) as span:
            return self._traced_step(step, feed, span)

    def _traced_step(self, step: int, feed: BatchFeed[PreparedBatch], span: Span) -> bool:
        clock, learner = StepClock(), self._train_step.learner
        self._phases.step = step
        with self._phases.during("fetch"), span.child("fetch"):
            prepared = self._take(step, feed)
        if self._ranks.any(prepared is None or self._should_stop()):
            return False
        assert prepared is not None
        clock.fetched()
        with self._phases.during("train"), span.child("train"):
            training = self._train_step.begin(prepared, self._all_should_stop)
            for mini_batch in training.batch.mini_batches:
                gradients = learner.accumulate(training.batch, mini_batch)
                with clock.waiting():
                    self._post_step.wait()  # weights must not change while the last publish reads them
                learner.apply(gradients)
            metrics = self._train_step.finish(training)
        clock.trained()
        self._record(training)
        self.progress.metrics, self.progress.health = dict(metrics), self._health.memory()
        self._post_step.start(step)
        metrics |= clock.metrics(prepared.whole)
        if self._tracing.is_on:
            self._trace_groups(step, prepared.traceparents, clock, span)
        sign = self._ranks.on_main(partial(self._log, step, metrics))
        self.stopped_by = None if sign is None else HealthEvent(**sign)
        return self.stopped_by is None

    def _record(self, training: StepTraining) -> None:
        """Let the reporter record some of the batch's tokens, in its own thread."""
        if self._reporter is not None and self.config.recorded_tokens:
            self._reporter.record(
                partial(
                    record_batch,
                    training,
                    self._texts,
                    most_tokens=self.config.recorded_tokens,
                    rank=self._ranks.data.rank,
                    world_size=self._ranks.data.world_size,
                )
            )

    def _trace_groups(self, step: int, traceparents: Sequence[str], clock: StepClock, step_span: Span) -> None:
        """Record the step in the trace of each of its groups, and refer from one to the other."""
        step_span.link(traceparents)
        for traceparent in traceparents:
            span = self._tracing.begin(
                "step", parent=traceparent, at_seconds=clock.fetched_at, run=self.config.name, step=step
            )
            if step_span.traceparent is not None:
                span.link([step_span.traceparent])
            span.end()

    def _take(self, step: int, feed: BatchFeed[PreparedBatch]) -> PreparedBatch | None:
        """Return batch `step` once rank 0 has its share; until then the other ranks join rank 0 in publishes.

        Such a publish is needed when a server restarts while a batch is awaited. If rank 0 is to stop, the others do
        not wait for a batch that may never be filled; if it gets none, they are told, and all write a checkpoint.
        """
        if self._ranks.is_main:
            taken: list[PreparedBatch | None] = []

            def take() -> str:
                taken.append(feed.take(step))
                return _STOP if taken[0] is None else _BATCH

            self._ranks.on_main(take)
            return taken[0]
        while (task := self._ranks.on_main(lambda: _PUBLISH)) == _PUBLISH:
            self._post_step.publish()
        return feed.take(step) if task == _BATCH else None

    def _while_waiting(self) -> None:
        if self._ranks.is_main and self._post_step.needs_publish():
            self._ranks.on_main(lambda: _PUBLISH)
            self._post_step.publish()

    def _all_should_stop(self) -> bool:
        return self._ranks.any(self._should_stop())

    def _log(self, step: int, metrics: dict[str, float]) -> dict[str, Any] | None:
        """Log a step; return the fields of the first health event that ends the run, or None."""
        stopped_by: HealthEvent | None = None
        metrics[names.POLICY_VERSION] = self.progress.version
        metrics |= step_metrics.publish_metrics(self._post_step.report)
        metrics |= step_metrics.memory_metrics(self._train_step.learner.policy.device)
        self._tracker.log(step, metrics)
        step_metrics.log_step(step, self.config.training_steps, metrics)
        for event in self._health.check(step, metrics):
            logger.warning("step %d: %s; %s", step, event.message, event.advice)
            self._tracker.event(event)
            if {ANY_SIGN, event.sign} & set(self.config.stop_on or ()):
                stopped_by = stopped_by or event
        return None if stopped_by is None else asdict(stopped_by)

    def _catch_up(self, state: TrainerState) -> None:
        """Check the health of the step resumed from, and log it if a crash came between its checkpoint and its log."""
        if state.health:
            self._health.remember(state.health)
        line = last_line(self.config.required_run_dir / METRICS_FILE)
        events = self._health.check(state.step, line if line[names.STEP] == state.step else state.metrics)
        if line[names.STEP] == state.step - 1:
            self._tracker.log(state.step, state.metrics)
            for event in events:
                self._tracker.event(event)

    def _make_feed(self) -> BatchFeed[PreparedBatch]:
        first = self.progress.step + 1

        def prepare(batch: Batch) -> PreparedBatch:
            if batch.number == first:
                report_logprobs(batch)
            if self.config.save_batches and self.config.trainer_rank % self.config.trainer_tensor_parallel_size == 0:
                write_batch(self._batch_path(batch.number), batch)
            return self._train_step.prepare(batch, self._session.whole_batch(batch))

        return BatchFeed(
            self._session.get_batch,
            prepare,
            last=self.config.training_steps,
            prefetch=self.config.prefetch,
            timeout_seconds=self.config.batch_timeout,
            should_stop=self._should_stop,
            on_idle=self._while_waiting,
            explain=self._session.explain_wait,
        )

    def _batch_path(self, number: int) -> Path:
        config = self.config
        ranks = self._ranks.data
        return batch_path(_batches_dir(config), number, rank=ranks.rank, world_size=ranks.world_size)


def _run_request(config: TrainingConfig, state: TrainerState | None, *, resumes: bool) -> RunRequest:
    """Return the request that begins the run at the broker.

    A run interrupted before its first checkpoint resumes from batch 0, so that its batches are delivered again.
    """
    return RunRequest(
        name=config.name,
        batch_size=config.sequences_per_batch,
        max_token_length=config.seq_len,
        num_steps=config.training_steps,
        resume=resumes,
        take_over=config.take_over,
        resume_from_batch=0 if state is None else state.batch,
        checkpoint_dir=str(config.checkpoint_root),
        checkpoint_interval=config.checkpoint_interval,
        wandb_project=config.wandb_project or "",
        wandb_group=config.wandb_group or "",
        world_size=config.world_size,
        max_staleness=config.max_staleness,
        policy=config.policy,
        batches_dir=str(_batches_dir(config).absolute()) if config.save_batches else "",
    )


def _batches_dir(config: TrainingConfig) -> Path:
    return config.required_run_dir / ROLLOUTS
