"""`ServerManager`, available to environments as `self.server`: it puts all inference servers behind one object."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio

from atropos_api.common.cliconfig import ConfigError
from environments.sdk.config import APIServerConfig, SessionSettings
from environments.sdk.inference.http_transport import Transport
from environments.sdk.inference.other_servers import SglangServer, TrlServer
from environments.sdk.inference.pool import ServerPool, StickyServer
from environments.sdk.inference.registered import RegisteredServers
from environments.sdk.inference.sampling import Reasoning, Sampling, Split
from environments.sdk.inference.server import HttpServer, OpenAIServer, ServedPolicy
from environments.sdk.inference.vllm import VllmServer
from environments.sdk.progress import note_sequences_done
from environments.sdk.session.openai_types import ChatCompletion, Completion, read_openai_chat, read_openai_completion
from environments.sdk.session.prompt_tokens import DriftLog
from environments.sdk.session.session import ManagedSession, TextSession
from environments.sdk.session.tokens_and_masks import current_split
from environments.sdk.tokenizer import Codec

if TYPE_CHECKING:
    from environments.sdk.session.openai_proxy import SessionProxy

SERVER_KINDS: Mapping[str, type[HttpServer]] = {
    "vllm": VllmServer,
    "sglang": SglangServer,
    "trl": TrlServer,
    "openai": OpenAIServer,
}

MAX_N_COMPLETIONS = 8


def _registered(
    configs: Sequence[APIServerConfig], make: Callable[[APIServerConfig], HttpServer]
) -> RegisteredServers | None:
    """Return the registered servers of the policy that the settings name; None if they name servers."""
    named = [config for config in configs if config.policy]
    if not named:
        return None
    if len(configs) > 1:
        raise ConfigError(
            f"openai.policy {named[0].policy}: {len(configs)} servers are listed, and this one stands for all that are "
            "registered; leave the others out"
        )
    return RegisteredServers(named[0], make)


class ServerManager:
    """The inference servers as one: a request goes to the healthy server with the fewest in flight; a session keeps its
    own.
    """

    def __init__(
        self,
        configs: Sequence[APIServerConfig],
        *,
        load_tokenizer: Callable[[], Any],
        wait_timeout_seconds: float = 600.0,
        allow_truncated_sampling: bool = False,
        sampling_mask_limit: int = 0,
        allow_estimated_tokens: bool = False,
        reasoning: Reasoning | None = None,
        tool_parser: Any = "hermes",
        max_n_completions: int = MAX_N_COMPLETIONS,
        sessions: SessionSettings | None = None,
        transport: Transport | None = None,
    ) -> None:
        self._wait_timeout_seconds = wait_timeout_seconds
        self._reasoning = reasoning or Reasoning()
        self._transport = transport
        self._policy: ServedPolicy | None = None
        self._share: float | None = None
        self._load_tokenizer = load_tokenizer
        self.tool_parser = tool_parser
        self.drift = DriftLog()
        self.registered = _registered(configs, self._make_server)
        """The servers as they are registered at the broker, if they are not named."""
        self.pool = ServerPool(
            list(map(self._make_server, configs)) if self.registered is None else self.registered.servers,
            max_n_completions=max_n_completions,
            wait_timeout_seconds=wait_timeout_seconds,
            registered=self.registered,
        )
        self._allow_truncated = allow_truncated_sampling
        self._mask_limit = sampling_mask_limit
        self.allow_estimated_tokens = allow_estimated_tokens
        self._sessions = sessions or SessionSettings()
        self._proxy: SessionProxy | None = None
        self._starting_proxy = anyio.Lock()
        self._codecs: dict[int, Codec] = {}

    @property
    def config(self) -> APIServerConfig:
        """The config of the first server, which is the only server of a `dedicated_server`."""
        return self.configs[0]

    @property
    def configs(self) -> list[APIServerConfig]:
        """The config of each server, or the one that all registered servers share."""
        if self.registered is not None:
            return [self.registered.template]
        return [server.config for server in self.servers]

    @property
    def servers(self) -> list[HttpServer]:
        return self.pool.servers

    @asynccontextmanager
    async def managed_server(
        self,
        tokenizer: Any = None,
        *,
        use_proxy: bool = False,
        base_url: str | None = None,
        tool_call_parser: Any = None,
        **options: Any,
    ) -> AsyncIterator[ManagedSession]:
        """Open a session that keeps exact tokens, masks, logprobs and versions; `options` are those of
        `ManagedSession`.

        With `use_proxy` any client of OpenAI's API can use the address `get_url()` with `api_key` while the session is
        open. `base_url` selects one of several servers for it.
        """
        session = self.open_session(tokenizer, base_url=base_url, tool_call_parser=tool_call_parser, **options)
        if not use_proxy:
            yield session
        else:
            proxy = await self._started_proxy()
            with proxy.serve(session):
                yield session
        note_sequences_done(len(session.nodes))

    def open_session(self, tokenizer: Any = None, *, base_url: str | None = None, **options: Any) -> ManagedSession:
        """Open a session that nothing closes; for a server that returns only text the tokens are estimated."""
        server = self.pool.sticky(base_url)
        options = {"tool_parser": self.tool_parser, **options}
        shared: dict[str, Any] = {"allow_truncated_sampling": self._allow_truncated, "drift": self.drift}
        shared["sampling_mask_limit"] = self._mask_limit
        if server.config.server_type == "openai":
            shared["allow_estimated_tokens"] = self.allow_estimated_tokens
            return TextSession(server, self._codec(tokenizer), **shared, **options)
        return ManagedSession(server, self._codec(tokenizer), **shared, **options)

    @asynccontextmanager
    async def dedicated_server(self) -> AsyncIterator[ServerManager]:
        """Yield a copy of this manager with one server only, for calls that must all go to the same one."""
        manager = copy.copy(self)
        manager.pool = await self.pool.single()
        manager.registered = None
        yield manager

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """Answer a chat without keeping its tokens."""
        return await self._chat(self.pool.sticky(), kwargs)

    async def completion(self, **kwargs: Any) -> Completion:
        """Continue a text without keeping its tokens."""
        return await self._complete(self.pool.sticky(), kwargs)

    async def tokens_and_logprobs_completion(
        self, **kwargs: Any
    ) -> tuple[list[int], list[list[int]], list[list[float]], list[str]]:
        """Return the prompt's tokens, and per sample its tokens, their logprobs and its finish reason."""
        split: Split = kwargs.pop("split", None) or current_split()
        prompt = kwargs.get("input_ids") or self._codec().encode(kwargs.get("prompt", ""))
        sampling = {name: value for name, value in kwargs.items() if name not in {"prompt", "input_ids"}}
        samples = await self.pool.sticky().generate(prompt, Sampling.from_kwargs(sampling), split)
        return prompt, [s.tokens for s in samples], [s.logprobs for s in samples], [s.finish_reason for s in samples]

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """Return the logprobs of a given `prompt`, `messages` or `input_ids`: `top_k` at each position."""
        return await self._untracked(self.pool.sticky()).get_logprobs(**kwargs)

    async def tokenizer_name(self) -> tuple[str, str] | None:
        """Return address and tokenizer of the first server that reports one; waits for unavailable servers."""
        await self.pool.wait_for_server()
        for server in self.servers:
            named = server.config.tokenizer_name
            name = await server.tokenizer_name() if named == "none" else named
            if name is not None:
                return server.config.base_url, name
        return None

    def follow(self, policy_name: str | None, version: int | None) -> None:
        """Request the model of this name from now on; None: the model that each server's settings name."""
        self._policy = None if policy_name is None else ServedPolicy(policy_name, version)
        for server in self.servers:
            server.policy = self._policy

    def update_weight(self, weight: float) -> None:
        """Limit each server to this share of the training requests that it may have in flight."""
        self._share = weight
        for server in self.servers:
            server.channel.limits["train"].set_share(weight)

    def metrics(self) -> dict[str, float]:
        """Return the request timings of all servers, each under its own number, and how many chats had drifted."""
        found: dict[str, float] = {}
        for index, server in enumerate(self.servers):
            found |= server.metrics(f"server_{index}")
        return {**found, "server/drifted_chats": self.drift.count} if self.drift.count else found

    async def _started_proxy(self) -> SessionProxy:
        from environments.sdk.session.openai_proxy import (
            SessionProxy,  # a web server, which most environments never need
        )

        async with self._starting_proxy:
            if self._proxy is None:
                proxy = SessionProxy(self, self._sessions)
                with anyio.CancelScope(shield=True):  # a cancelled start would keep the port
                    await proxy.start()
                self._proxy = proxy
            return self._proxy

    async def aclose(self) -> None:
        if self._proxy is not None:
            await self._proxy.aclose()
        for server in self.servers:
            await server.aclose()
        if self.registered is not None:
            await self.registered.aclose()

    def _make_server(self, config: APIServerConfig) -> HttpServer:
        kind = SERVER_KINDS[config.server_type]
        server = kind(config, wait_timeout_seconds=self._wait_timeout_seconds, transport=self._transport)
        server.reasoning = self._reasoning
        server.load_tokenizer = self._load_tokenizer
        server.policy = self._policy
        if self._share is not None:
            server.channel.limits["train"].set_share(self._share)
        if isinstance(server, TrlServer):
            server.decode = lambda tokens: self._codec().decode(tokens)
        return server

    async def _chat(self, server: StickyServer, kwargs: dict[str, Any]) -> ChatCompletion:
        if server.config.server_type != "openai":
            return await self._untracked(server).chat_completion(**kwargs)
        split: Split = kwargs.pop("split", None) or current_split()
        messages = list(kwargs.pop("messages"))
        return read_openai_chat(await server.chat(messages, kwargs, split))

    async def _complete(self, server: StickyServer, kwargs: dict[str, Any]) -> Completion:
        if server.config.server_type != "openai":
            return await self._untracked(server).completion(**kwargs)
        split: Split = kwargs.pop("split", None) or current_split()
        return read_openai_completion(await server.complete(kwargs.pop("prompt"), kwargs, split))

    def _codec(self, tokenizer: Any = None) -> Codec:
        tokenizer = tokenizer or self._load_tokenizer()
        codec = self._codecs.get(id(tokenizer))
        if codec is None or codec.tokenizer is not tokenizer:
            codec = self._codecs[id(tokenizer)] = Codec(tokenizer)
        return codec

    def _untracked(self, server: StickyServer) -> ManagedSession:
        # Its samples are never trained on, so any sampling is allowed.
        return ManagedSession(server, self._codec(), trainable=False, tool_parser=self.tool_parser, drift=self.drift)
