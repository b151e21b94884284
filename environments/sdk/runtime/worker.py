"""The worker of `serve`: it runs as many rollouts as the broker's pacing leaves room for, until the run is finished.

Everything runs in one task group: the broker connection, the rollouts, and an evaluation now and then. Admission waits
for a change (pacing, a finished rollout, the end of an evaluation) and never polls.
"""

from __future__ import annotations

import logging
import uuid
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from atropos_api.common.errors import AtroposError
from atropos_api.wire.groups import Group
from atropos_api.wire.messages import EnvironmentInfo, EnvironmentRequest, Pacing
from atropos_api.wire.reports import EnvironmentActivity
from environments.sdk.config import EvalHandlingEnum
from environments.sdk.environment import Environment
from environments.sdk.errors import EnvironmentsError, EvaluationFailed, contained, innermost
from environments.sdk.groups import GroupRules
from environments.sdk.progress import OpenGroups
from environments.sdk.reporting import REFUSED, UNSENT, Rejection, last_answer, one_line
from environments.sdk.runtime.activity import describe_activity
from environments.sdk.runtime.broker_session import BrokerConnection
from environments.sdk.runtime.commands import evaluates, prepare, run_evaluation
from environments.sdk.runtime.delivery import Delivery
from environments.sdk.runtime.items import ItemLeases
from environments.sdk.runtime.metrics import EnvironmentMetrics
from environments.sdk.runtime.rollouts import CANCELLATION_SECONDS, DrawnItem, RolloutRunner
from environments.sdk.runtime.stopping import SHUTDOWN_SECONDS, WANDB_FINISH_SECONDS, StopRequest, listen_for_stop

if TYPE_CHECKING:
    from atropos_api.client import AsyncBrokerClient

logger = logging.getLogger(__name__)

NO_ITEM_PAUSE_SECONDS = 1.0
REPORT_SECONDS = 2.0
"""Time that the last report of items may take."""


