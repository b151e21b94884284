"""`BaseEnv`: what an environment subclasses. Its docstring is the tutorial.

The class holds what an environment may override and nothing of how it is run: `worker` schedules rollouts for `serve`,
`process` and `evaluate` are in modules of those names, `cli` makes the command line.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import anyio

from atropos_api.common.secret_fields import public_settings
from environments.rewards.gold import GoldItem
from environments.sdk import checkpoint
from environments.sdk.config import APIServerConfig, BaseEnvConfig, ServerBaseline, as_server_list
from environments.sdk.drops import DroppedGroups
from environments.sdk.errors import TokenizerUnavailable
from environments.sdk.evaluation import EvaluationResult, ResultFolders, format_metrics
from environments.sdk.groups import group_items
from environments.sdk.inference.manager import ServerManager
from environments.sdk.inference.reasoning import Reasoning
from environments.sdk.metrics import RolloutMetrics
from environments.sdk.session.address import SessionSettings
from environments.sdk.session.journal import current_journal
from environments.sdk.session.nodes import NOT_TRAINED
from environments.sdk.tokenizer import load_tokenizer
from environments.sdk.tracking import WandbTracker, rollout_table, run_name
from environments.sdk.types import Item, ScoredDataGroup, ScoredDataItem

if TYPE_CHECKING:
    from atropos_api.wire.groups import Group
    from environments.sdk.delivery import Delivery
    from environments.sdk.worker import EnvironmentWorker

logger = logging.getLogger(__name__)

KEPT_LENGTHS = 65_536


class BaseEnv(ABC):
    """An environment: where problems come from, how a model's attempts are collected and what they are worth.

    Three methods make one. This is a complete environment; `python colours.py serve` feeds a trainer from it:

        from environments.sdk import APIServerConfig, BaseEnv, BaseEnvConfig, scored_group

        class ColoursEnv(BaseEnv):
            name = "colours"

            @classmethod
            def config_init(cls):
                server = APIServerConfig(server_type="vllm", base_url="http://localhost:9001/v1")
                return BaseEnvConfig(group_size=8, max_token_length=64), server

            async def setup(self):
                self.colours = ["red", "green", "blue"]
                self.count = 0

            async def get_next_item(self):
                self.count += 1
                return self.colours[self.count % len(self.colours)]

            async def collect_trajectories(self, item):
                async with self.server.managed_server() as session:
                    answer = await session.chat_completion(
                        messages=[{"role": "user", "content": f"Name something {item}."}],
                        n=self.config.group_size,
                        max_tokens=32,
                    )
                    scores = [float(item not in choice.message.content) for choice in answer.choices]
                    return scored_group(session.nodes, scores), []

            async def evaluate(self):
                answer = await self.server.chat_completion(
                    messages=[{"role": "user", "content": "Name something red."}], temperature=0.0, max_tokens=32
                )
                right = float("red" not in answer.choices[0].message.content)
                await self.evaluate_log({"eval/accuracy": right})

        if __name__ == "__main__":
            ColoursEnv.cli()

    What happens to what you return: the sequences of a group are trained against each other, so each group holds the
    attempts at one item, `group_size` of them. `scored_group` takes the exact tokens, masks, logprobs and policy
    versions from the session; nothing is tokenised again. The second value returned is a list of items to try next.
    Return `None` instead of a group to drop the item. An exception is logged, the item tried again and then given up;
    it never becomes a reward of 0.

    Life cycle of `serve`: `setup`, register with the broker, then `get_next_item` and `collect_trajectories` for as
    many groups at once as the broker's pacing leaves room for, each followed by `postprocess_histories` and `cleanup`;
    `evaluate` each `steps_per_eval` trainer steps; when the run has finished the server exits with code 0.

    With `gold_items` and `score_answer` as well, `python colours.py validate` checks the scores before anything is
    trained on them, without a model: right answers must earn `best_score`, wrong ones less.
    """

    name: ClassVar[str | None] = None
    best_score: ClassVar[float] = 1.0
    env_config_cls: ClassVar[type[BaseEnvConfig]] = BaseEnvConfig
    server_config_cls: ClassVar[type[APIServerConfig]] = APIServerConfig
    lenient: ClassVar[bool] = False
    """Whether files may hold keys that nothing knows, and text alone may be trained on: for Atropos' environments."""

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
        self.delivery: Delivery | None = None
        self.worker: EnvironmentWorker | None = None
        self.evaluation_step: int | None = None
        self._results = ResultFolders()
        self.tracker: WandbTracker | None = None

    # What an environment overrides.

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, ServerBaseline | APIServerConfig | list[APIServerConfig]]:
        """The defaults under files and flags; called for `--help` too, so it loads nothing."""
        return cls.env_config_cls(), ServerBaseline()

    @classmethod
    def teacher_config_init(cls) -> ServerBaseline | APIServerConfig | list[APIServerConfig] | None:
        """The servers of a teacher under files and `--teacher.*`; None for an environment that has none."""
        return None

    @abstractmethod
    async def setup(self) -> None:
        """Load what the environment needs, once, before anything else."""

    @abstractmethod
    async def get_next_item(self) -> Item:
        """The next thing to try; None when there is none for now (`serve`) or no more (`process`)."""

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem | None, list[Item]]:
        """One scored attempt at `item`, and items to try next. Override this or `collect_trajectories`."""
        raise NotImplementedError(f"{type(self).__name__} needs collect_trajectories or collect_trajectory")

    async def collect_trajectories(
        self, item: Item
    ) -> tuple[ScoredDataGroup | Sequence[ScoredDataGroup | None] | Any | None, list[Item]]:
        """A group of scored attempts at `item`, and items to try next; by default `group_size` single attempts."""
        results: list[tuple[ScoredDataItem | None, list[Item]] | None] = [None] * self.config.group_size

        async def collect(index: int) -> None:
            results[index] = await self.collect_trajectory(item)

        async with anyio.create_task_group() as attempts:
            for index in range(self.config.group_size):
                attempts.start_soon(collect, index)
        done = [result for result in results if result is not None]
        backlog = [later for _, more in done for later in more]
        items = [attempt for attempt, _ in done if attempt is not None]
        return (group_items(items) if items else None), backlog

    async def postprocess_histories(
        self, trajectories: Any
    ) -> ScoredDataGroup | Sequence[ScoredDataGroup | None] | None:
        """A last change to what was collected, such as scoring against other groups; None drops it."""
        return trajectories  # type: ignore[no-any-return]

    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Measure the model and report with `evaluate_log`; an environment may go without.

        Requests made in here count as evaluation by themselves.
        """
        raise NotImplementedError(f"{type(self).__name__} has no evaluate")

    def gold_items(self) -> Iterable[GoldItem]:
        """For `validate`: items, each with a completion that must earn `best_score` and some that must earn less."""
        raise NotImplementedError(f"{type(self).__name__} has no gold_items")

    async def score_answer(self, item: Item, text: str) -> float:
        """For `validate`: what the completion `text` is worth for `item`; let `collect_trajectories` use it as well."""
        raise NotImplementedError(f"{type(self).__name__} has no score_answer")

    async def cleanup(self) -> None:  # noqa: B027 - most environments have nothing to clean up
        """Called after every group."""

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """Override to call `super().save_checkpoint(step, {...})` with what must survive a restart."""
        if data is not None and self.checkpoint_dir:
            checkpoint.save(Path(self.checkpoint_dir), self.registered_name, step, data)

    def load_checkpoint(self) -> None:
        """Called when a run is resumed: sets what was saved at the step as attributes."""
        if not self.checkpoint_dir:
            return
        for key, value in checkpoint.load(Path(self.checkpoint_dir), self.registered_name, self.curr_step).items():
            setattr(self, key, value)

    async def handle_send_to_api(
        self,
        scored_data: Any,
        item: Item = None,
        do_send_to_api: bool = True,
        abort_on_any_max_length_exceeded: bool = True,
    ) -> None:
        """Deliver what was collected, one group or several; override it to add to the groups, and call this."""
        if self.delivery is None:
            raise RuntimeError("groups can be sent only while the environment serves or processes")
        await self.delivery.deliver(
            scored_data, item, send=do_send_to_api, check_length=abort_on_any_max_length_exceeded
        )

    async def check_servers(self) -> None:  # noqa: B027 - most environments have none of their own
        """Called before `setup` where groups are collected, after the tokenizer: raise on an unfit server."""

    def require_servable(self) -> None:  # noqa: B027 - most environments are
        """Called first by `serve`: raise where the environment was written for another scheduler than this one."""

    async def get_server_info(self) -> None:
        """Called when a run is joined: takes over its batch size and longest sequence; without `super()` they stay."""
        if self.worker is not None:
            self.worker.take_run_facts()

    async def env_step_checks(self) -> None:
        """Called when the trainer has made a step, which `status_dict` tells and `curr_step` does not yet.

        What is due by then (a checkpoint, metrics, an evaluation) happens in here.
        """
        if self.worker is not None:
            self.worker.take_step()

    async def add_train_workers(self) -> None:
        """Called while there is room for rollouts, and begins them; without `super()` none begin."""
        if self.worker is not None:
            await self.worker.admit()

    async def setup_wandb(self) -> None:
        """Called once the run is known: what is logged from now on goes to Weights & Biases, if it is wanted."""
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
        texts = self.tokenizer.batch_decode(scored_data["tokens"][:count])
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

    # What an environment uses.

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer: encode, decode, chat template, and all of transformers' on demand."""
        name = self.config.tokenizer_name
        if name is None:
            raise TokenizerUnavailable("no tokenizer is named, and no server has told one; set --env.tokenizer_name")
        return load_tokenizer(name)

    @property
    def can_evaluate(self) -> bool:
        """Whether there is an `evaluate`."""
        return type(self).evaluate is not BaseEnv.evaluate

    @property
    def registered_name(self) -> str:
        """The stable name this environment has towards the broker."""
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
        """Report an evaluation: logged, and written to `data_dir_to_save_evals` where that is set."""
        finished = time.time() if end_time is None else end_time
        journal = current_journal()
        result = EvaluationResult(
            metrics=metrics,
            task_name=task_name or f"{self.registered_name}_eval",
            model_name=model_name or self.server.servers[0].config.model_name,
            seconds=finished - (finished if start_time is None else start_time),
            generation_parameters={"max_new_tokens": self.config.max_token_length, **(generation_parameters or {})},
            samples=samples or (),
            step=self.evaluation_step,
            versions=frozenset(journal.versions) if journal is not None else frozenset(),
        )
        if verbose:
            when = "" if self.evaluation_step is None else f" at step {self.evaluation_step}"
            logger.info("evaluation%s: %s", when, format_metrics(result.all_metrics()))
        directory = self.evaluation_directory()
        if directory is not None:
            await anyio.to_thread.run_sync(self._results.write, result, directory)
        self.log_metrics(result.all_metrics(), self.evaluation_step or 0)
        return result

    def evaluation_directory(self) -> Path | None:
        """Where the current evaluation's files go: a folder a step while serving."""
        if self.config.data_dir_to_save_evals is None:
            return None
        root = Path(self.config.data_dir_to_save_evals)
        return root if self.evaluation_step is None else root / f"step-{self.evaluation_step}"

    def note_sent(self, group: Group) -> None:
        """Count a group that is on its way."""
        self.metrics.sent += 1
        self.dropped_groups.note_sent()
        self.completion_lengths.extend(len(mask) - mask.count(NOT_TRAINED) for mask in group.masks)

    def set_teacher(self, server_configs: ServerBaseline | APIServerConfig | list[APIServerConfig]) -> None:
        """Where the teacher answers; for environments that have one."""
        raise NotImplementedError(f"{type(self).__name__} has no teacher")

    async def aclose(self) -> None:
        """Close what was opened; the last call."""
        await self.server.aclose()

    def log_metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        """Hand metrics of a trainer step to W&B, if it is used."""
        if self.tracker is not None:
            self.tracker.log(metrics, step)

    @classmethod
    def cli(cls) -> NoReturn:
        """The command line `serve | process | evaluate | validate` of this environment."""
        from atropos_api.common.cliconfig import run_cli
        from environments.sdk.cli import run_verb

        run_cli(lambda argv: run_verb(cls, argv))

    def _prefixed(self, key: str) -> str:
        return f"{self.wandb_prepend}_{key}" if self.wandb_prepend else key
