"""`atroposlib.envs.server_handling`: Atropos' names of servers, sessions and their sequences."""

from __future__ import annotations

import copy
import os
from typing import Any

from pydantic import BaseModel

from environments.compat.config import APIServerConfig, ServerBaseline
from environments.compat.reasoning import ReasoningConfig
from environments.sdk.config import as_server_list
from environments.sdk.errors import EnvironmentsError
from environments.sdk.inference import manager
from environments.sdk.inference.openai import OpenAIServer
from environments.sdk.inference.pool import ServerPool
from environments.sdk.inference.server import HttpServer as APIServer
from environments.sdk.inference.sglang import SglangServer as SGLangServer
from environments.sdk.inference.trl import TrlServer as TrlVllmServer
from environments.sdk.inference.vllm import VllmServer as VLLMServer
from environments.sdk.session.adapter import ManagedServerAdapter
from environments.sdk.session.address import SessionSettings
from environments.sdk.session.nodes import SequenceNode
from environments.sdk.session.proxy import SessionProxy
from environments.sdk.session.session import ManagedSession as ManagedServer
from environments.sdk.session.text_session import TextSession as DummyManagedServer
from environments.sdk.slurm import slurm_servers
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


NO_PROXY = (
    "sessions are not kept behind a proxy at {url}; open one with self.server.managed_server(use_proxy=True), whose "
    "get_url() agents can use"
)


class ServerClassUnused(EnvironmentsError):
    """An environment brings along a class of inference servers, which is not the one that is asked here."""


class ServerManagerConfig(BaseModel):
    """Settings of Atropos' manager; ours follows the environment's."""

    slurm: bool = False
    testing: bool = False
    max_n_completions: int = 8
    proxy_url: str | None = None


class ServerManager(manager.ServerManager):
    """A manager that an environment makes itself, for a judge or a second model."""

    def __init__(
        self,
        configs: Any,
        server_class: Any = APIServer,
        slurm: bool = False,
        testing: bool = False,
        max_n_completions: int = manager.MAX_N_COMPLETIONS,
        reasoning_config: ReasoningConfig | None = None,
        proxy_url: str | None = None,
        use_proxy: bool = False,
        tool_parser: Any = None,
    ) -> None:
        refuse_server_class(server_class)
        if testing:
            raise NotImplementedError(
                "testing: environments.sdk.testing.FakeInference is an inference server for tests"
            )
        proxy_url = proxy_url or os.environ.get("ATROPOS_PROXY_URL")
        if proxy_url or use_proxy:
            raise NotImplementedError(NO_PROXY.format(url=proxy_url or "ATROPOS_PROXY_URL"))
        servers = as_server_list(configs)
        if slurm and "SLURM_JOB_NODELIST" in os.environ:
            servers = slurm_servers(servers[0])
        name = next((s.tokenizer_name for s in servers if s.tokenizer_name != "none"), servers[0].model_name)
        super().__init__(
            servers,
            load_tokenizer=lambda: load_tokenizer(name),
            max_n_completions=max_n_completions,
            reasoning=None if reasoning_config is None else reasoning_config.as_reasoning(),
            tool_parser=tool_parser or "hermes",
            sessions=SessionSettings(key_in_url=True),
        )
        self.reasoning_config = reasoning_config


def refuse_server_class(server_class: Any) -> None:
    """Refuse servers of a class that an environment brings along: nothing asks them in Atropos' way."""
    if server_class not in {APIServer, OpenAIServer, SGLangServer, TrlVllmServer, VLLMServer}:
        raise ServerClassUnused(
            f"{getattr(server_class, '__name__', server_class)}: servers of an environment's own class are not asked "
            "here; name the kind with --openai.server_type openai, trl, sglang or vllm"
        )


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
    raise NotImplementedError(NO_PROXY.format(url=proxy_url))
