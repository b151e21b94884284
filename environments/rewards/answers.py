"""Finding the final answer in a completion. Every search is linear in the text, whatever a model writes."""

from __future__ import annotations

import re

THINKING_END = "</think>"

_BRACES = re.compile(r"(?P<box>\\f?boxed\s*\{)|\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"\\boxed\s+([^\s{}$\\]+)|\\boxed([0-9])")
_HASHES = "####"


def after_thinking(text: str) -> str:
    """What follows the last `</think>`; the whole text when there is none."""
    return text.rpartition(THINKING_END)[2]


def last_boxed(text: str) -> str | None:
    r"""The content of the `\boxed{…}` that closes last, braces balanced; None when none closes.

    Of nested boxes the outer one closes last. `\boxed 5` without braces counts when no braced one is there.
    """
    open_braces: list[tuple[bool, int]] = []
    found: str | None = None
    for match in _BRACES.finditer(text):
        if match["box"] or match[0] == "{":
            open_braces.append((match["box"] is not None, match.end()))
        elif match[0] == "}" and open_braces:
            is_box, start = open_braces.pop()
            if is_box:
                found = text[start : match.start()]
    if found is not None:
        return found.strip()
    bare = _BARE_BOX.findall(text)
    return next(filter(None, bare[-1])) if bare else None


def after_hashes(text: str) -> str | None:
    """The line after the last `####`, as GSM8K writes its answers; None when there is none."""
    _, marker, rest = text.rpartition(_HASHES)
    if not marker:
        return None
    lines = rest.strip().splitlines()
    return lines[0].strip() if lines else ""


def inside_tag(text: str, tag: str) -> str | None:
    """The content of the last `<tag>…</tag>`; a tag that is opened last and never closed counts to the end."""
    start = text.rfind(f"<{tag}>")
    if start < 0:
        return None
    return text[start + len(tag) + 2 :].partition(f"</{tag}>")[0].strip()


def final_answer(text: str) -> str | None:
    r"""The answer a completion ends in: inside `<answer>`, then `\boxed{…}`, then after `####`; else None."""
    text = after_thinking(text)
    answer = inside_tag(text, "answer")
    if answer is not None:
        text = answer
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    marked = after_hashes(text)
    return marked if marked is not None else answer
