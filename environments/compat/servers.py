"""`atroposlib.envs.server_handling`: Atropos' names of servers, sessions and their sequences."""

from __future__ import annotations

import copy
from typing import Any

from pydantic import BaseModel

from environments.compat.config import APIServerConfig, ServerBaseline
from environments.sdk.config import as_server_list
from environments.sdk.inference import manager
from environments.sdk.inference.openai import OpenAIServer
from environments.sdk.inference.pool import ServerPool
from environments.sdk.inference.reasoning import Reasoning as ReasoningConfig
from environments.sdk.inference.server import HttpServer as APIServer
from environments.sdk.inference.sglang import SglangServer as SGLangServer
from environments.sdk.inference.trl import TrlServer as TrlVllmServer
from environments.sdk.inference.vllm import VllmServer as VLLMServer
from environments.sdk.session.adapter import ManagedServerAdapter
from environments.sdk.session.nodes import SequenceNode
from environments.sdk.session.proxy import SessionProxy
from environments.sdk.session.session import ManagedSession as ManagedServer
from environments.sdk.session.text_session import TextSession as DummyManagedServer
from environments.sdk.tokenizer import load_tokenizer

ProxyManagedServer = ManagedServer
"""A session that is served: the same class, opened with `use_proxy=True`."""

__all__ = [
    "APIServer",
    "APIServerConfig",
    "DummyManagedServer",
    "ManagedServer",
    "ManagedServerAdapter",
    "OpenAIServer",
    "ProxyManagedServer",
    "ReasoningConfig",
    "SGLangServer",
    "SequenceNode",
    "ServerBaseline",
    "ServerManager",
    "ServerManagerConfig",
    "TrlVllmServer",
    "VLLMServer",
    "create_app",
    "create_proxy_session",
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


def create_app(server_manager: manager.ServerManager, tokenizer: Any = None, model_name: str = "") -> SessionProxy:
    """An application that opens and serves sessions, to whoever the environment that serves it lets in."""
    return SessionProxy(server_manager, tokenizer=tokenizer, model_name=model_name or None, asks_for_keys=False)


async def create_proxy_session(proxy_url: str, **_: Any) -> ManagedServer:
    """Refused: a session lives in the environment, and is served from there."""
    raise NotImplementedError(
        f"sessions are not kept behind a proxy at {proxy_url}; "
        "open one with self.server.managed_server(use_proxy=True), whose get_url() agents can use"
    )
