"""The training loop, the same for every weight bridge.

Batch n is step n. What follows a step (`learning.tail`) keeps one order, so that a crash between any two parts leaves
something that a resume repeats harmlessly: publish the weights, tell the broker the version, write the checkpoint if
one is due, commit what it covers.

```
          batch n+1 is fetched and laid out (thread)
main:     take n ─ forward/backward n ─ [join tail n-1] ─ optimizer step n ─┐
tail n:                                                 publish ─ announce ─ checkpoint ─ commit
```

With `--overlap-publish` the tail of step n runs in a thread beside forward and backward of batch n + 1 and is joined
before the weights move again; otherwise it runs in place. It only reads the masters, and so does the forward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from atropos_api.common import metric_names as names
from atropos_api.wire import Batch, RunRequest
from example_trainer.api import BatchFeed, BrokerSession
from example_trainer.checkpointing import (
    TrainerState,
    find_checkpoint,
    read_state,
    refuse_changed_settings,
    restore,
)
from example_trainer.data import data_settings, prepare_batch, report_logprobs
from example_trainer.learning import step_log
from example_trainer.learning.alignment import Alignment
from example_trainer.learning.batch_facts import PreparedBatch, describe
from example_trainer.learning.layout import choose_layout
from example_trainer.learning.objective import make_objective
from example_trainer.learning.tail import Progress, Tail
from example_trainer.running.health import ANY_SIGN, HealthEvent, HealthMonitor
from example_trainer.running.optimizers import make_optimizer, optimizer_settings
from example_trainer.running.trackers import Tracker
from example_trainer.training import Learner, StopRequestedError, learner_settings

if TYPE_CHECKING:
    from example_trainer.config import TrainingConfig
    from example_trainer.weights.bridge import WeightBridge

logger = logging.getLogger(__name__)


class Trainer:
    """Runs one training run from its first to its last batch; see the module's docstring."""

    def __init__(
        self,
        config: TrainingConfig,
        *,
        session: BrokerSession,
        bridge: WeightBridge,
        tracker: Callable[[int | None], Tracker],
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config = config
        self.progress = Progress()
        self.stopped_by: HealthEvent | None = None
        """The sign that ended the run, where `--stop-on` asks for that."""
        self._session = session
        self._bridge = bridge
        self._make_tracker = tracker
        self._should_stop = should_stop
        self._health = HealthMonitor()
        self._learner: Learner
        self._alignment: Alignment
        self._tail: Tail
        self._tracker: Tracker

    def run(self) -> bool:
        """`set_up`, then `train`."""
        self.set_up()
        return self.train()

    def train(self) -> bool:
        """Train to the last step; False when it was stopped before, with a checkpoint of where it stood."""
        try:
            finished = self._train()
            self._tail.finish(finished)
        finally:
            self._tracker.close()
        return finished

    def set_up(self) -> None:
        """Wait for broker and server, load or resume the policy, and publish the run's first version."""
        config, progress = self.config, self.progress
        self._session.wait_until_ready(config.wait_timeout)
        checkpoint = find_checkpoint(config.resume, config.checkpoint_root)
        state = None if checkpoint is None else read_state(checkpoint)
        if state is not None:
            refuse_changed_settings(state, config)
        info = self._session.begin(_run_request(config, state))
        self._build()
        progress.version = max(info.highest_policy_version, self._bridge.highest_version())
        if checkpoint is not None and state is not None:
            self._resume(checkpoint, state)
        self._tracker = self._make_tracker(None if state is None else state.step)
        self._tail.publish()

    def _build(self) -> None:
        """The policy in place, and what works on it."""
        config = self.config
        policy = self._bridge.prepare()
        optimizer = make_optimizer(policy.masters.values(), optimizer_settings(config))
        self._learner = Learner(
            policy,
            optimizer,
            learner_settings(config),
            objective=make_objective(config, policy),
            layout=choose_layout(policy),
        )
        self._alignment = Alignment(
            self._learner,
            keep=config.keep_versions,
            sample_sequences=config.alignment_sample_sequences,
            seed=config.seed,
        )
        self._tail = Tail(
            config,
            self.progress,
            learner=self._learner,
            alignment=self._alignment,
            session=self._session,
            bridge=self._bridge,
            should_stop=self._should_stop,
        )

    def _resume(self, checkpoint: Path, state: TrainerState) -> None:
        objective = restore(checkpoint, self._learner.policy, self._learner.optimizer)
        if objective is not None:
            self._learner.objective.load_state(objective)
        progress = self.progress
        progress.step = progress.weights_step = progress.committed = progress.checkpointed = state.step
        progress.version = max(progress.version, state.highest_version)
        progress.steps_by_version = {int(version): step for version, step in state.steps_by_version.items()}
        self._learner.updates = state.updates
        logger.info("resumed from %s: step %d", checkpoint, state.step)

    def _train(self) -> bool:
        """The loop over steps; False when a stop was asked for."""
        feed = self._make_feed()
        try:
            return all(self._step(step, feed) for step in range(self.progress.step + 1, self.config.training_steps + 1))
        except StopRequestedError:
            return False
        finally:
            feed.close()

    def _step(self, step: int, feed: BatchFeed[PreparedBatch]) -> bool:
        clock = step_log.StepClock()
        prepared = feed.take(step)
        if prepared is None or self._should_stop():
            return False
        clock.fetched()
        batch = prepared.training
        older = self._alignment.score_older(batch)
        result = self._learner.train(
            batch, before_update=partial(clock.waiting, self._tail.join), should_stop=self._should_stop
        )
        metrics = prepared.metrics | step_log.measure(batch, result, self.progress)
        metrics |= self._alignment.measure(batch, result, older)
        clock.trained()
        self._tail.join()
        self.progress.step = step
        if result.updates:
            self.progress.weights_step = step
            self._alignment.moved()
        self._tail.run(step)
        metrics |= clock.metrics(sampled_tokens=sum(batch.response_lengths), trained_tokens=len(batch.targets))
        self._log(step, metrics)
        return self.stopped_by is None

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        metrics[names.POLICY_VERSION] = self.progress.version
        metrics |= step_log.publish_metrics(self._tail.report)
        metrics |= step_log.memory_metrics(self._learner.policy.device)
        self._tracker.log(step, metrics)
        step_log.say(step, self.config.training_steps, metrics)
        for event in self._health.check(step, metrics):
            logger.warning("step %d: %s; %s", step, event.message, event.advice)
            self._tracker.event(event)
            if {ANY_SIGN, event.sign} & set(self.config.stop_on or ()):
                self.stopped_by = event

    def _make_feed(self) -> BatchFeed[PreparedBatch]:
        settings = data_settings(self.config)
        first = self.progress.step + 1

        def prepare(batch: Batch) -> PreparedBatch:
            if batch.number == first:
                report_logprobs(batch)
            return describe(batch, prepare_batch(batch, settings))

        return BatchFeed(
            self._session.get_batch,
            prepare,
            last=self.config.training_steps,
            prefetch=self.config.prefetch,
            timeout_seconds=self.config.batch_timeout,
            should_stop=self._should_stop,
            on_idle=self._tail.publish_if_needed,
        )


def _run_request(config: TrainingConfig, state: TrainerState | None) -> RunRequest:
    return RunRequest(
        name=config.name,
        batch_size=config.sequences_per_batch,
        max_token_length=config.seq_len,
        num_steps=config.training_steps,
        resume=state is not None,
        resume_from_batch=0 if state is None else state.batch,
        checkpoint_dir=str(config.checkpoint_root),
        checkpoint_interval=config.checkpoint_interval,
        wandb_project=config.wandb_project or "",
        wandb_group=config.wandb_group or "",
        world_size=config.world_size,
        max_staleness=config.max_staleness,
    )
