"""`ServerManager`, which environments know as `self.server`: all inference servers behind one object."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from environments.sdk.config import APIServerConfig
from environments.sdk.inference.generation import InferenceServer, Split
from environments.sdk.inference.openai import OpenAIServer
from environments.sdk.inference.sampling import Sampling
from environments.sdk.inference.transport import Transport
from environments.sdk.inference.vllm import VllmServer
from environments.sdk.session.answers import ChatCompletion, Completion, read_openai_chat
from environments.sdk.session.journal import current_split
from environments.sdk.session.session import ManagedSession

SERVER_KINDS: Mapping[str, type[VllmServer | OpenAIServer]] = {"vllm": VllmServer, "openai": OpenAIServer}


class ServerManager:
    """Sends each request to the server with the fewest under way; a session stays with the one it began on."""

    def __init__(
        self,
        configs: Sequence[APIServerConfig],
        *,
        load_tokenizer: Callable[[], Any],
        wait_timeout_seconds: float = 600.0,
        allow_truncated_sampling: bool = False,
        transport: Transport | None = None,
    ) -> None:
        self.servers: list[InferenceServer] = [
            SERVER_KINDS[config.server_type](config, wait_timeout_seconds=wait_timeout_seconds, transport=transport)
            for config in configs
        ]
        self._load_tokenizer = load_tokenizer
        self._allow_truncated = allow_truncated_sampling

    @asynccontextmanager
    async def managed_server(self, tokenizer: Any = None, **options: Any) -> AsyncIterator[ManagedSession]:
        """A session that keeps exact tokens, masks, logprobs and versions."""
        yield ManagedSession(
            self.least_loaded(),
            tokenizer or self._load_tokenizer(),
            allow_truncated_sampling=self._allow_truncated,
            **options,
        )

    @asynccontextmanager
    async def dedicated_server(self) -> AsyncIterator[ServerManager]:
        """The same manager narrowed to one server, for calls that must all go to the same one."""
        narrowed = ServerManager(
            [], load_tokenizer=self._load_tokenizer, allow_truncated_sampling=self._allow_truncated
        )
        narrowed.servers = [self.least_loaded()]
        yield narrowed

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """Answer a chat without keeping its tokens."""
        server = self.least_loaded()
        if server.config.server_type == "openai":
            split: Split = kwargs.pop("split", None) or current_split()
            messages = list(kwargs.pop("messages"))
            return read_openai_chat(await server.chat(messages, kwargs, split))
        return await self._untracked(server).chat_completion(**kwargs)

    async def completion(self, **kwargs: Any) -> Completion:
        """Go on with a text without keeping its tokens."""
        return await self._untracked(self.least_loaded()).completion(**kwargs)

    async def tokens_and_logprobs_completion(
        self, **kwargs: Any
    ) -> tuple[list[int], list[list[int]], list[list[float]], list[str]]:
        """Prompt tokens, and for each sample its tokens, their logprobs and why it ended."""
        split: Split = kwargs.pop("split", None) or current_split()
        prompt = kwargs.get("input_ids") or self._load_tokenizer().encode(kwargs.get("prompt", ""))
        sampling = {name: value for name, value in kwargs.items() if name not in {"prompt", "input_ids"}}
        samples = await self.least_loaded().generate(prompt, Sampling.from_kwargs(sampling), split)
        return prompt, [s.tokens for s in samples], [s.logprobs for s in samples], [s.finish_reason for s in samples]

    def least_loaded(self) -> InferenceServer:
        return min(self.servers, key=lambda server: server.in_flight)

    async def aclose(self) -> None:
        for server in self.servers:
            await server.aclose()

    def _untracked(self, server: InferenceServer) -> ManagedSession:
        # Nothing of it is trained on, so any sampling is allowed.
        return ManagedSession(server, self._load_tokenizer(), trainable=False)
