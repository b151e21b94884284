"""The training loop, the same for every weight bridge.

Batch n is step n. What follows a step keeps one order, so that a crash between any two parts leaves something that
a resume repeats harmlessly: publish the weights, tell the broker the version, write the checkpoint if one is due,
commit what it covers.

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
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from atropos_api.common import metric_names as names
from atropos_api.wire import Batch, RunRequest
from example_trainer.api import BackgroundCall, BatchFeed, BrokerSession
from example_trainer.checkpointing import (
    RandomState,
    TrainerState,
    find_checkpoint,
    random_state,
    read_state,
    remembered,
    restore,
    save_checkpoint,
)
from example_trainer.data import TrainingBatch, data_settings, prepare_batch, report_logprobs
from example_trainer.learning.alignment import Alignment
from example_trainer.learning.layout import choose_layout
from example_trainer.objective.metrics import reward_metrics, staleness_metrics
from example_trainer.running.optimizers import make_optimizer, optimizer_settings
from example_trainer.running.trackers import Tracker
from example_trainer.training import Learner, StepResult, StopRequestedError, learner_settings

if TYPE_CHECKING:
    import torch

    from example_trainer.config import TrainingConfig
    from example_trainer.model import Policy
    from example_trainer.weights.bridge import PublishReport, WeightBridge

logger = logging.getLogger(__name__)

FLAT_REWARD_STEPS = 5
HOLD_POLL_SECONDS = 5.0


@dataclass(kw_only=True, slots=True)
class Progress:
    """What the run has done so far; all a checkpoint must remember besides weights and optimizer."""

    step: int = 0
    version: int = 0
    """Of the last publish."""
    published_step: int | None = None
    """The step whose weights were published last."""
    weights_step: int = 0
    """The step that changed the weights last."""
    committed: int = 0
    checkpointed: int | None = None
    skipped_in_a_row: int = 0


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
        self.steps_by_version: dict[int, int] = {}
        self._session = session
        self._bridge = bridge
        self._make_tracker = tracker
        self._should_stop = should_stop
        self._tail: BackgroundCall[None] | None = None
        self._report: PublishReport | None = None
        self._learner: Learner
        self._alignment: Alignment
        self._tracker: Tracker

    def run(self) -> bool:
        """`set_up`, then `train`."""
        self.set_up()
        return self.train()

    def train(self) -> bool:
        """Train to the last step; False when it was stopped before, with a checkpoint of where it stood."""
        try:
            finished = self._train()
            self._join_tail()
            self._finish(finished)
        finally:
            self._tracker.close()
        return finished

    def set_up(self) -> None:
        """Wait for broker and server, load or resume the policy, and publish the run's first version."""
        config, progress = self.config, self.progress
        self._session.wait_until_ready(config.wait_timeout)
        checkpoint = find_checkpoint(config.resume, config.checkpoint_root)
        state = None if checkpoint is None else read_state(checkpoint)
        info = self._session.begin(_run_request(config, state))
        policy = self._bridge.prepare()
        optimizer = make_optimizer(policy.masters.values(), optimizer_settings(config))
        self._learner = Learner(policy, optimizer, learner_settings(config), layout=choose_layout(policy))
        self._alignment = Alignment(
            self._learner,
            keep=config.keep_versions,
            sample_sequences=config.alignment_sample_sequences,
            seed=config.seed,
        )
        highest = max(info.highest_policy_version, self._bridge.highest_version())
        if checkpoint is not None and state is not None:
            self._resume(checkpoint, state, policy, optimizer)
            highest = max(highest, state.highest_version)
        progress.version = highest
        self._tracker = self._make_tracker(None if state is None else state.step)
        self._publish()

    def _resume(self, checkpoint: Path, state: TrainerState, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
        restore(checkpoint, policy, optimizer)
        progress = self.progress
        progress.step = progress.weights_step = progress.committed = progress.checkpointed = state.step
        self._learner.updates = state.updates
        self.steps_by_version = {int(version): step for version, step in state.steps_by_version.items()}
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

    def _step(self, step: int, feed: BatchFeed[TrainingBatch]) -> bool:
        started = time.monotonic()
        batch = feed.take(step)
        if batch is None or self._should_stop():
            return False
        fetched = time.monotonic()
        older = self._alignment.score_older(batch)
        waited = _Stopwatch()
        result = self._learner.train(
            batch, before_update=partial(waited.time, self._join_tail), should_stop=self._should_stop
        )
        metrics = self._measure(batch, result) | self._alignment.measure(batch, result, older)
        trained = time.monotonic()
        self._join_tail()
        self.progress.step = step
        if result.updates:
            self.progress.weights_step = step
            self._alignment.moved()
        self._run_tail(step)
        metrics |= _times(started, fetched, trained, waited.seconds, sum(batch.response_lengths))
        self._log(step, metrics)
        return True

    def _make_feed(self) -> BatchFeed[TrainingBatch]:
        settings = data_settings(self.config)
        first = self.progress.step + 1

        def prepare(batch: Batch) -> TrainingBatch:
            if batch.number == first:
                report_logprobs(batch)
            return prepare_batch(batch, settings)

        return BatchFeed(
            self._session.get_batch,
            prepare,
            last=self.config.training_steps,
            prefetch=self.config.prefetch,
            timeout_seconds=self.config.batch_timeout,
            should_stop=self._should_stop,
            on_idle=self._publish_if_needed,
        )

    # What follows a step

    def _run_tail(self, step: int) -> None:
        """Publish, announce, checkpoint and commit, beside the next batch if that is asked for."""
        publish = self._is_publish_due(step) and not self._is_held(step)
        if publish:
            self._take_version()
        state = self._state() if self._is_checkpoint_due(step) else None
        tail = partial(self._do_tail, step, publish, state, random_state())
        if self.config.overlap_publish:
            self._tail = BackgroundCall(tail, name=f"publish-{step}")
        else:
            tail()

    def _do_tail(self, step: int, publish: bool, state: TrainerState | None, random: RandomState) -> None:
        if publish:
            self._publish_taken()
        else:
            # The version stays as old as it is; the broker must know the step, or environments wait for it.
            self._session.announce_policy(self.progress.version, step)
        if state is not None:
            self._save(state, random)
        if state is not None or self.config.checkpoint_interval == 0:
            # Without checkpoints on the way there is nothing to come back to, so nothing is kept for it.
            self._session.commit(step)
            self.progress.committed = step

    def _join_tail(self) -> None:
        tail, self._tail = self._tail, None
        if tail is not None:
            tail.result()

    def _is_publish_due(self, step: int) -> bool:
        progress = self.progress
        if progress.published_step is not None and progress.weights_step <= progress.published_step:
            return False
        since = step - (progress.published_step or 0)
        if step == self.config.training_steps:
            return True
        if since < self.config.publish_interval:
            return False
        return not self.config.forwards_from_masters or self._bridge.should_publish(since)

    def _is_held(self, step: int) -> bool:
        """Whether an evaluation holds the policy; where these weights must be served to go on, its end is awaited."""
        seconds = self._session.held_seconds()
        if seconds <= 0:
            return False
        logger.info("step %d: an evaluation holds the policy for up to %.0f s more", step, seconds)
        if self.config.forwards_from_masters and step < self.config.training_steps:
            return True
        while self._session.held_seconds(HOLD_POLL_SECONDS) > 0 and not self._should_stop():
            pass
        return False

    def _is_checkpoint_due(self, step: int) -> bool:
        interval = self.config.checkpoint_interval
        return interval > 0 and step % interval == 0

    def _publish_if_needed(self) -> None:
        """While a batch is awaited: a server that has restarted serves nothing until it is published to again."""
        if self._tail is not None and not self._tail.wait(0):
            return
        self._join_tail()
        if self._bridge.needs_publish():
            logger.info("the server has no policy; publishing again")
            self._publish()

    def _publish(self) -> None:
        self._take_version()
        self._publish_taken()

    def _take_version(self) -> None:
        """Name the masters as they are now; the version is never used for others."""
        progress = self.progress
        progress.version += 1
        progress.published_step = progress.weights_step
        self.steps_by_version[progress.version] = progress.step
        self._alignment.published(progress.version)

    def _publish_taken(self) -> None:
        version = self.progress.version
        self._report = self._bridge.publish(version)
        self._session.announce_policy(version, self.progress.step)

    def _state(self) -> TrainerState:
        progress, config = self.progress, self.config
        fresh = progress.published_step == progress.weights_step
        return TrainerState(
            step=progress.step,
            updates=self._learner.updates,
            policy_version=progress.version if fresh else None,
            highest_version=progress.version,
            run_id=self._session.info.run_id,
            run_name=config.name,
            seed=config.seed,
            steps_by_version=remembered(self.steps_by_version),
            config=config.model_dump(mode="json", exclude={"atropos_token", "bridge_token"}),
        )

    def _save(self, state: TrainerState, random: RandomState) -> None:
        learner, config = self._learner, self.config
        path = save_checkpoint(
            config.checkpoint_root, state, learner.policy, learner.optimizer, random, keep_last=config.keep_last
        )
        self.progress.checkpointed = state.step
        logger.info("wrote %s", path)

    def _finish(self, finished: bool) -> None:
        """The final checkpoint, also of a run that is stopped early; only a finished run ends at the broker."""
        step = self.progress.step
        if self.progress.checkpointed != step and (finished or step):
            self._save(self._state(), random_state())
        if self.progress.committed < step:
            self._session.commit(step)
            self.progress.committed = step
        if finished:
            self._session.finish()
        else:
            logger.info("stopped after step %d; --resume auto goes on from there", step)

    # What a step did

    def _measure(self, batch: TrainingBatch, result: StepResult) -> dict[str, float]:
        targets, weights_step = batch.targets, self.progress.step
        metrics = reward_metrics(batch.rewards, batch.response_lengths) | result.metrics
        metrics |= staleness_metrics(targets.version_bounds, self.steps_by_version, weights_step)
        metrics |= {f"data/{cause}": float(count) for cause, count in batch.counts.items()}
        metrics["data/trained_tokens"] = float(len(targets))
        self._warn_if_flat(batch)
        return metrics

    def _warn_if_flat(self, batch: TrainingBatch) -> None:
        progress = self.progress
        progress.skipped_in_a_row = 0 if batch.rows else progress.skipped_in_a_row + 1
        if progress.skipped_in_a_row == FLAT_REWARD_STEPS:
            logger.warning(
                "%d batches in a row had nothing to learn: every group's rewards are alike (flat reward); look at the "
                "task's difficulty and its reward function",
                FLAT_REWARD_STEPS,
            )

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        metrics[names.POLICY_VERSION] = self.progress.version
        if self._report is not None:
            metrics[names.TIME_SYNC] = self._report.seconds
            metrics["time/sync_fence"] = self._report.fence_seconds
            metrics[names.RECOMPUTED_FRACTION] = self._report.recomputed_tokens / max(1, self._report.generated_tokens)
        self._tracker.log(step, metrics)
        logger.info(
            "step %d/%d reward %.3f length %.1f loss %.4f staleness %.1f %.2f s",
            step,
            self.config.training_steps,
            metrics[names.REWARD_MEAN],
            metrics[names.RESPONSE_LENGTH_MEAN],
            metrics.get(names.TRAIN_LOSS, 0.0),
            metrics.get(names.STALENESS_MEAN, 0.0),
            metrics[names.TIME_STEP],
        )


class _Stopwatch:
    """Adds up the seconds spent in what it is asked to time."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def time(self, action: Callable[[], None]) -> None:
        started = time.monotonic()
        action()
        self.seconds += time.monotonic() - started


def _times(started: float, fetched: float, trained: float, waited: float, response_tokens: int) -> dict[str, float]:
    now = time.monotonic()
    return {
        names.TIME_STEP: now - started,
        names.TIME_FETCH: fetched - started,
        "time/train": trained - fetched - waited,
        "time/sync_wait": now - trained + waited,
        names.TOKENS_PER_SECOND: response_tokens / max(now - started, 1e-9),
    }


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
