"""`Environment` holds the hooks and the state of an environment.

Users subclass `BaseEnv` of `base_env.py`, which is this class with a command line. `runtime` runs what is described
here: `runtime/worker.py` for `serve`, `runtime/commands.py` for the other verbs.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import anyio

from atropos_api.common.secrets import public_settings
from atropos_api.common.tracing import NO_TRACING
from environments.rewards.gold_check import GoldItem
from environments.sdk.config import APIServerConfig, BaseEnvConfig, ServerBaseline, SessionSettings, as_server_list
from environments.sdk.errors import TokenizerUnavailable
from environments.sdk.groups import Item, ScoredDataGroup, ScoredDataItem, as_items, group_items, sampled_lengths
from environments.sdk.inference.sampling import Reasoning
from environments.sdk.members import MemberRule, Members
from environments.sdk.reporting import (
    DroppedGroups,
    EvaluationResult,
    ResultFolders,
    TrackioTracker,
    WandbTracker,
    format_metrics,
    rollout_table,
    run_name,
)
from environments.sdk.rollout_metrics import RolloutMetrics
from environments.sdk.server_manager import ServerManager
from environments.sdk.session.tokens_and_masks import current_sample_log
from environments.sdk.state_files import load_state, save_state
from environments.sdk.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from atropos_api.wire.groups import Group


logger = logging.getLogger(__name__)

KEPT_LENGTHS = 65_536


class GroupSink(Protocol):
    """Interface for the delivery of collected groups: it sends those that the group rules allow."""

    async def deliver(self, scored_data: Any, item: Item, *, send: bool, check_length: bool) -> None:
        """Send one group or several; `check_length`: drop those longer than the run allows."""


class Scheduler(Protocol):
    """Interface of the worker: it starts an environment's rollouts and passes on the run's settings and steps."""

    def adopt_run_settings(self) -> None:
        """Copy the run's batch size and longest sequence to the environment."""

    def adopt_step(self) -> None:
        """Adopt the trainer's step: checkpoints, metrics and evaluations may be due."""

    async def admit(self) -> None:
        """Start rollouts until there is no room or no item, or something else is due."""

    def log_fields(self) -> dict[str, str | int | None]:
        """Return run, step and policy version, for log records."""


