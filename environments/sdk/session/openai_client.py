"""OpenAI client adapter: it gives a session the calls of OpenAI's asynchronous client, for code written for it.

Fields are accepted and refused as they are over HTTP; only streaming needs the session's address.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

from environments.sdk.errors import RequestRefused
from environments.sdk.session.openai_requests import Route, read_request
from environments.sdk.session.openai_types import openai_document
from environments.sdk.session.session import ManagedSession

ABOUT_THE_CALL = frozenset({"extra_body", "extra_headers", "extra_query", "timeout", "split"})


class ManagedServerAdapter:
    """Adapter with `chat.completions.create` and `completions.create`: it returns OpenAI's own objects if that library
    is installed.
    """

    def __init__(self, managed_server: ManagedSession, base_url: str | None = None) -> None:
        self.base_url = base_url or "http://managed-session/v1"
        self.chat = SimpleNamespace(completions=_ChatCompletions(managed_server))
        self.completions = _Completions(managed_server)

    async def post(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("a managed session supports only chat.completions.create and completions.create")

    def copy(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("a managed session cannot be copied; open another one with managed_server()")

    with_options = copy

    async def close(self) -> None:
        """Do nothing: the session ends with its `async with`."""


class _ChatCompletions:
    def __init__(self, session: ManagedSession) -> None:
        self._session = session

    async def create(self, *, messages: Any, **kwargs: Any) -> Any:
        arguments = _read("chat", self._session, {"messages": list(messages), **kwargs})
        return _as_openai(await self._session.chat_completion(**arguments), chat=True)


class _Completions:
    def __init__(self, session: ManagedSession) -> None:
        self._session = session

    async def create(self, *, prompt: Any, **kwargs: Any) -> Any:
        arguments = _read("text", self._session, {"prompt": prompt, **kwargs})
        return _as_openai(await self._session.completion(**arguments), chat=False)


def _read(route: Route, session: ManagedSession, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the session's arguments. OpenAI's library marks omitted arguments with an object of its own."""
    given = {name: value for name, value in kwargs.items() if type(value).__name__ not in {"NotGiven", "Omit"}}
    body = {name: value for name, value in given.items() if name not in ABOUT_THE_CALL}
    asked = read_request(route, body | (given.get("extra_body") or {}))
    if asked.stream:
        raise RequestRefused("stream: a session streams at its address; open it with use_proxy=True", param="stream")
    return session.arguments(asked) | {name: given[name] for name in ("split",) if name in given}


def _as_openai(answer: Any, *, chat: bool) -> Any:
    """Return OpenAI's own object, which some code checks for by type, or ours without that library."""
    try:
        from openai.types import Completion
        from openai.types.chat import ChatCompletion
    except ImportError:
        return answer
    model = ChatCompletion if chat else Completion
    return model.model_validate(openai_document(answer))
