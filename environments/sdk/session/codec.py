"""A tokenizer as sessions use it: text to tokens and back, chats to text, and which tokens are special."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from environments.sdk.errors import RequestRefused
from environments.sdk.tokenizer import FastTokenizer
from environments.sdk.tools import with_parsed_arguments


class Codec:
    """Made once for a tokenizer, since asking one for its special tokens may take longer than a rollout.

    Of a tokenizer that is neither ours nor transformers' it needs `encode`, `decode`, `apply_chat_template` and
    `eos_token_id`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        special = set(getattr(tokenizer, "all_special_ids", ()))
        self._decoding: dict[str, Any] = {}
        if not isinstance(tokenizer, FastTokenizer):
            added = getattr(tokenizer, "added_tokens_decoder", {})
            special |= {index for index, token in added.items() if getattr(token, "special", False)}
            if hasattr(tokenizer, "clean_up_tokenization_spaces"):
                self._decoding = {"clean_up_tokenization_spaces": False}
        if tokenizer.eos_token_id is not None:
            special.add(tokenizer.eos_token_id)
        self.special_ids = frozenset(special)
        self._bos = getattr(tokenizer, "bos_token_id", None)

    def encode(self, text: str) -> list[int]:
        """A whole text; the tokenizer adds its own special tokens, but never a second beginning."""
        tokens: list[int] = self.tokenizer.encode(text)
        return tokens[1:] if self._bos is not None and tokens[:2] == [self._bos, self._bos] else tokens

    def encode_part(self, text: str) -> list[int]:
        """A piece of a text, or what a template rendered: special tokens are those that are written there."""
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False, **self._decoding))

    def visible(self, tokens: Sequence[int]) -> str:
        """The text as a client sees it, without special tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True, **self._decoding))

    def text_of(self, token: int) -> str:
        if token == self.tokenizer.eos_token_id and hasattr(self.tokenizer, "eos_token"):
            return str(self.tokenizer.eos_token)
        return self.decode([token])

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Any = None,
        options: Mapping[str, Any],
        add_generation_prompt: bool,
    ) -> str:
        """The chat as its template writes it; a message that the template fails at is named."""
        more = {"tools": tools, "add_generation_prompt": add_generation_prompt, **options}
        try:
            return self._render(messages, more)
        except Exception as error:
            index = self._first_failing(messages, more)
            raise RequestRefused(
                f"the chat template fails at messages[{index}] ({messages[index].get('role')}): "
                f"{type(error).__name__}: {error}",
                param=f"messages[{index}]",
            ) from error

    def _render(self, messages: Sequence[dict[str, Any]], more: Mapping[str, Any]) -> str:
        given = {name: value for name, value in more.items() if name != "tools" or value}
        return str(self.tokenizer.apply_chat_template(with_parsed_arguments(messages), tokenize=False, **given))

    def _first_failing(self, messages: Sequence[dict[str, Any]], more: Mapping[str, Any]) -> int:
        """The last message of the shortest part of the chat that cannot be rendered."""
        for count in range(1, len(messages)):
            try:
                self._render(messages[:count], more)
            except Exception:  # noqa: BLE001 - templates fail in as many ways as Python does
                return count - 1
        return len(messages) - 1
