"""A tokenizer as sessions use it: text to tokens and back, chats to text, and which tokens are special."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from environments.sdk.tokenizer import FastTokenizer
from environments.sdk.tools import with_parsed_arguments


class Codec:
    """Made once for a tokenizer, since asking one for its special tokens may take longer than a rollout."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        special = set(tokenizer.all_special_ids)
        self._decoding: dict[str, Any] = {}
        if not isinstance(tokenizer, FastTokenizer):
            added = getattr(tokenizer, "added_tokens_decoder", {})
            special |= {index for index, token in added.items() if getattr(token, "special", False)}
            self._decoding = {"clean_up_tokenization_spaces": False}
        if tokenizer.eos_token_id is not None:
            special.add(tokenizer.eos_token_id)
        self.special_ids = frozenset(special)
        self._bos = tokenizer.bos_token_id

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
        if token == self.tokenizer.eos_token_id:
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
        """The chat as its template writes it."""
        text = self.tokenizer.apply_chat_template(
            with_parsed_arguments(messages),
            tools=tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **options,
        )
        return str(text)
