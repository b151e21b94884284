"""`atroposlib.utils.tokenize_for_trainer`: a chat as tokens and masks, for environments that sampled text alone.

Text encoded again need not give the tokens that were sampled; sessions keep the very ones and are the better way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["UNMASKED_ROLES", "tokenize_for_trainer"]

UNMASKED_ROLES = ["assistant", "agent"]
NOT_TRAINED = -100


def tokenize_for_trainer(
    tokenizer: Any,
    chat: Sequence[Mapping[str, Any]],
    include_messages: bool = False,
    train_on_all_assistant_turns: bool = False,
    finish_reason: str = "",
) -> dict[str, Any]:
    """Tokens of the whole chat, and the same with -100 where nothing is trained: all but the last turn, or each
    turn that is not the model's. A chat that was cut off loses the end token that the template adds.
    """
    tokens = _encode(tokenizer, chat, generation=False)
    if train_on_all_assistant_turns:
        turns = [index for index, turn in enumerate(chat) if turn["role"] in UNMASKED_ROLES]
    else:
        turns = [len(chat) - 1]
    masks = [NOT_TRAINED] * len(tokens)
    for index in turns:
        start = len(_encode(tokenizer, chat[:index], generation=True)) if index else 0
        end = len(tokens) if index == len(chat) - 1 else len(_encode(tokenizer, chat[: index + 1], generation=False))
        masks[start:end] = tokens[start:end]
    if finish_reason == "length" and tokens and tokens[-1] == tokenizer.eos_token_id:
        tokens, masks = tokens[:-1], masks[:-1]
    result: dict[str, Any] = {"tokens": tokens, "masks": masks}
    return {**result, "messages": chat} if include_messages else result


def _encode(tokenizer: Any, chat: Sequence[Mapping[str, Any]], *, generation: bool) -> list[int]:
    return list(
        tokenizer.apply_chat_template(list(chat), tokenize=True, add_generation_prompt=generation, return_dict=False)
    )
