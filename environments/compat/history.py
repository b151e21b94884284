"""`atroposlib.utils.message_history_utils` and `best_of_n_selection`: histories kept short, the best of several."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from environments.compat.tokenizing import tokenize_for_trainer

__all__ = ["ensure_trajectory_token_limit", "select_best_index", "strip_thinking", "truncate_thinking"]

logger = logging.getLogger(__name__)

OPEN, CLOSE = "<think>", "</think>"
MODEL_ROLES = ("assistant", "agent")


def strip_thinking(response_text: str) -> str:
    """The text without its first block of thoughts."""
    found = _split(response_text)
    return response_text if found is None else found[0].removesuffix(OPEN) + found[2].removeprefix(CLOSE)


def truncate_thinking(response_text: str, tokenizer: Any, max_think_tokens: int) -> str:
    """The text with at most so many tokens of thoughts: the last paragraph if it fits, else the last tokens."""
    found = _split(response_text)
    if found is None:
        return response_text
    before, thoughts, after = found[0].rstrip(), found[1].strip(), found[2].lstrip()
    kept = _last_thoughts(thoughts, tokenizer, max_think_tokens)
    if kept != thoughts and kept:
        kept = f"... {kept}"
    return f"{before}\n{kept}\n{after}" if kept else f"{before}{after}"


def ensure_trajectory_token_limit(
    trajectory: Sequence[Mapping[str, Any]], tokenizer: Any, max_trajectory_tokens: int
) -> list[Any]:
    """The steps whose sequences fit, after older turns were left out where that helps.

    The first message, the last observation and the last answer stay; all alternatives of a step lose as many turns.
    """
    kept = [_fit(step, tokenizer, max_trajectory_tokens) for step in trajectory]
    fitting = [step for step in kept if step is not None]
    if len(fitting) < len(kept):
        logger.warning("%d of %d steps are too long even when shortened", len(kept) - len(fitting), len(kept))
    return fitting


def select_best_index(
    primary_scores: Sequence[float],
    secondary_scores: Sequence[float],
    primary_higher_is_better: bool = True,
    secondary_lower_is_better: bool = True,
) -> int:
    """The index of the best by the first scores, equal ones told apart by the second, then by their order."""
    if not primary_scores or len(primary_scores) != len(secondary_scores):
        raise ValueError(f"as many scores of both kinds are needed, got {len(primary_scores)}, {len(secondary_scores)}")
    first, second = (1 if primary_higher_is_better else -1), (-1 if secondary_lower_is_better else 1)
    return max(range(len(primary_scores)), key=lambda i: (first * primary_scores[i], second * secondary_scores[i], -i))


def _split(text: str) -> tuple[str, str, str] | None:
    """Up to and with the opening tag, the thoughts, and from the closing tag on."""
    start, end = text.find(OPEN), text.find(CLOSE)
    if start < 0 or end < start:
        return None
    return text[: start + len(OPEN)], text[start + len(OPEN) : end], text[end:]


def _last_thoughts(thoughts: str, tokenizer: Any, most: int) -> str:
    tokens = tokenizer.encode(thoughts, add_special_tokens=False)
    if len(tokens) <= most:
        return thoughts
    last = thoughts.rsplit("\n\n", 1)[-1].strip()
    if last != thoughts and len(tokenizer.encode(last, add_special_tokens=False)) <= most:
        return last
    return str(tokenizer.decode(tokens[len(tokens) - most :], skip_special_tokens=True)).strip()


def _fit(step: Mapping[str, Any], tokenizer: Any, most: int) -> Mapping[str, Any] | None:
    if not step.get("messages") or not step.get("tokens"):
        return None
    if max(map(len, step["tokens"])) <= most:
        return step
    chats = [list(chat) for chat in step["messages"]]
    while True:
        count = min(map(_droppable, chats))
        if count < 1:
            return None
        for chat in chats:
            del chat[1 : 1 + count]
        encoded = [tokenize_for_trainer(tokenizer, chat) for chat in chats]
        if max(len(one["tokens"]) for one in encoded) <= most:
            break
    shortened = {"messages": chats, "tokens": [e["tokens"] for e in encoded], "masks": [e["masks"] for e in encoded]}
    # Logprobs belong to the tokens as they were.
    return {key: value for key, value in step.items() if key != "inference_logprobs"} | shortened


def _droppable(chat: Sequence[Mapping[str, Any]]) -> int:
    """How many messages after the first may go next: a pair of question and answer, or one."""
    at_end = 0
    if chat[-1]["role"] in MODEL_ROLES:
        at_end = 2 if len(chat) > 2 and chat[-2]["role"] not in MODEL_ROLES else 1
    free = len(chat) - 1 - at_end
    return min(2, free) if free > 1 and chat[2]["role"] in MODEL_ROLES else min(1, free)
