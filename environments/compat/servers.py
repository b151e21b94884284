"""`atroposlib.envs.constants` and `atroposlib.envs.server_handling`: names of servers, sessions, sequences and their
configuration.

Configuration classes ignore unknown keys, as Atropos does, and log a warning. Values with a special meaning in
Atropos are converted: an `inference_weight` of -1 becomes 1, and a `base_url` of None is OpenAI's API.
`ReasoningConfig` is the amount of reasoning requested from providers; environments build it themselves.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self, cast, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from environments.sdk import config as sdk
from environments.sdk import server_manager
from environments.sdk.config import ReasoningEffort, SessionSettings, as_server_list, slurm_servers
from environments.sdk.errors import EnvironmentsError
from environments.sdk.inference.other_servers import SglangServer as SGLangServer
from environments.sdk.inference.other_servers import TrlServer as TrlVllmServer
from environments.sdk.inference.pool import ServerPool
from environments.sdk.inference.sampling import OPENAI_HOST, TOKENS_BY_EFFORT, Reasoning
from environments.sdk.inference.server import HttpServer as APIServer
from environments.sdk.inference.server import OpenAIServer
from environments.sdk.inference.vllm import VllmServer as VLLMServer
from environments.sdk.session.openai_client import ManagedServerAdapter
from environments.sdk.session.openai_proxy import SessionProxy
from environments.sdk.session.session import ManagedSession as ManagedServer
from environments.sdk.session.session import TextSession as DummyManagedServer
from environments.sdk.session.tokens_and_masks import SequenceNode
from environments.sdk.tokenizer import load_tokenizer

__all__ = [
    "ENV_NAMESPACE",
    "NAMESPACE_SEP",
    "OPENAI_NAMESPACE",
    "SERVER_MANAGER_NAMESPACE",
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

ENV_NAMESPACE = "env"
OPENAI_NAMESPACE = "openai"
SERVER_MANAGER_NAMESPACE = "server"
NAMESPACE_SEP = "."

logger = logging.getLogger(__name__)


def known_fields(model: type[BaseModel], values: Any) -> Any:
    """Return `values` without the keys that the model has no field for; each call logs a warning that lists them."""
    if not isinstance(values, Mapping):
        return values
    unknown = sorted(str(key) for key in values if key not in model.model_fields)
    if unknown:
        logger.warning("%s: ignored unknown keys: %s", model.__name__, ", ".join(unknown))
    return {key: value for key, value in values.items() if key in model.model_fields}


class BaseEnvConfig(sdk.BaseEnvConfig):
    """The configuration of environments written for Atropos."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), arbitrary_types_allowed=True)

    allow_truncated_sampling: bool = Field(
        True, description="Train on top-p or top-k samples; their groups are marked."
    )
    eval_limit_ratio: float = Field(
        0.5, ge=0, le=1, description="Share of the workers that collect groups under LIMIT_TRAIN; 0: one worker."
    )

    @model_validator(mode="before")
    @classmethod
    def _lenient(cls, values: Any) -> Any:
        values = known_fields(cls, values)
        if isinstance(values, dict):
            if _number(values.get("inference_weight")) == -1:
                values["inference_weight"] = 1.0
            for name in ("max_batches_offpolicy", "min_items_sent_before_logging"):
                if (number := _number(values.get(name))) is not None and number < 1:
                    values[name] = 1
        return values


