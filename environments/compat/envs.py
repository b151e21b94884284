"""The module has the names of `atroposlib.envs` and its types, for environments written for Atropos.

- `atroposlib.envs.base`: our `BaseEnv` with the attributes and the leniency that Atropos' environments rely on.
- `atroposlib.envs.eval`: evaluations that are not environments, and their runner.
- `atroposlib.envs.teacher_distillation_env`: our teacher distillation.
- `atroposlib.type_definitions`: types for annotations only; their values are not checked.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypedDict

from atropos_api.common.concurrency import run_all, run_blocking
from environments.compat.servers import (
    APIServer,
    APIServerConfig,
    BaseEnvConfig,
    ServerBaseline,
    ServerManager,
    ServerManagerConfig,
    answer_one_by_one,
    refuse_server_class,
)
from environments.sdk import base_env as sdk
from environments.sdk.config import EvalHandlingEnum
from environments.sdk.errors import EnvironmentsError
from environments.sdk.groups import UUID, Item, Message, ScoredDataGroup, ScoredDataItem, number
from environments.sdk.reporting import EvaluationResult, format_metrics, keep_earlier
from environments.sdk.teacher import TeacherFields, TeacherMixin

__all__ = [
    "UUID",
    "APIServer",
    "APIServerConfig",
    "AgentHistory",
    "AgentStep",
    "BaseEnv",
    "BaseEnvConfig",
    "Content",
    "EvalBase",
    "EvalHandlingEnum",
    "EvaluationSample",
    "GameHistory",
    "GameStep",
    "Item",
    "Message",
    "Observation",
    "OpenaiConfig",
    "ScoredDataGroup",
    "ScoredDataItem",
    "ServerBaseline",
    "ServerManager",
    "ServerManagerConfig",
    "TeacherDistillationConfig",
    "TeacherDistillationEnv",
    "eval_runner",
    "evaluate_log",
    "logger",
    "number",
    "pass_at_k",
]

Content = str | list[Any]


class Observation(TypedDict):
    """An observation of a game: as data, and as the text or content for a model."""

    raw: dict[str, Any]
    rendered: Content


class AgentStep(TypedDict, total=False):
    """One step of an agent: the messages in it and its reward."""

    step: int
    messages: list[Message]
    reward: float


class GameStep(TypedDict, total=False):
    """One step of a game: observation, action, reward, and if it was the last."""

    step: int
    agent_id: str
    observation: Observation
    action: str
    reward: float | dict[str, float]
    done: bool
    info: dict[str, Any]


AgentHistory = dict[str, list[AgentStep]]

GameHistory = list[GameStep]

EvaluationSample = dict[str, Any]

logger = logging.getLogger(__name__)
"""Atropos' environments import it from the module of `BaseEnv`."""

OpenaiConfig = APIServerConfig
"""An old name that environments still import although Atropos itself removed it."""

ALLOW_ESTIMATED_TOKENS = "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"
"""The variable by which Atropos allows sessions with servers that return text only; here like
`allow_estimated_tokens`.
"""

OFF = frozenset({"", "0", "false", "no", "off"})
"""Values that leave it off, in lower or upper case."""

REPLACED = ("env_manager", "process_manager", "handle_env", "get_status", "register_env")
"""Methods of Atropos' scheduler that are never called here: an override of one would have no effect."""


class SchedulerReplaced(EnvironmentsError):
    """The environment overrides a part of Atropos' scheduler, which is replaced here."""