class EnvironmentWorker:
    """The worker serves one environment to one broker."""

    def __init__(self, env: Environment, client: AsyncBrokerClient, stop: StopRequest | None = None) -> None:
        """Make a worker; without `stop` it handles signals itself while it serves."""
        config = env.config
        self._stop = stop
        request = EnvironmentRequest(
            name=env.registered_name,
            process=uuid.uuid4().hex,
            group_size=config.group_size,
            max_token_length=config.max_token_length,
            weight=config.inference_weight,
            min_batch_allocation=config.min_batch_allocation,
            max_batches_offpolicy=config.max_batches_offpolicy,
        )
        self._env = env
        env.worker = self
        self._broker = BrokerConnection(client, request, wait_timeout_seconds=config.wait_timeout)
        self._broker.on_step = self._handle_step
        self._broker.on_refused = self._count_refused
        self._broker.on_policy = lambda pacing: env.server.follow(pacing.policy_name, pacing.policy_version)
        self._changed = self._broker.changed
        if env.server.registered is not None:  # the number of its servers limits that of rollouts
            env.server.registered.on_change = self._changed.notify
        self._leases = ItemLeases(self._broker.lease_items, limit=env.item_count) if env.numbers_items else None
        if self._leases is not None:
            self._broker.on_item_group = self._leases.acknowledge
        self._delivery = Delivery(env, self._rules, self._broker.hand_in, self._leases)
        self._broker.on_acknowledged = self._delivery.spans.end
        self._collector = RolloutRunner(env, self._delivery)
        self._open_groups = OpenGroups()
        self._running = self._started = self._abandoned = 0
        self._background: TaskGroup | None = None
        self._rollouts: TaskGroup | None = None
        self._startup: anyio.CancelScope | None = None
        self._evaluation: anyio.CancelScope | None = None
        self._admission: anyio.CancelScope | None = None
        """The wait for the broker or the start of rollouts, if there is one."""
        self._evaluation_due = self._evaluates = False
        self._joined: tuple[str | None, int | None] | None = None
        """The run whose settings are adopted, and the number of its owner."""
        self._log_due = self._stopping = False
        self._first_size = self._own_steps = 0  # the configured `group_size` and `total_steps`, which a run may change

    @property
    def metrics(self) -> EnvironmentMetrics:
        """The metrics for Prometheus, which may be collected in another thread."""
        return EnvironmentMetrics(
            self._env,
            running=lambda: self._running,
            unsent=lambda: self._broker.pending_groups,
            pacing=lambda: self._broker.pacing,
        )

    async def serve(self) -> None:
        """Run until the broker reports that the run is finished, or until SIGTERM or SIGINT."""
        self._env.require_servable()
        with listen_for_stop() if self._stop is None else nullcontext(self._stop) as stop:
            try:
                async with anyio.create_task_group() as group:
                    group.start_soon(self._handle_stop, stop, group)
                    self._collector.on_stuck = partial(self._end_stuck, stop)
                    with anyio.CancelScope() as self._startup:
                        await self._start(group)
                        stop.grace_seconds = 2 * self._env.config.drain_seconds + SHUTDOWN_SECONDS
                    await self._serve_run(group, stop)
                    group.cancel_scope.cancel()
            finally:
                await self._broker.deregister()
            if self._stopping:
                stop.set_grace(WANDB_FINISH_SECONDS)
            self._finish()

    async def _start(self, group: TaskGroup) -> None:
        """Do everything before the first rollout; a stop cancels it at once."""
        self._evaluates = evaluates(self._env)
        await prepare(self._env)
        await self._env.setup()
        self._first_size, self._own_steps = self._env.config.group_size, self._env.config.total_steps
        info = await self._broker.register(self._env.config.group_size_at(0, self._first_size))
        logger.info("registered as %s with %s", info.display_name, self._env.config.rollout_server_url)
        self._background = group
        group.start_soon(self._broker.keep_pacing)
        group.start_soon(self._broker.keep_submitting)
        group.start_soon(self._broker.keep_reporting, self._env.dropped_groups)
        group.start_soon(self._broker.keep_reporting_activity, self._activity)
        await self._wait_for_run()
        await self._adopt_run()

    async def _serve_run(self, group: TaskGroup, stop: StopRequest) -> None:
        if self._active and self._evaluates and self._env.config.eval_at_start:
            await self._evaluate(required=True)
        async with anyio.create_task_group() as rollouts:
            self._rollouts = rollouts
            rollouts.start_soon(self._end_admission)
            await self._admit_rollouts(evaluations=group)
            with anyio.move_on_after(self._env.config.drain_seconds if self._stopping else 0):
                while self._running:
                    await self._changed.wait()
            self._abandoned = self._running
            if not self._stopping:
                stop.set_grace(CANCELLATION_SECONDS, "end of the run")
            rollouts.cancel_scope.cancel()
        if not self._stopping:
            stop.lift_grace()
        else:
            with anyio.move_on_after(self._env.config.drain_seconds):
                await self._broker.flush()
        if self._leases is not None:
            with anyio.move_on_after(REPORT_SECONDS):
                await self._leases.close()
        if not self._stopping and self._evaluates and self._env.config.eval_at_end:
            await self._cancel_evaluation()
            if not self._stopping:  # it may be told to stop in this wait
                await self._evaluate(required=True)

    async def _wait_for_run(self) -> None:
        """Wait until a trainer has begun a run; return at once if the run is already finished."""
        while self._pacing.state == "wait":
            with anyio.move_on_after(10.0):
                await self._changed.wait()
                continue
            logger.info("waiting for a trainer to begin a run at %s", self._env.config.rollout_server_url)

    async def _adopt_run(self) -> None:
        """Take part in the run for the first time: adopt its step, its settings and a state saved at that step."""
        info, env = await self._join_run(), self._env
        env.wandb_prepend = info.display_name
        env.wandb_project, env.wandb_group = info.wandb_project or None, info.wandb_group or None
        await env.setup_wandb()
        if env.curr_step > 0:
            env.load_checkpoint()

    async def _join_run(self) -> EnvironmentInfo:
        """Register again, because a registration before the run has none of its settings, and adopt these.

        The run may be another one, which a trainer began while this environment serves, or the same one, which its
        trainer resumed with other settings.
        """
        info = await self._broker.register(self._env.config.group_size_at(self._pacing.current_step, self._first_size))
        if self._joined is not None:
            logger.info("the run is %s now; its settings are adopted", info.run_id)
        env, self._joined = self._env, (info.pacing.run_id, info.pacing.epoch)
        env.curr_step = self._pacing.current_step
        env.config.group_size = env.config.group_size_at(env.curr_step, self._first_size)
        env.checkpoint_dir = info.checkpoint_dir
        if self._own_steps == -1:  # as in Atropos, -1 stands for the run's number of steps
            env.config.total_steps = info.num_steps or -1
        env.status_dict = self._status(self._pacing)
        await env.get_server_info()
        if self._leases is not None:
            self._leases.forget_unbegun(info.run_id)
        return info

    @property
    def _has_joined(self) -> bool:
        """True if the adopted settings are those of the pacing's run, under its present trainer."""
        return self._pacing.run_id is None or self._joined == (self._pacing.run_id, self._pacing.epoch)

    def adopt_run_settings(self) -> None:
        """Copy the run's batch size and longest sequence to the environment."""
        info = self._broker.info
        assert info is not None
        self._env.max_token_len = info.max_token_length
        if info.batch_size > 0:
            self._env.config.batch_size = info.batch_size

    async def _admit_rollouts(self, *, evaluations: TaskGroup) -> None:
        """Start rollouts while there is room for them, and evaluations when they are due.

        Each turn awaits one thing: what comes meanwhile may be the last notification, so all is checked again then.
        """
        while self._active:
            if not self._has_joined and not self._broker.stays_paused(self._env.config.group_size):
                with anyio.CancelScope() as self._admission:
                    await self._join_run()
            elif self._log_due:
                await self._log()
            elif self._evaluation_can_start:
                self._evaluation_due = False
                evaluations.start_soon(self._evaluate)
                await anyio.lowlevel.checkpoint()  # lets the evaluation start: it may stop admission
            elif not self._has_room():
                await self._changed.wait()
            else:
                started = self._started
                with anyio.CancelScope() as self._admission:
                    await self._env.add_train_workers()
                if self._started == started and self._has_room():
                    with anyio.move_on_after(NO_ITEM_PAUSE_SECONDS):
                        await self._changed.wait()

    async def _end_admission(self) -> None:
        """End a wait for the broker or an item at a stop, and at the end of the run: that item may never come."""
        while True:
            if not self._active and self._admission is not None:
                self._admission.cancel()
            await self._changed.wait()

    def log_fields(self) -> dict[str, str | int | None]:
        """Return run, step and policy version as far as they are known."""
        info, pacing = self._broker.info, self._broker.pacing
        return {
            "run_id": None if info is None else info.run_id,
            "step": None if pacing is None else pacing.current_step,
            "policy_version": None if pacing is None else pacing.policy_version,
        }

    async def admit(self) -> None:
        """Start rollouts until there is no room or no item, or something else is due."""
        assert self._rollouts is not None
        while self._active and self._has_joined and self._has_room():
            if self._log_due or self._evaluation_can_start:
                return
            item = await self._collector.next_item()
            if item is None:
                return
            self._running += 1
            self._started += 1
            # A run that begins while the rollout is in progress must not get its group: another policy sampled it.
            self._rollouts.start_soon(self._run_rollout, item._replace(run_id=self._pacing.run_id))

    async def _run_rollout(self, item: DrawnItem) -> None:
        try:
            with self._open_groups.collecting(item.item, self._env.config.group_size):
                await self._collector.collect(item)
        finally:
            self._running -= 1
            self._changed.notify()

    async def _evaluate(self, *, required: bool = False) -> None:
        """Evaluate now; a `required` evaluation must succeed, another failure is logged and training continues."""
        step = self._pacing.current_step
        try:
            with anyio.CancelScope() as self._evaluation, contained():
                await run_evaluation(self._env, step=step)
        except Exception as error:  # an evaluation is the environment's own code and may raise anything
            reason = innermost(error)
            if isinstance(reason, EnvironmentsError) and reason.ends_server:
                raise reason from error
            logger.exception("the evaluation at step %d failed", step)
            if required:
                cause = str(reason) if isinstance(reason, AtroposError) else repr(reason)
                raise EvaluationFailed(f"the evaluation at step {step} failed: {cause}") from error
        finally:
            self._evaluation = None
            self._changed.notify()

    async def _cancel_evaluation(self) -> None:
        """Cancel an evaluation in progress and wait for its end."""
        while self._evaluation is not None:
            self._evaluation.cancel()
            await self._changed.wait()

    async def _log(self) -> None:
        self._log_due = False
        try:
            with contained():
                await self._env.wandb_log()
        except Exception:  # the environment's own metrics may raise anything; no rollout may fail because of it
            logger.exception("metrics of step %d could not be logged", self._env.curr_step)

    @property
    def _evaluation_can_start(self) -> bool:
        """True if an evaluation is due and none is in progress; until that one ends, rollouts go on."""
        return self._evaluation_due and self._evaluation is None

    def _has_room(self) -> bool:
        """Return True if another group may start: by the broker's pacing, the worker limit and a running evaluation."""
        group_size = self._env.config.group_size
        in_flight = self._running * group_size + self._broker.pending_sequences
        return (
            self._pacing.state == "run"
            and in_flight < self._pacing.room_sequences
            and self._running < self._worker_limit()
        )

    def _worker_limit(self) -> int:
        config = self._env.config
        most = config.max_num_workers
        if most < 1:
            most = config.max_num_workers_per_node * len(self._env.server.servers)
        if self._evaluation is None or config.eval_handling is EvalHandlingEnum.NONE:
            return most
        return 0 if config.eval_handling is EvalHandlingEnum.STOP_TRAIN else max(1, int(most * config.eval_limit_ratio))

    def _handle_step(self, pacing: Pacing) -> None:
        """Handle a trainer step. An overridden `env_step_checks` runs in the background: it may take long."""
        self._env.status_dict = self._status(pacing)
        if type(self._env).env_step_checks is Environment.env_step_checks or self._background is None:
            self.adopt_step()
        else:
            self._background.start_soon(self._check_step)

    async def _check_step(self) -> None:
        try:
            with contained():
                await self._env.env_step_checks()
        except Exception:  # the environment's own code may raise anything; the step is adopted in any case
            logger.exception("env_step_checks failed at step %d", self._pacing.current_step)
            self.adopt_step()

    def adopt_step(self) -> None:
        """Adopt the trainer's step: checkpoints, metrics and evaluations may be due."""
        env, pacing = self._env, self._pacing
        before, env.curr_step = env.curr_step, pacing.current_step
        env.config.group_size = env.config.group_size_at(env.curr_step, self._first_size)
        info = self._broker.info
        # Until the settings of another run are adopted, the state would be saved in the folder of the run before.
        if info is not None and self._has_joined and interval_passed(before, env.curr_step, info.checkpoint_interval):
            self._save_state(env.curr_step - env.curr_step % info.checkpoint_interval)
        if (
            self._evaluates
            and interval_passed(before, env.curr_step, env.config.steps_per_eval)
            and pacing.state == "run"
        ):
            self._evaluation_due = True
        self._log_due = env.metrics.sent >= env.config.min_items_sent_before_logging
        self._changed.notify()

    def _save_state(self, step: int) -> None:
        try:
            self._env.save_checkpoint(step)
        except Exception:  # a full disk or the environment's own code may fail; neither may end the running rollouts
            logger.exception(
                "the environment's state of step %d could not be saved; a run resumed at it starts without that state",
                step,
            )

    def _status(self, pacing: Pacing) -> dict[str, Any]:
        """Return the broker's state by Atropos' names; both queue sizes are the whole queue's, in our groups."""
        queued = -(-pacing.outstanding_sequences // self._env.config.group_size)
        return {
            "current_step": pacing.current_step,
            "queue_size": queued,
            "self_queue_size": queued,
            "max_group_size": self._env.config.group_size,
            "env_weight": 1.0,
        }

    def _end_stuck(self, stop: StopRequest, item: Any) -> None:
        """Stop the server: a rollout that goes on after its cancellation would use a place and a core for ever."""
        logger.error(
            "item %.200r ran for %g s after --env.worker_timeout had cancelled it: its code swallows CancelledError; "
            "raise that on. The server stops",
            item,
            CANCELLATION_SECONDS,
        )
        stop.request("time limit of a rollout that ignores its cancellation")

    def _count_refused(self, group: Group, error: Exception) -> None:
        example = last_answer(group, lambda tokens: str(self._env.tokenizer.decode(tokens)))
        self._env.dropped_groups.record(Rejection(REFUSED, one_line(str(error))), example)
        self._delivery.spans.end(group, error)

    def _activity(self) -> EnvironmentActivity:
        return describe_activity(self._open_groups, self._env.server, evaluating=self._evaluation is not None)

    def _rules(self) -> GroupRules:
        return GroupRules.from_config(self._env.config, self._first_size, max_token_length=self._env.max_token_len)

    @property
    def _pacing(self) -> Pacing:
        assert self._broker.pacing is not None
        return self._broker.pacing

    @property
    def _active(self) -> bool:
        return not self._stopping and self._pacing.state != "finished"

    async def _handle_stop(self, stop: StopRequest, group: TaskGroup) -> None:
        """Handle stop signals: the first drains, the second stops at once."""
        await stop.wait_for(1)
        logger.info("%s: finishing the work in progress", stop.signal.name if stop.signal is not None else "stopped")
        self._stopping = True
        for scope in filter(None, (self._startup, self._evaluation)):
            scope.cancel()
        self._changed.notify()
        await stop.wait_for(2)
        self._abandoned = self._running
        group.cancel_scope.cancel()

    def _finish(self) -> None:
        self._delivery.close()
        self._count_unsent()
        self._env.dropped_groups.log()
        self._env.finish_tracking()
        logger.info("stopped" if self._stopping else "the run is finished")

    def _count_unsent(self) -> None:
        """Log and count the items and groups that a stop leaves behind; at the run's end they are not needed."""
        if not self._stopping:
            return
        if self._abandoned:
            logger.warning("%d items were still in progress and are dropped", self._abandoned)
        if pending := self._broker.pending_groups:
            self._env.dropped_groups.record(Rejection(UNSENT, "the broker did not acknowledge them"), count=pending)


def interval_passed(before: int, now: int, interval: int) -> bool:
    """Return True if a multiple of `interval` is in (before, now]; False if the interval is 0 or less."""
    return interval > 0 and now // interval > before // interval
