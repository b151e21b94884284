"""`atroposlib.envs.base`: our `BaseEnv` with the attributes and the leniency that Atropos' environments rely on."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import anyio

from environments.compat.config import APIServerConfig, BaseEnvConfig, ServerBaseline
from environments.compat.servers import APIServer, ServerManager, ServerManagerConfig, answer_one_by_one
from environments.sdk import env as sdk
from environments.sdk.config import EvalHandlingEnum
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
]

logger = logging.getLogger(__name__)

OpenaiConfig = APIServerConfig
"""An old name that environments still import although Atropos itself dropped it."""

NOT_CALLED = ("add_train_workers", "env_step_checks", "get_server_info", "get_status", "register_env", "env_manager")


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
        super().__init__(config, server_configs, slurm=slurm, testing=testing)
        answer_one_by_one(self.server)
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
        self._say_what_is_not_called()

    @classmethod
    def config_init(cls) -> Any:
        return cls.env_config_cls(), ServerBaseline()

    async def setup(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no setup")

    async def setup_wandb(self) -> None:
        """Begin W&B's run at once: these environments log to it themselves."""
        await super().setup_wandb()
        if self.tracker is not None:
            await anyio.to_thread.run_sync(self.tracker.begin)

    def perf_stats(self, metrics_dict: dict[str, Any]) -> dict[str, Any]:
        """Timings are added to the metrics later; nothing is left to do here."""
        return metrics_dict

    async def env_step_checks(self) -> None:
        """Called from overrides alone; what it stands for happens in the scheduler."""

    async def add_train_workers(self) -> None:
        """Called from overrides alone."""

    async def get_server_info(self) -> None:
        """Called from overrides alone."""

    def _say_what_is_not_called(self) -> None:
        overridden = [
            name for name in NOT_CALLED if getattr(type(self), name, None) is not getattr(BaseEnv, name, None)
        ]
        if overridden:
            logger.warning(
                "%s overrides %s of Atropos' scheduler, which is not called here; what it does there does not happen",
                type(self).__name__,
                ", ".join(overridden),
            )
