"""The module has the functions of `atroposlib.utils` and `atroposlib.frontend`, for environments written for Atropos.

- `message_history_utils` and `best_of_n_selection`: short histories, the best of several.
- `advantages`: statistics of nested scores, discounted returns, and advantages per step.
- `io`: the JSON of an aiohttp response, or its error with the server's text.
- `metrics`: four statistics of a list under one name.
- `jsonl2html`: a page that shows a file of groups, with all text of a model escaped.
- `tokenize_for_trainer`: a chat as tokens and masks, for environments that sampled only text. Text encoded again
  need not give the sampled tokens; sessions keep those and are preferable.
- `tool_call_parser`: one tool call from a text with tags. Where a model wrote Python's quotes instead of JSON's, the
  call is read as a Python literal, so that apostrophes are kept; if it is none, as with `true`, with JSON's quotes.
"""

from __future__ import annotations

import ast
import json
import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atropos_api.wire.groups import OPTIONAL_PER_SEQUENCE
from environments.sdk.group_files import render_group, write_page
from environments.sdk.tools import NO_JSON

__all__ = [
    "UNMASKED_ROLES",
    "allclose_to_first",
    "compute_discounted_returns",
    "compute_grpo_process_supervision_advantages",
    "compute_stats",
    "create_html_for_group",
    "ensure_trajectory_token_limit",
    "extract_tool_call",
    "generate_html",
    "get_std_min_max_avg",
    "parse_http_response",
    "parse_tool_call",
    "select_best_index",
    "strip_thinking",
    "tokenize_for_trainer",
    "truncate_thinking",
]

logger = logging.getLogger(__name__)

OPEN, CLOSE = "<think>", "</think>"

MODEL_ROLES = ("assistant", "agent")
OF_EACH_TOKEN = frozenset(OPTIONAL_PER_SEQUENCE) - {"messages", "overrides", "images"}
"""Fields of a step that have one entry for each of its tokens."""


def strip_thinking(response_text: str) -> str:
    """Return the text without its first block of thoughts."""
    found = _split(response_text)
    return response_text if found is None else found[0].removesuffix(OPEN) + found[2].removeprefix(CLOSE)


def truncate_thinking(response_text: str, tokenizer: Any, max_think_tokens: int) -> str:
    """Shorten the thoughts to a number of tokens: to the last paragraph if it fits, else to the last tokens."""
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
    """Return the steps whose sequences fit; longer ones lose older turns until they fit, or are left out.

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
    """Return the index of the best by the primary scores; ties are broken by the secondary scores, then by order."""
    if not primary_scores or len(primary_scores) != len(secondary_scores):
        raise ValueError(f"as many scores of both kinds are needed, got {len(primary_scores)}, {len(secondary_scores)}")
    first, second = (1 if primary_higher_is_better else -1), (-1 if secondary_lower_is_better else 1)
    return max(range(len(primary_scores)), key=lambda i: (first * primary_scores[i], second * secondary_scores[i], -i))


def _split(text: str) -> tuple[str, str, str] | None:
    """Split a text: up to and including the opening tag, the thoughts, and from the closing tag on."""
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
    return {key: value for key, value in step.items() if key not in OF_EACH_TOKEN} | shortened


def _droppable(chat: Sequence[Mapping[str, Any]]) -> int:
    """Return how many messages after the first may be dropped next: a pair of question and answer, or one."""
    at_end = 0
    if chat[-1]["role"] in MODEL_ROLES:
        at_end = 2 if len(chat) > 2 and chat[-2]["role"] not in MODEL_ROLES else 1
    free = len(chat) - 1 - at_end
    return min(2, free) if free > 1 and chat[2]["role"] in MODEL_ROLES else min(1, free)


Array = NDArray[Any]


def allclose_to_first(
    values: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False, return_vector: bool = False
) -> Any:
    """Return True if every row is close to the first one; with `return_vector`, one such value for each row."""
    rows = np.asarray(values)
    close = np.isclose(rows, rows[0], rtol=rtol, atol=atol, equal_nan=equal_nan)
    each = close.reshape(len(rows), -1).all(axis=1)
    return each if return_vector else bool(each.all())


def compute_stats(data: Sequence[Any]) -> dict[str, float]:
    """Return mean and variance of all numbers in nested lists."""
    numbers = _flat(data)
    if not numbers:
        raise ValueError("no numbers to take statistics of")
    mean = math.fsum(numbers) / len(numbers)
    return {"mean": mean, "var": math.fsum((n - mean) ** 2 for n in numbers) / len(numbers)}


def compute_discounted_returns(rewards: Sequence[float] | Array, gamma: float) -> Array:
    """Return each step's reward plus all later ones, discounted by `gamma` for each step of distance."""
    given = np.asarray(rewards, dtype=None if isinstance(rewards, np.ndarray) else np.float32)
    returns = np.empty(given.shape, dtype=np.result_type(given.dtype, np.float32))
    total = 0.0
    for step in range(len(given) - 1, -1, -1):
        total = float(given[step]) + gamma * total
        returns[step] = total
    return returns


