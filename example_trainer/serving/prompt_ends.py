"""The text of an output whose prompt ends inside a character, as one cut off at a length does.

vLLM starts the decoding of an output's tokens from the prompt's. Where those end inside a character all of the
prompt's text is still to come, so it came with the first token, and stop strings were found in it. Here the decoding
starts from the prompt's complete characters.
"""

from __future__ import annotations

from typing import Any

_INSTALLED = "atropos_installed"
_INCOMPLETE = "�"
_LOOK_BACK = 8
"""Tokens decoded to see how the prompt ends."""
_LONGEST_CHARACTER = 4
"""Bytes, each of which may be a token of its own."""


def install() -> None:
    """Wrap vLLM's decoding of outputs, once a process."""
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

    if hasattr(FastIncrementalDetokenizer, _INSTALLED):
        return
    setattr(FastIncrementalDetokenizer, _INSTALLED, True)
    FastIncrementalDetokenizer.__init__ = _from_complete_characters(FastIncrementalDetokenizer.__init__)


def _from_complete_characters(make: Any) -> Any:
    def making(detokenizer: Any, tokenizer: Any, request: Any) -> None:
        from tokenizers.decoders import DecodeStream

        make(detokenizer, tokenizer, request)
        prompt = request.prompt_token_ids or []
        complete = complete_characters(detokenizer.tokenizer, prompt)
        if len(complete) < len(prompt):
            detokenizer.stream = DecodeStream(ids=complete, skip_special_tokens=detokenizer.skip_special_tokens)

    return making


def complete_characters(tokenizer: Any, tokens: list[int]) -> list[int]:
    """The tokens without those of a character begun at their end; none if they end in bytes that are no text at all."""
    for end in range(len(tokens), max(0, len(tokens) - _LONGEST_CHARACTER), -1):
        if not tokenizer.decode(tokens[max(0, end - _LOOK_BACK) : end]).endswith(_INCOMPLETE):
            return tokens[:end]
    return []
