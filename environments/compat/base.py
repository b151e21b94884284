"""`atroposlib.envs.base`: our `BaseEnv` with the attributes and the leniency that Atropos' environments rely on."""

from __future__ import annotations

import logging
import os
from typing import Any, ClassVar

from environments.compat.config import APIServerConfig, BaseEnvConfig, ServerBaseline
from environments.compat.servers import (
    APIServer,
    ServerManager,
    ServerManagerConfig,
    answer_one_by_one,
    refuse_server_class,
)
from environments.sdk import env as sdk
from environments.sdk.background import run_blocking
from environments.sdk.config import EvalHandlingEnum
from environments.sdk.errors import EnvironmentsError
from environments.sdk.types import Item, Message, ScoredDataGroup, ScoredDataItem

__all__ = [
    "APIServer",
    "APIServerConfig",
    "BaseEnv",
    "BaseEnvConfig",
    "EvalHandlingEnum",
    "Item",
    "Message",
    "OpenaiConfig",
    "ScoredDataGroup",
    "ScoredDataItem",
    "ServerBaseline",
    "ServerManager",
    "ServerManagerConfig",
    "logger",
]

logger = logging.getLogger(__name__)
"""Environments take it along with `BaseEnv`."""

OpenaiConfig = APIServerConfig
"""An old name that environments still import although Atropos itself dropped it."""

ALLOW_ESTIMATED_TOKENS = "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"
"""The variable by which Atropos lets sessions have providers of text; here the same as `allow_estimated_tokens`."""

REPLACED = ("env_manager", "process_manager", "handle_env", "get_status", "register_env")
"""Parts of Atropos' scheduler that nothing calls here: an override of one would silently do nothing."""


class SchedulerReplaced(EnvironmentsError):
    """The environment brings along a part of Atropos' scheduler, which is another one here."""


class BaseEnv(sdk.BaseEnv):
    """An environment written for Atropos."""

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
        self.server.allow_estimated_tokens |= bool(os.environ.get(ALLOW_ESTIMATED_TOKENS))
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
        """Begin W&B's run at once: these environments log to it themselves."""
        await super().setup_wandb()
        if self.tracker is not None:
            await run_blocking(self.tracker.begin, about="W&B")

    def perf_stats(self, metrics_dict: dict[str, Any]) -> dict[str, Any]:
        """Timings are added to the metrics later; nothing is left to do here."""
        return metrics_dict

    def require_servable(self) -> None:
        overridden = [name for name in REPLACED if hasattr(type(self), name)]
        if overridden:
            raise SchedulerReplaced(
                f"{type(self).__name__} overrides {', '.join(overridden)} of Atropos' scheduler, which is not called "
                "here; setup, get_server_info, env_step_checks, add_train_workers, handle_send_to_api and cleanup are"
            )