class Environment(ABC):
    """The environment as the runtime sees it: it holds what users override and use, and nothing about how it is run.

    Users subclass `BaseEnv` (`base_env.py`), which adds the command line and the tutorial. The worker and the delivery
    of groups are reached only through the protocols `Scheduler` and `GroupSink`.
    """

    name: ClassVar[str | None] = None
    best_score: ClassVar[float] = 1.0
    env_config_cls: ClassVar[type[BaseEnvConfig]] = BaseEnvConfig
    server_config_cls: ClassVar[type[APIServerConfig]] = APIServerConfig
    lenient: ClassVar[bool] = False
    """True if files may hold unknown keys and text alone may be trained on: for environments of the original Atropos.
    """

    def __init__(
        self,
        config: BaseEnvConfig,
        server_configs: ServerBaseline | APIServerConfig | list[APIServerConfig],
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        self.config = config
        self.slurm = slurm
        self.testing = testing
        self.server = ServerManager(
            as_server_list(server_configs),
            load_tokenizer=lambda: self.tokenizer,
            wait_timeout_seconds=config.wait_timeout,
            allow_truncated_sampling=config.allow_truncated_sampling,
            sampling_mask_limit=config.sampling_mask_limit,
            allow_estimated_tokens=config.allow_estimated_tokens,
            reasoning=Reasoning.from_config(config),
            tool_parser=config.tool_parser,
            sessions=SessionSettings.from_config(config, key_in_url=self.lenient),
        )
        self.curr_step = 0
        self.max_token_len = -1
        self.checkpoint_dir = ""
        self.wandb_prepend: str | None = None
        self.process_mode = False
        self.evaluation_only = self.overwrite_results = False
        self.status_dict: dict[str, Any] = {}
        self.metrics = RolloutMetrics()
        self.dropped_groups = DroppedGroups()
        self.completion_lengths: MutableSequence[int] = deque(maxlen=KEPT_LENGTHS)
        self.rollouts_for_wandb: MutableSequence[Any] = []
        self.wandb_project: str | None = None
        self.wandb_group: str | None = None
        self.delivery: GroupSink | None = None
        self.worker: Scheduler | None = None
        self.evaluation_step: int | None = None
        self.last_evaluation: EvaluationResult | None = None
        self._results = ResultFolders()
        self.tracker: WandbTracker | None = None
        self.trackio: TrackioTracker | None = None
        self.tracing = NO_TRACING

    # Methods that an environment overrides.

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, ServerBaseline | APIServerConfig | list[APIServerConfig]]:
        """Return the defaults, which files and flags override; called for `--help` too, so it must load nothing."""
        return cls.env_config_cls(), ServerBaseline()

    @classmethod
    def teacher_config_init(cls) -> ServerBaseline | APIServerConfig | list[APIServerConfig] | None:
        """Return the default teacher servers, which files and `--teacher.*` override; None: the environment has no
        teacher.
        """
        return None

    @abstractmethod
    async def setup(self) -> None:
        """Load what the environment needs: called once, before its first item or evaluation."""

    @abstractmethod
    async def get_next_item(self) -> Item:
        """Return the next item to try; None when there is none for now (`serve`) or no more (`process`)."""

    async def item_at(self, number: int) -> Item:
        """Return item `number`, the same whenever it is asked for; None if there is none.

        Override it if your items have an order: the broker then leases their numbers, from 0 in each run, so that each
        is used once, whichever process is killed or restarted. `get_next_item` is left for `process`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no item_at")

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem | None, list[Item]]:
        """Return one scored attempt at `item`, and items to try next. Override this or `collect_trajectories`."""
        raise NotImplementedError(f"{type(self).__name__} needs collect_trajectories or collect_trajectory")

    async def collect_trajectories(
        self, item: Item
    ) -> tuple[ScoredDataGroup | Sequence[ScoredDataGroup | None] | Any | None, list[Item]]:
        """Return a group of scored attempts at `item`, by default `group_size` single ones, and items to try next.

        With `--env.late_members close` it may hold fewer attempts, but no fewer than `least_members`.
        """
        rule = MemberRule.from_config(self.config)
        members = Members(lambda: self.collect_trajectory(item), rule, self.metrics, item=item)
        done = await members.collect()
        backlog = [later for _, more in done for later in as_items(more)]
        items = [attempt for attempt, _ in done if attempt is not None]
        return (group_items(items) if items else None), backlog

    async def postprocess_histories(
        self, trajectories: Any
    ) -> ScoredDataGroup | Sequence[ScoredDataGroup | None] | None:
        """Make a last change to what was collected, such as scoring it against other groups; return None to drop it."""
        return trajectories  # type: ignore[no-any-return]

    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Measure the model and report with `evaluate_log`; this method is optional.

        Requests made in here count as evaluation automatically.
        """
        raise NotImplementedError(f"{type(self).__name__} has no evaluate")

    def gold_items(self) -> Iterable[GoldItem]:
        """Return, for `validate`, items that each have a completion that must earn `best_score` and some that must earn
        less.
        """
        raise NotImplementedError(f"{type(self).__name__} has no gold_items")

    async def score_answer(self, item: Item, text: str) -> float:
        """Return, for `validate`, the score of the completion `text` for `item`; let `collect_trajectories` use it as
        well.
        """
        raise NotImplementedError(f"{type(self).__name__} has no score_answer")

    async def cleanup(self) -> None:  # noqa: B027 - most environments have nothing to clean up
        """Clean up; called after every attempt at an item. It is cut off 1.5 s after the attempt is cancelled."""

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """Save the environment's state; override to call `super().save_checkpoint(step, {...})` with what a restart
        needs.
        """
        if data is not None and self.checkpoint_dir:
            save_state(Path(self.checkpoint_dir), self._checkpoint_name, step, data)

    def load_checkpoint(self) -> None:
        """Restore the state saved at the step, each key as an attribute; called when a run is resumed."""
        if not self.checkpoint_dir:
            return
        for key, value in load_state(Path(self.checkpoint_dir), self._checkpoint_name, self.curr_step).items():
            setattr(self, key, value)

    @property
    def _checkpoint_name(self) -> str:
        """The name that the broker gave this process, so that each copy of an environment keeps its own state."""
        return self.wandb_prepend or self.registered_name

    async def handle_send_to_api(
        self,
        scored_data: Any,
        item: Item = None,
        do_send_to_api: bool = True,
        abort_on_any_max_length_exceeded: bool = True,
    ) -> None:
        """Deliver what was collected, one group or several; override it to add to the groups, and call this."""
        if self.delivery is None:
            raise RuntimeError("groups can be sent only during `serve` and `process`")
        await self.delivery.deliver(
            scored_data, item, send=do_send_to_api, check_length=abort_on_any_max_length_exceeded
        )

    async def check_servers(self) -> None:  # noqa: B027 - most environments have none of their own
        """Raise if an inference server is unfit; called before `setup` where groups are collected, after the tokenizer
        is loaded.
        """

    def require_servable(self) -> None:  # noqa: B027 - most environments fit this scheduler
        """Raise if the environment was written for another scheduler than this one; called first by `serve`."""

    async def get_server_info(self) -> None:
        """Take over the run's batch size and longest sequence; called when a run is joined. Without `super()` they do
        not change.
        """
        if self.worker is not None:
            self.worker.adopt_run_settings()

    async def env_step_checks(self) -> None:
        """React to a trainer step: `status_dict` has the new step, `curr_step` still the old one.

        What is due by then (a checkpoint, metrics, an evaluation) happens in here.
        """
        if self.worker is not None:
            self.worker.adopt_step()

    async def add_train_workers(self) -> None:
        """Start rollouts; called while there is room for them. Without `super()` none are started."""
        if self.worker is not None:
            await self.worker.admit()

    async def setup_wandb(self) -> None:
        """Set up Weights & Biases and Trackio, if they are used; called once the run is known, before any log."""
        if self.config.use_trackio and self.trackio is None:
            name = self.config.trackio_name or run_name(self.registered_name)
            self.trackio = TrackioTracker(name=name, config=public_settings(self.config))
        if self.config.use_wandb and self.tracker is None:
            self.tracker = WandbTracker(
                name=run_name(self.registered_name),
                project=self.wandb_project,
                group=self.wandb_group,
                config=public_settings(self.config),
            )

    async def add_rollouts_for_wandb(self, scored_data: Any, item: Item = None) -> None:  # noqa: ARG002 - for overrides
        """Keep the texts and scores of a group for the rollout table."""
        if not self.config.use_wandb or self.config.num_rollouts_to_keep < 1:
            return
        most = self.config.num_rollouts_per_group_for_logging
        count = len(scored_data["tokens"]) if most < 0 else most
        texts = [self.tokenizer.decode(tokens) for tokens in scored_data["tokens"][:count]]
        self.rollouts_for_wandb.append(list(zip(texts, scored_data["scores"], strict=False)))
        while len(self.rollouts_for_wandb) > self.config.num_rollouts_to_keep:
            del self.rollouts_for_wandb[0]

    async def create_rollout_table(self, wandb_metrics: dict[str, Any]) -> dict[str, Any]:
        """Add the kept rollouts to the metrics as a table."""
        if self.tracker is not None and self.rollouts_for_wandb:
            table = rollout_table([row for rows in self.rollouts_for_wandb for row in rows])
            return {**wandb_metrics, "train/rollouts": table} if table is not None else wandb_metrics
        return wandb_metrics

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Log the environment's metrics of the last trainer step; overriding methods add theirs and call this."""
        summary = self.metrics.summary(self.completion_lengths, self.max_token_len)
        merged = await self.create_rollout_table({**summary, **(wandb_metrics or {})})
        self.completion_lengths.clear()
        self.rollouts_for_wandb.clear()
        prefixed = {self._prefixed(key): value for key, value in merged.items()}
        self.log_metrics({**prefixed, **self.server.metrics()}, self.curr_step)

    # Methods that an environment calls.

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer: encode, decode and chat template; all else of transformers is loaded on demand."""
        name = self.config.tokenizer_name
        if name is None:
            raise TokenizerUnavailable("no tokenizer is named, and no server reports one; set --env.tokenizer_name")
        return load_tokenizer(name)

    @property
    def server_managers(self) -> list[ServerManager]:
        """All inference servers that the environment asks: the policy's, and a teacher's if it has one."""
        return [self.server]

    @property
    def numbers_items(self) -> bool:
        """True if the environment has an `item_at`."""
        return type(self).item_at is not Environment.item_at

    @property
    def item_count(self) -> int | None:
        """The number of items in all, for environments with an `item_at`; None: numbers never end."""
        return None

    @property
    def can_evaluate(self) -> bool:
        """True if the environment has an `evaluate`."""
        return type(self).evaluate is not Environment.evaluate

    @property
    def registered_name(self) -> str:
        """The stable name under which this environment registers with the broker."""
        return self.config.wandb_name or self.name or type(self).__name__

    async def evaluate_log(
        self,
        metrics: Mapping[str, Any],
        task_name: str | None = None,
        model_name: str | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        generation_parameters: Mapping[str, Any] | None = None,
        samples: Sequence[Mapping[str, Any]] | None = None,
        verbose: bool = True,
    ) -> EvaluationResult:
        """Report an evaluation: log it, and write it to `data_dir_to_save_evals` if that is set."""
        finished = time.time() if end_time is None else end_time
        sample_log = current_sample_log()
        result = EvaluationResult(
            metrics=metrics,
            task_name=task_name or f"{self.registered_name}_eval",
            model_name=model_name or self.server.config.model_name,
            seconds=finished - (finished if start_time is None else start_time),
            generation_parameters={"max_new_tokens": self.config.max_token_length, **(generation_parameters or {})},
            samples=() if samples is None else tuple(samples),
            step=self.evaluation_step,
            versions=frozenset(sample_log.versions) if sample_log is not None else frozenset(),
        )
        self.last_evaluation = result
        if verbose:
            when = "" if self.evaluation_step is None else f" at step {self.evaluation_step}"
            logger.info("evaluation%s: %s", when, format_metrics(result.all_metrics()))
        directory = self.evaluation_directory()
        if directory is not None:
            await anyio.to_thread.run_sync(self._results.write, result, directory)
        self.log_metrics(result.all_metrics(), self.evaluation_step or 0)
        return result

    def evaluation_directory(self) -> Path | None:
        """Return the folder of the current evaluation's files: one per step while serving."""
        if self.config.data_dir_to_save_evals is None:
            return None
        root = Path(self.config.data_dir_to_save_evals)
        return root if self.evaluation_step is None else root / f"step-{self.evaluation_step}"

    def note_sent(self, group: Group) -> None:
        """Count a group that is being sent."""
        self.metrics.sent += 1
        self.dropped_groups.count_sent()
        lengths = sampled_lengths(group)
        self.completion_lengths.extend(lengths)
        self.metrics.totals.sampled_tokens += sum(lengths)

    def set_teacher(self, server_configs: ServerBaseline | APIServerConfig | list[APIServerConfig]) -> None:
        """Set the teacher's servers; for environments that have a teacher."""
        raise NotImplementedError(f"{type(self).__name__} has no teacher")

    async def aclose(self) -> None:
        """Close what was opened; no method may be called after it."""
        await self.server.aclose()

    def log_metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log metrics of a trainer step to W&B and Trackio, if they are used."""
        for tracker in (self.tracker, self.trackio):
            if tracker is not None:
                tracker.log(metrics, step)

    def finish_tracking(self) -> None:
        """End the runs in W&B and Trackio, if there are any."""
        for tracker in (self.tracker, self.trackio):
            if tracker is not None:
                tracker.finish()

    def _prefixed(self, key: str) -> str:
        return f"{self.wandb_prepend}_{key}" if self.wandb_prepend else key
