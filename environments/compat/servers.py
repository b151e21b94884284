"""`atroposlib.envs.server_handling`: Atropos' names of servers, sessions and their sequences."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel

from environments.compat.config import APIServerConfig, ServerBaseline
from environments.sdk.config import as_server_list
from environments.sdk.inference import manager
from environments.sdk.inference.openai import OpenAIServer
from environments.sdk.inference.pool import ServerPool
from environments.sdk.inference.reasoning import Reasoning as ReasoningConfig
from environments.sdk.inference.server import HttpServer as APIServer
from environments.sdk.inference.vllm import VllmServer as VLLMServer
from environments.sdk.session.nodes import SequenceNode
from environments.sdk.session.session import ManagedSession as ManagedServer
from environments.sdk.tokenizer import load_tokenizer

__all__ = [
    "APIServer",
    "APIServerConfig",
    "ManagedServer",
    "ManagedServerAdapter",
    "OpenAIServer",
    "ReasoningConfig",
    "SequenceNode",
    "ServerBaseline",
    "ServerManager",
    "ServerManagerConfig",
    "VLLMServer",
]


class ServerManagerConfig(BaseModel):
    """Settings of Atropos' manager; ours follows the environment's."""

    slurm: bool = False
    testing: bool = False
    max_n_completions: int = 8
    proxy_url: str | None = None


class ServerManager(manager.ServerManager):
    """A manager that an environment makes itself, for a judge or a second model."""

    def __init__(self, configs: Any, slurm: bool = False, testing: bool = False, **more: Any) -> None:  # noqa: ARG002
        servers = as_server_list(configs)
        name = next((s.tokenizer_name for s in servers if s.tokenizer_name != "none"), servers[0].model_name)
        options = {key: more[key] for key in ("max_n_completions",) if key in more}
        super().__init__(servers, load_tokenizer=lambda: load_tokenizer(name), **options)


def answer_one_by_one(servers: manager.ServerManager) -> None:
    """Let each server of a manager be asked by itself too: environments with a judge pick theirs by number."""
    for server in servers.servers:
        alone = copy.copy(servers)
        alone.pool = ServerPool(
            [server], max_n_completions=servers.pool.max_n_completions, wait_timeout_seconds=server.config.timeout
        )
        for call in ("chat_completion", "completion"):
            setattr(server, call, getattr(alone, call))


class ManagedServerAdapter:
    """A session in the form of OpenAI's client, for libraries that want one."""

    def __init__(self, managed_server: Any, base_url: str = "") -> None:
        self.base_url = base_url
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=_without_model(managed_server.chat_completion)))
        self.completions = SimpleNamespace(create=_without_model(managed_server.completion))

    def copy(self, **changes: Mapping[str, Any]) -> ManagedServerAdapter:
        raise NotImplementedError(f"a session cannot be copied (asked to change {', '.join(changes) or 'nothing'})")

    async def post(self, path: str, *rest: Sequence[Any]) -> Any:
        raise NotImplementedError(f"a session answers chat and text completions alone, not {path} {rest or ''}")


def _without_model(call: Any) -> Any:
    async def create(**kwargs: Any) -> Any:
        kwargs.pop("model", None)
        return await call(**kwargs)

    return create