class ServerBaseline(sdk.ServerBaseline):
    """The settings that inference servers share."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _lenient(cls, values: Any) -> Any:
        return known_fields(cls, values)


class APIServerConfig(sdk.APIServerConfig):
    """One inference server; None stands for the default, and so does a limit of no evaluation request at all."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    _of_openai: dict[str, str] = PrivateAttr(default_factory=dict)
    """Address and key of OpenAI's API that stand for settings of None."""

    @model_validator(mode="wrap")
    @classmethod
    def _lenient(cls, values: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        values = known_fields(cls, values)
        if not isinstance(values, dict):
            return read(values)
        given = {name: value for name, value in values.items() if value is not None}
        if _number(given.get("num_requests_for_eval")) == 0:
            del given["num_requests_for_eval"]
        of_openai = {name: value for name, value in _openai_itself(values).items() if name not in given}
        config = read({**of_openai, **given})
        config._of_openai = of_openai  # noqa: SLF001 - this class's own
        return config

    def as_defaults(self) -> dict[str, Any]:
        """Return None for the settings of OpenAI's API: another address that replaces it must not get its key."""
        return {**super().as_defaults(), **dict.fromkeys(self._of_openai)}


def _number(value: Any) -> float | None:
    """Return a setting as a number, which a flag gives as text; None for what is none and is refused later."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _openai_itself(values: Mapping[str, Any]) -> dict[str, str]:
    """Return address and key of OpenAI's API if the address is None, as OpenAI's client does in Atropos."""
    if values.get("base_url", "") is not None or values.get("server_type", "openai") != "openai":
        return {}
    url = os.environ.get("OPENAI_BASE_URL", f"https://{OPENAI_HOST}/v1")
    return {"base_url": url, "api_key": os.environ.get("OPENAI_API_KEY", "")}


EFFORTS = get_args(ReasoningEffort)


@dataclass
class ReasoningConfig:
    """Settings of a model's reasoning; an effort or a number of tokens enables it."""

    EFFORT_TO_MAX_TOKENS: ClassVar[dict[str, int]] = {
        str(effort): tokens for effort, tokens in TOKENS_BY_EFFORT.items()
    }

    enabled: bool = False
    effort: str | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.effort is not None and self.effort not in EFFORTS:
            raise ValueError(f"Invalid reasoning_effort: {self.effort}; it is one of {', '.join(EFFORTS)}")
        self.enabled = self.enabled or self.effort is not None or self.max_tokens is not None

    @classmethod
    def from_env_config(cls, env_config: Any) -> ReasoningConfig:
        """Make the settings from an environment's configuration."""
        return cls(
            enabled=bool(getattr(env_config, "thinking_mode", False)),
            effort=getattr(env_config, "reasoning_effort", None),
            max_tokens=getattr(env_config, "max_reasoning_tokens", None),
        )

    def is_reasoning_kwargs_active(self) -> bool:
        return self.enabled

    def build_extra_body(self, base_url: str | None = None, use_max_tokens: bool = False) -> dict[str, Any] | None:
        """Return the request fields for reasoning: OpenAI's API takes only an effort, others an effort or a limit."""
        if not self.enabled:
            return None
        if urlsplit(base_url or "").hostname == OPENAI_HOST:
            return {"reasoning_effort": self.effort or "medium"}
        if self.effort is not None:
            amount: dict[str, Any] = (
                {"max_tokens": self.EFFORT_TO_MAX_TOKENS[self.effort]} if use_max_tokens else {"effort": self.effort}
            )
        else:
            amount = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        return {"reasoning": {"enabled": True, **amount}}

    def as_reasoning(self) -> Reasoning:
        """Return the same settings as `Reasoning`, for our servers."""
        return Reasoning(self.enabled, cast("ReasoningEffort | None", self.effort), self.max_tokens)


ProxyManagedServer = ManagedServer
"""A session that is also served over HTTP: the same class, opened with `use_proxy=True`."""


NO_PROXY = (
    "sessions are not kept behind a proxy at {url}; open one with self.server.managed_server(use_proxy=True), whose "
    "get_url() agents can use"
)


class ServerClassUnused(EnvironmentsError):
    """An environment names its own class of inference servers, which is not used here."""


class ServerManagerConfig(BaseModel):
    """Settings of Atropos' manager; our manager takes its own from the environment's configuration."""

    slurm: bool = False
    testing: bool = False
    max_n_completions: int = 8
    proxy_url: str | None = None


class ServerManager(server_manager.ServerManager):
    """A server manager that an environment makes itself, for a judge or a second model."""

    def __init__(
        self,
        configs: Any,
        server_class: Any = APIServer,
        slurm: bool = False,
        testing: bool = False,
        max_n_completions: int = server_manager.MAX_N_COMPLETIONS,
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
    """Refuse an environment's own class of servers: its request methods would never be called."""
    if server_class not in {APIServer, OpenAIServer, SGLangServer, TrlVllmServer, VLLMServer}:
        raise ServerClassUnused(
            f"{getattr(server_class, '__name__', server_class)}: an environment's own class of servers is not "
            "supported; name the kind with --openai.server_type openai, trl, sglang or vllm"
        )


def answer_one_by_one(servers: server_manager.ServerManager) -> None:
    """Give each server of a manager Atropos' methods: environments with a judge select theirs by index."""
    for server in servers.servers:
        alone = copy.copy(servers)
        alone.pool = ServerPool(
            [server], max_n_completions=servers.pool.max_n_completions, wait_timeout_seconds=server.config.timeout
        )
        own = {"chat_completion": alone.chat_completion, "completion": alone.completion}
        for name, method in {**own, "wandb_metrics": partial(wandb_metrics, server)}.items():
            setattr(server, name, method)


async def wandb_metrics(server: APIServer, metrics_dict: dict[str, Any], server_name: str | None) -> dict[str, Any]:
    """Add the timings of one server to the metrics, under the name that the environment gives it."""
    metrics_dict.update(server.metrics(server_name or "server"))
    return metrics_dict


def create_app(
    server_manager: server_manager.ServerManager, tokenizer: Any = None, model_name: str = ""
) -> SessionProxy:
    """Make an application that opens and serves sessions without keys; the environment must control access."""
    return SessionProxy(server_manager, tokenizer=tokenizer, model_name=model_name or None, asks_for_keys=False)


async def create_proxy_session(proxy_url: str, **_: Any) -> ManagedServer:
    """Refuse: a session exists in the environment's process and is served from there."""
    raise NotImplementedError(NO_PROXY.format(url=proxy_url))
