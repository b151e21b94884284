"""Groups as a page for a browser: one file without scripts, fonts or pictures, which loads nothing from anywhere.

What models write is shown as text: every character of it is escaped, and the page forbids itself to run scripts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

from atropos_api.common.whole_files import free_path, write_whole
from environments.export.groups import read_groups

MOST_GROUPS = 2000

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
details { border: 1px solid #ddd; border-radius: 6px; margin: .5rem 0; padding: .3rem .8rem }
summary { cursor: pointer }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f6f6; padding: .6rem; margin: .2rem 0 .8rem }
.score { font-variant-numeric: tabular-nums; font-weight: 600; padding: 0 .4rem; border-radius: 4px }
.positive { background: #d8f0dc } .negative { background: #f8dada } .zero { background: #e8e8e8 }
.role { color: #666; font-size: .85rem }
.sampled { border-left: 3px solid #4a7ebb }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def write_page(source: Path, page: Path | None = None) -> Path:
    """The page of a file of groups: where it is said, else beside the file, of its name or a free one like it."""
    place = page or free_path(source.with_suffix(".html"))
    write_whole(place, render(islice(read_groups(source), MOST_GROUPS), title=source.name))
    return place


def render(groups: Iterable[Mapping[str, Any]], *, title: str, refresh_seconds: int | None = None) -> str:
    """The whole page; with `refresh_seconds` the browser asks for it again and again."""
    again = f'<meta http-equiv="refresh" content="{refresh_seconds}">' if refresh_seconds else ""
    body = "".join(render_group(number, group) for number, group in enumerate(groups, 1))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{again}'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><h1>{escape(title)}</h1>{body or '<p>No groups yet.</p>'}</body></html>\n"
    )


def render_group(number: int, group: Mapping[str, Any]) -> str:
    scores = list(group["scores"])
    mean = sum(scores) / max(len(scores), 1)
    chats = group.get("messages") or [None] * len(scores)
    shared = _shared_beginning([chat for chat in chats if isinstance(chat, list)])
    rest = [chat[len(shared) :] if isinstance(chat, list) else chat for chat in chats]
    rollouts = "".join(_rollout(i, score, chat) for i, (score, chat) in enumerate(zip(scores, rest, strict=False), 1))
    badges = " ".join(_badge(score) for score in scores)
    prompt = "".join(_turn(turn) for turn in shared)
    return f"<details><summary>Group {number}, mean {mean:.3g}: {badges}</summary>{prompt}{rollouts}</details>"


def _shared_beginning(chats: Sequence[list[Any]]) -> list[Any]:
    """The turns that all rollouts begin with, before the model's first: the prompt, which is shown once."""
    shared: list[Any] = []
    for turns in zip(*(chat[:-1] for chat in chats), strict=False):
        first = turns[0]
        if any(turn != first for turn in turns) or _is_sampled(first):
            break
        shared.append(first)
    return shared


def _is_sampled(turn: Any) -> bool:
    return isinstance(turn, Mapping) and turn.get("role") == "assistant"


def _rollout(number: int, score: float, chat: Any) -> str:
    return f"<details><summary>Rollout {number} {_badge(score)}</summary>{_chat(chat)}</details>"


def _chat(chat: Any) -> str:
    if chat is None:
        return '<p class="role">no messages were saved; set --env.include_messages true</p>'
    turns: Sequence[Any] = chat if isinstance(chat, list) else [chat]
    return "".join(_turn(turn) for turn in turns)


def _turn(turn: Any) -> str:
    if not isinstance(turn, Mapping):
        return f"<pre>{escape(_text(turn))}</pre>"
    role, kind = escape(str(turn.get("role", "")).capitalize()), ' class="sampled"' if _is_sampled(turn) else ""
    return f'<div class="role">{role}</div><pre{kind}>{escape(_content(turn))}</pre>'


def _content(turn: Mapping[str, Any]) -> str:
    calls = turn.get("tool_calls")
    text = _text(turn.get("content"))
    return f"{text}\n{json.dumps(calls, indent=1)}" if calls else text


def _text(content: Any) -> str:
    """Text as it is; of OpenAI's content parts the text, and what else they are by name alone."""
    if isinstance(content, str) or content is None:
        return content or ""
    if isinstance(content, list):
        return "\n".join(_text(part) for part in content)
    if isinstance(content, Mapping):
        return str(content["text"]) if "text" in content else f"[{content.get('type', 'object')}]"
    return str(content)


def _badge(score: float) -> str:
    kind = "positive" if score > 0 else "negative" if score < 0 else "zero"
    return f'<span class="score {kind}">{score:.3g}</span>'
