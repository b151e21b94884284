"""A session with the calls of OpenAI's asynchronous client, for code that was written for that client."""

from __future__ import annotations

from typing import Any, NoReturn

from environments.sdk.session.session import ManagedSession


class ManagedServerAdapter:
    """`chat.completions.create` and `completions.create`; where OpenAI's library is there, with its own objects."""

    def __init__(self, managed_server: ManagedSession, base_url: str | None = None) -> None:
        self.base_url = base_url or "http://managed-session/v1"
        self.chat = _Chat(_ChatCompletions(managed_server))
        self.completions = _Completions(managed_server)

    async def post(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("a managed session takes chat.completions.create and completions.create alone")

    def copy(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("a managed session cannot be copied; open another one with managed_server()")

    with_options = copy

    async def close(self) -> None:
        """There is nothing to close: the session ends with its `async with`."""


class _Chat:
    def __init__(self, completions: _ChatCompletions) -> None:
        self.completions = completions


class _ChatCompletions:
    def __init__(self, session: ManagedSession) -> None:
        self._session = session

    async def create(self, *, messages: Any, **kwargs: Any) -> Any:
        return _as_openai(await self._session.chat_completion(messages=messages, **_given(kwargs)), chat=True)


class _Completions:
    def __init__(self, session: ManagedSession) -> None:
        self._session = session

    async def create(self, *, prompt: Any, **kwargs: Any) -> Any:
        return _as_openai(await self._session.completion(prompt=prompt, **_given(kwargs)), chat=False)


def _given(kwargs: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's library marks what was left out with an object of its own."""
    return {name: value for name, value in kwargs.items() if type(value).__name__ not in {"NotGiven", "Omit"}}


def _as_openai(answer: Any, *, chat: bool) -> Any:
    """OpenAI's own object, which some code checks for by type, or ours without that library."""
    try:
        from openai.types import Completion
        from openai.types.chat import ChatCompletion
    except ImportError:
        return answer
    model = ChatCompletion if chat else Completion
    return model.model_validate(_openai_document(answer))


def _openai_document(answer: Any) -> dict[str, Any]:
    document: dict[str, Any] = answer.model_dump()
    for choice in document["choices"]:
        if choice["finish_reason"] not in {"stop", "length", "tool_calls", "content_filter", "function_call"}:
            choice["finish_reason"] = "stop"  # an aborted or unknown end, which OpenAI's objects have no word for
    return document