def compute_grpo_process_supervision_advantages(
    rewards: Sequence[Sequence[float]], gamma: float | None = None, std_tol: float = 1e-8
) -> list[Array]:
    """Normalise each step's reward over all steps, then sum from the step to the trajectory's end, or discount.

    Shao et al., 2024, "DeepSeekMath", section 4.1.3.
    """
    stats = compute_stats(rewards)
    deviation = math.sqrt(stats["var"])
    if deviation < std_tol:
        raise ValueError(f"the rewards have a standard deviation of {deviation:g}, below {std_tol:g}: none is better")
    normalised = [(np.asarray(steps, dtype=float) - stats["mean"]) / deviation for steps in rewards]
    return [compute_discounted_returns(steps, 1.0 if gamma is None else gamma) for steps in normalised]


def _flat(data: Any) -> list[float]:
    return [n for part in data for n in _flat(part)] if isinstance(data, Sequence | np.ndarray) else [float(data)]


async def parse_http_response(resp: Any, logger: logging.Logger | None = None) -> Any:
    """Return the decoded body; an error status is logged with the server's text and raised."""
    try:
        resp.raise_for_status()
    except Exception:
        destination = logger or logging.getLogger(__name__)
        destination.error("HTTP %s from %s: %s", resp.status, resp.url, await resp.text())
        raise
    return await resp.json()


def get_std_min_max_avg(name: str, data: Sequence[float], metrics_dict: dict[str, Any]) -> dict[str, Any]:
    """Add mean, standard deviation, maximum and minimum of `data` to the metrics."""
    metrics_dict |= {
        f"{name}_mean": statistics.fmean(data),
        f"{name}_std": statistics.pstdev(data),
        f"{name}_max": max(data),
        f"{name}_min": min(data),
    }
    return metrics_dict


def create_html_for_group(group_data: Mapping[str, Any], index: int) -> str:
    """Return one group as HTML, with as many messages as there are scores; "" if either is missing."""
    messages, scores = group_data.get("messages") or [], group_data.get("scores") or []
    count = min(len(messages), len(scores))
    if count < max(len(messages), len(scores)):
        logger.warning(
            "group %d has %d messages and %d scores; the others are left out", index, len(messages), len(scores)
        )
    return render_group(index, {"messages": messages[:count], "scores": scores[:count]}) if count else ""


def generate_html(input_path: str, output_path: str | None = None) -> None:
    """Write the page next to the file, or to `output_path`."""
    write_page(Path(input_path), None if output_path is None else Path(output_path))


UNMASKED_ROLES = ["assistant", "agent"]
NOT_TRAINED = -100


def tokenize_for_trainer(
    tokenizer: Any,
    chat: Sequence[Mapping[str, Any]],
    include_messages: bool = False,
    train_on_all_assistant_turns: bool = False,
    finish_reason: str = "",
) -> dict[str, Any]:
    """Return the chat's tokens and masks; masks have -100 where nothing is trained.

    The last message is trained, or all messages of the model. A chat that was cut off loses the end token that the
    template adds.
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


ERROR = "-ERROR-"


def extract_tool_call(text: str, preferred_tags: Sequence[str] | None = None) -> str | None:
    """Return the text between the first of the tags that is found, `tool_call` by default."""
    for tag in preferred_tags or ["tool_call"]:
        body, closing, _ = text.partition(f"<{tag}>")[2].partition(f"</{tag}>")
        if closing:
            return body.strip()
    return None


def parse_tool_call(
    response: str,
    available_tools: Sequence[Mapping[str, Any]] | None = None,
    preferred_tags: Sequence[str] | None = None,
) -> tuple[str, dict[str, Any], bool]:
    """Return the tool's name, its arguments, and True if the text has no usable call."""
    body = extract_tool_call(response, preferred_tags)
    call = _read(body) if body else None
    if call is None:
        return ERROR, {}, True
    name, arguments = str(call.get("name", "")), call.get("arguments", {})
    if available_tools and name not in {_tool_name(tool) for tool in available_tools}:
        return ERROR, arguments, True
    return name, arguments, False


def _read(body: str) -> dict[str, Any] | None:
    found = _read_json(body)
    if found is None:
        found = _read_python(body)
    if found is None:
        found = _read_json(body.replace("'", '"'))
    return found if isinstance(found, dict) else None


def _read_json(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except NO_JSON:
        return None


def _read_python(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # TypeError: `{{"name": …}}` is a set
        return None


def _tool_name(tool: Mapping[str, Any]) -> str:
    return str(tool.get("name") or (tool.get("function") or {}).get("name", ""))
