"""The post-step: publish the weights, announce the version, write the checkpoint if one is due, commit.

This order is fixed, so that a resume after a crash between any two parts can safely repeat them. The post-step either
runs in place or, with `--overlap-publish`, in a thread during the next batch's forward and backward; it only reads the
masters. Everything that must be decided or saved before the masters can change again (the version number, the random
state) is taken before that thread starts. On a GPU the thread enqueues its work in a stream of its own, which waits for
the optimizer step alone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import TYPE_CHECKING

from atropos_api.common.errors import AtroposError
from atropos_api.common.secrets import public_settings
from atropos_api.common.tracing import Span, current_span
from example_trainer.api import BackgroundCall, BrokerSession, ends_batches
from example_trainer.checkpointing import note_begun, remembered
from example_trainer.errors import CheckpointError, PublishFailed, RanksFailed, WaitStopped, WaitTimedOut
from example_trainer.modeling.side_streams import SideStream
from example_trainer.state import ObjectiveState, Phases, Progress, RandomState, TrainerState, random_state
from example_trainer.step.save import save_from_all_ranks

if TYPE_CHECKING:
    from example_trainer.config import TrainingConfig
    from example_trainer.step.logprob_mismatch import Alignment
    from example_trainer.training import Learner
    from example_trainer.weights.base import PublishReport, WeightBridge

logger = logging.getLogger(__name__)

HOLD_POLL_SECONDS = 5.0


class PostStep:
    """The post-step of each step: it publishes, announces, checkpoints and commits; see the module's docstring."""

    def __init__(
        self,
        config: TrainingConfig,
        progress: Progress,
        *,
        learner: Learner,
        alignment: Alignment,
        session: BrokerSession,
        bridge: WeightBridge,
        phases: Phases,
        should_stop: Callable[[], bool],
    ) -> None:
        self.report: PublishReport | None = None
        """Report of the last completed publish."""
        self._config = config
        self._progress = progress
        self._learner = learner
        self._alignment = alignment
        self._session = session
        self._bridge = bridge
        self._phases = phases
        self._should_stop = should_stop
        self._random: RandomState | None = None
        """The random state after the last step; None before the first."""
        self._running: BackgroundCall[None] | None = None
        self._may_move = False
        self._stream: SideStream | None = None

    def start(self, step: int) -> None:
        """Publish, announce, checkpoint and commit: here, or with `--overlap-publish` during the next batch."""
        self.wait()  # the optimizer step has waited already, unless the batch changed no weight
        self._may_move = False
        publish = self._is_publish_due(step) and not self._is_held(step)
        if publish:
            self._take_version()
        state = self._state() if self._is_checkpoint_due(step) else None
        self._random = random_state()
        work = partial(self._work, step, publish, state, self._random, self._learner.objective.state(), current_span())
        if self._config.overlap_publish:
            self._stream = self._stream or SideStream(self._learner.policy.device)
            in_stream = partial(_within, self._stream.after_present_work(), work)
            self._running = BackgroundCall(in_stream, name=f"publish-{step}")
        else:
            work()

    def join(self) -> None:
        """Wait for the post-step in the background thread, if there is one, and raise its error if it failed."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def wait(self) -> None:
        """Wait until the weights may change: the last publish has ended, and so has an evaluation that needs them.

        Returns at once when it is called again in the same step: then some of its updates have been applied.
        """
        if self._may_move:
            return
        self.join()
        if self._config.steps_served_weights:
            self._wait_while_held()
        self._may_move = True

    def publish(self) -> None:
        """Publish the current masters under a new version, and announce it.

        Registered servers that have the masters already keep the version; the others get it.
        """
        progress = self._progress
        unchanged = progress.published_step is not None and progress.published_step == progress.weights_step
        if not (self._config.registered_servers and unchanged) or self._is_too_old():
            self._take_version()
        self._publish_taken(progress.step)

    def needs_publish(self) -> bool:
        """Return True if a server has restarted, or its version is too old; called while a batch is awaited."""
        if self._running is not None and not self._running.wait(0):
            return False
        self.join()
        if self._bridge.needs_publish():
            logger.info("a server has no policy; publishing again")
            return True
        if not self._is_too_old() or self._session.is_held():
            return False
        logger.info("no batch takes rollouts of version %d any more (--max-staleness)", self._progress.version)
        return True

    def keep_steps(self, error: AtroposError) -> None:
        """Write a checkpoint of the last step if the run ends with an error that came in place of a batch or a publish.

        Nothing is committed: the broker may be gone. The error of a full disk does not replace `error`. Each of several
        ranks has a part of the checkpoint; if one has failed alone, none is written, since the others wait elsewhere.
        """
        if not ends_batches(error) or not self._learner.ranks.have_heard(error):
            return
        lost_server = isinstance(error, PublishFailed | WaitTimedOut)
        serves_untrained = self._config.shares_memory and self._config.train_layer_indices is not None
        only_copy = self._config.steps_served_weights or serves_untrained
        if lost_server and only_copy and self._learner.policy.device.type == "cuda":
            return  # these weights, or those that are not trained, existed only in that server's memory
        with suppress(AtroposError):
            self.join()  # a publish reads the weights
        if self._progress.step in (0, self._progress.checkpointed):
            return
        try:
            self._save(self._state(), self._random or random_state(), self._learner.objective.state())
        except (CheckpointError, RanksFailed) as refused:
            logger.warning("the steps since the last checkpoint are lost: %s", refused)

    def finish(self, finished: bool) -> None:
        """Write and commit a last checkpoint, also if the run was stopped; only a finished run ends at the broker.

        A batch whose training a stop broke off has drawn random numbers, and is to draw the same after a resume.
        """
        self.join()
        step = self._progress.step
        if self._progress.checkpointed != step and (finished or step):
            self._save(self._state(), self._random or random_state(), self._learner.objective.state())
        if self._progress.committed < step:
            self._commit(step)
        if finished:
            self._session.finish()
        else:
            logger.info("stopped after step %d; continue with --resume auto", step)

    def _work(
        self,
        step: int,
        publish: bool,
        state: TrainerState | None,
        random: RandomState,
        objective: ObjectiveState,
        span: Span,
    ) -> None:
        if publish:
            with span.child("publish", version=self._progress.version):
                self._publish_taken(step)
        else:
            # The version is unchanged, but the broker must know the step, or environments wait for it.
            self._session.announce_policy(self._progress.version, step)
        if state is not None:
            with span.child("checkpoint"):
                self._save(state, random, objective)
        if state is not None or self._config.checkpoint_interval == 0:
            # Without intermediate checkpoints no resume can need these batches again, so the broker may drop them.
            self._commit(step)

    def _is_publish_due(self, step: int) -> bool:
        progress = self._progress
        is_last = step == self._config.training_steps
        if progress.published_step is not None and progress.weights_step <= progress.published_step:
            return self._is_too_old() and not is_last
        since = step - (progress.published_step or 0)
        if is_last or self._is_too_old():
            return True
        if since < self._config.publish_interval:
            return False
        return not self._config.forwards_from_masters or self._bridge.should_publish(since)

    def _is_too_old(self) -> bool:
        """Return True if the broker would take no rollout of the published version into the next batch.

        Then none would ever come: two steps without a signal ended a run with --max-staleness 1 by its batch timeout.
        """
        bound, progress = self._session.info.max_staleness, self._progress
        published = progress.steps_by_version.get(progress.version, progress.step)
        return bound is not None and progress.step - published > bound

    def _is_held(self, step: int) -> bool:
        """Return True if a policy hold postpones the publish; wait for the hold's end if training needs the publish."""
        if self._config.steps_served_weights:
            return False  # `wait` was called before the step; since then nothing can be sampled until the publish
        if self._config.forwards_from_masters and step < self._config.training_steps:
            return self._has_hold()
        self._wait_while_held()
        return False

    def _wait_while_held(self) -> None:
        if self._has_hold():
            with self._phases.during("hold"):
                while self._session.held_seconds(HOLD_POLL_SECONDS) > 0 and not self._should_stop():
                    pass

    def _has_hold(self) -> bool:
        seconds = self._session.held_seconds()
        if seconds > 0:
            logger.info(
                "after step %d: an evaluation holds the policy for another %.0f s", self._progress.step, seconds
            )
        return seconds > 0

    def _is_checkpoint_due(self, step: int) -> bool:
        interval = self._config.checkpoint_interval
        return interval > 0 and step % interval == 0

    def _take_version(self) -> None:
        """Assign a new version to the current masters; no other weights ever get the same version."""
        progress = self._progress
        progress.version += 1
        note = partial(note_begun, self._config, self._session.info.run_id, progress.version)
        self._learner.ranks.on_main(note)
        progress.published_step = progress.weights_step
        progress.steps_by_version[progress.version] = progress.step
        self._alignment.published(progress.version)

    def _publish_taken(self, step: int) -> None:
        """Publish the version that was taken, which is of `step`: in a thread, another batch may end meanwhile."""
        version = self._progress.version
        try:
            with self._phases.during("publish"):
                self.report = self._bridge.publish(version)
        except WaitStopped as stopped:
            # The server may be gone for good, and the time until this process is killed is needed for the checkpoint.
            # A run that goes on from that publishes its weights.
            logger.warning("version %d is not published: %s", version, stopped)
            return
        self._session.announce_policy(version, step, self.report.policy_name, self.report.servers)

    def _commit(self, step: int) -> None:
        self._session.commit(step)
        self._progress.committed = step

    def _state(self) -> TrainerState:
        progress, config = self._progress, self._config
        fresh = progress.published_step == progress.weights_step
        return TrainerState(
            step=progress.step,
            updates=self._learner.updates,
            policy_version=progress.version if fresh else None,
            highest_version=progress.version,
            run_id=self._session.info.run_id,
            run_name=config.name,
            seed=config.seed,
            weights_step=progress.weights_step,
            steps_by_version=remembered(progress.steps_by_version),
            metrics={name: value for name, value in progress.metrics.items() if math.isfinite(value)},
            health=progress.health,
            loss_scale=None if self._learner.loss_scale is None else self._learner.loss_scale.state(),
            config=public_settings(config),
            base=progress.base,
        )

    def _save(self, state: TrainerState, random: RandomState, objective: ObjectiveState) -> None:
        with self._phases.during("checkpoint"):
            save_from_all_ranks(self._config, self._learner, state, random, objective)
        self._progress.checkpointed = state.step


def _within(context: AbstractContextManager[None], work: Callable[[], None]) -> None:
    with context:
        work()