class BaseEnv(sdk.BaseEnv):
    """Environments written for Atropos subclass this class."""

    env_config_cls: ClassVar[type[BaseEnvConfig]] = BaseEnvConfig
    server_cls: ClassVar[Any] = APIServer
    server_config_cls: ClassVar[type[APIServerConfig]] = APIServerConfig
    lenient: ClassVar[bool] = True

    def __init__(
        self,
        config: Any,
        server_configs: Any,
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        refuse_server_class(self.server_cls)
        super().__init__(config, server_configs, slurm=slurm, testing=testing)
        answer_one_by_one(self.server)
        self.server.allow_estimated_tokens |= os.environ.get(ALLOW_ESTIMATED_TOKENS, "").lower() not in OFF
        self.completion_lengths = []
        self.workers: set[Any] = set()
        self.eval_workers: set[Any] = set()
        self.backlog: list[Item] = []
        self.running_items: dict[str, Any] = {}
        self.items_sent_this_step = 0
        self.checkpoint_interval = -1
        self.eval_runner: Any = None
        self.jsonl_writer: Any = None
        self.env_id: int | None = None
        self.max_num_workers = config.max_num_workers
        if self.max_num_workers == -1:
            self.max_num_workers = config.max_num_workers_per_node * len(self.server.servers)

    @classmethod
    def config_init(cls) -> Any:
        return cls.env_config_cls(), ServerBaseline()

    async def setup(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no setup")

    async def setup_wandb(self) -> None:
        """Begin W&B's run at once, since these environments log to it themselves."""
        await super().setup_wandb()
        if self.tracker is not None:
            await run_blocking(self.tracker.begin, about="W&B")

    def perf_stats(self, metrics_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the metrics unchanged: timings are added later."""
        return metrics_dict

    def require_servable(self) -> None:
        overridden = [name for name in REPLACED if hasattr(type(self), name)]
        if overridden:
            raise SchedulerReplaced(
                f"{type(self).__name__} overrides {', '.join(overridden)} of Atropos' scheduler, which is not called "
                "here; setup, get_server_info, env_step_checks, add_train_workers, handle_send_to_api and cleanup are"
            )


def pass_at_k(m: int, c: int, k: int) -> float:
    """Return the probability that one of `k` samples, drawn from `m` of which `c` are right, is right."""
    return 1.0 if m - c < k else 1.0 - math.comb(m - c, k) / math.comb(m, k)


def evaluate_log(
    metrics: Mapping[str, Any],
    eval_dir: str | None = None,
    task_name: str | None = None,
    model_name: str | None = None,
    start_time: float | None = None,
    end_time: float | None = None,
    generation_parameters: Mapping[str, Any] | None = None,
    samples: Sequence[Any] | None = None,
    verbose: bool = True,
) -> None:
    """Write `metrics.json` and `samples.jsonl` to `eval_dir`, if it is set."""
    if verbose:
        logger.info("%s: %s", task_name, format_metrics(metrics))
    if eval_dir is None:
        logger.warning("no eval_dir is set, so nothing is written")
        return
    keep_earlier(Path(eval_dir))
    now = time.time()
    EvaluationResult(
        metrics=metrics,
        task_name=task_name or "eval",
        model_name=model_name or "default",
        seconds=(end_time or now) - (start_time or end_time or now),
        generation_parameters=generation_parameters or {},
        samples=() if samples is None else tuple(samples),
    ).write(Path(eval_dir))


class EvalBase(ABC):
    """An evaluation: its data and a method that runs one item. Keyword arguments become attributes."""

    def __init__(self, pass_at_n: int = 1, pass_at_n_samples: int = 1, **kwargs: Any) -> None:
        self.pass_at_n = pass_at_n
        self.pass_at_n_samples = pass_at_n_samples
        for name, value in kwargs.items():
            setattr(self, name, value)
        self.data = self.setup_data()

    def get_generation_params(self) -> dict[str, Any]:
        """Return the sampling parameters of each request."""
        limit = getattr(self, "max_tokens", -1)
        return {
            "temperature": getattr(self, "temperature", 0.0),
            "n": max(self.pass_at_n, self.pass_at_n_samples),
            "top_p": getattr(self, "top_p", 1.0),
            "max_tokens": limit if limit and limit > 0 else None,
        }

    async def chat_completion(self, server: Any, messages: Sequence[Mapping[str, Any]]) -> Any:
        return await server.chat_completion(messages=messages, **self.get_generation_params(), split="eval")

    @abstractmethod
    def setup_data(self) -> Any:
        """Return the items as a list or another sized iterable, or an awaitable of it."""

    @abstractmethod
    async def run_item(self, server: Any, data_item: Any) -> tuple[dict[str, float], Any]:
        """Run one item; return its metrics and the sample to keep."""

    async def __call__(self, server_manager: Any) -> dict[str, float]:
        started = time.time()
        if inspect.isawaitable(self.data):
            self.data = await self.data
        results = await run_all([partial(self.run_item, server_manager, item) for item in self.data])
        metrics = {key: sum(found[key] for found, _ in results) / len(results) for key in results[0][0]}
        times = "" if self.pass_at_n == self.pass_at_n_samples else f":{self.pass_at_n_samples}"
        evaluate_log(
            metrics,
            eval_dir=getattr(self, "eval_dir", None),
            task_name=f"{type(self).__name__}@{self.pass_at_n}{times}",
            model_name=server_manager.servers[0].config.model_name,
            start_time=started,
            generation_parameters=self.get_generation_params(),
            samples=[kept for _, kept in results],
            end_time=time.time(),
        )
        return metrics


async def eval_runner(eval_env: EvalBase) -> dict[str, float]:
    """Run an evaluation on `--server-url` with the model `--model-name`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--server-url", default="http://localhost:8000")
    parser.add_argument("--model-name", default="default")
    given = parser.parse_args()
    manager = ServerManager([APIServerConfig(base_url=given.server_url, model_name=given.model_name)])
    try:
        return await eval_env(manager)
    finally:
        await manager.aclose()


class TeacherDistillationConfig(TeacherFields, BaseEnvConfig):
    """The configuration has the settings of any environment and those of a teacher."""


class TeacherDistillationEnv(TeacherMixin, BaseEnv):
    """The environment adds a teacher's logprobs to its groups."""

    env_config_cls: ClassVar[type[BaseEnvConfig]] = TeacherDistillationConfig
