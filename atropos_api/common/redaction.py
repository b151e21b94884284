"""Secrets are kept out of everything that is written down: records, logs, error lines and command lines.

Options that are declared are judged by their declaration (`secret_fields`). Keys that no model here declares, because
they are passed on to vLLM or to somebody's environment, are judged here by their names, and texts by what they carry.
Settings lose the key, texts show `***` in place of the value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

MASK: Final = "***"
PLACEHOLDERS: Final = frozenset({"", "none", "null", "empty", "dummy", "x", "true", "false"})
"""Values that stand where a key is wanted and nobody checks it."""

_SECRET_NAME: Final = re.compile(
    r"(^|[_.-])((api|access|secret|private|auth)[_-]?keys?|token|secrets?|passwords?|passwd|passphrase|credentials?"
    r"|authorization)$",
    re.IGNORECASE,
)
_IN_TEXT: Final = (
    # The password of an address, or all that stands before its @.
    (re.compile(r"(?<=://)([^/\s:@'\"]*):[^/\s@'\"]*(?=@)"), rf"\1:{MASK}"),
    (re.compile(r"(?<=://)[^/\s:@'\"]+(?=@)"), MASK),
    # A token as the first part of a broker's path, for clients that can be told a base URL alone.
    (re.compile(r"(://[^/\s'\"]+/t/)[^/\s'\"?#]+"), rf"\1{MASK}"),
    (re.compile(r"([?&](?:access_token|api_key|token)=)[^&\s'\"]+", re.IGNORECASE), rf"\1{MASK}"),
    (re.compile(r"(\bBearer )[^\s'\"<,]{8,}", re.IGNORECASE), rf"\1{MASK}"),
)


def names_secret(key: str) -> bool:
    """Whether an undeclared key is a secret's by its name: `api_key`, `hf_token`, but not `max_tokens`."""
    return _SECRET_NAME.search(key) is not None


def redact(value: Any) -> Any:
    """Plain data without the keys that name secrets, and with the secrets inside its texts masked."""
    if isinstance(value, Mapping):
        return {key: redact(inner) for key, inner in value.items() if not _is_secret(str(key), inner)}
    if isinstance(value, list | tuple):
        return [redact(inner) for inner in value]
    return redact_text(value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    """`text` with every secret masked that its form gives away: in addresses and in authorization headers."""
    for pattern, masked in _IN_TEXT:
        text = pattern.sub(masked, text)
    return text


def redact_arguments(arguments: Iterable[str], *, secret_flags: Iterable[str] = ()) -> list[str]:
    """A command line whose secret values are masked: those of `secret_flags`, and of flags that name a secret."""
    declared = frozenset(secret_flags)
    shown: list[str] = []
    hidden = False
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if not argument.startswith("--"):
            shown.append(MASK if hidden and not _is_placeholder(argument) else _redact_argument(argument))
            continue
        hidden = flag in declared or names_secret(flag.lstrip("-"))
        if not equals:
            shown.append(argument)
        else:
            shown.append(f"{flag}={MASK if hidden and not _is_placeholder(value) else _redact_argument(value)}")
            hidden = False
    return shown


def program_words(command: Sequence[str]) -> str:
    """The program of another process's command line, without arguments: those of a stranger may hold anything."""
    words = list(command[:1])
    if words and Path(words[0]).name.startswith("python"):
        rest = command[1:]
        words += rest[:2] if rest[:1] == ["-m"] else [word for word in rest[:1] if not word.startswith("-")]
    return " ".join(words)


def _is_secret(key: str, value: Any) -> bool:
    """Whether `key` names a secret and there is one: a text, or several."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return any(_is_secret(key, inner) for inner in value)
    return isinstance(value, str) and names_secret(key) and not _is_placeholder(value)


def _is_placeholder(value: str) -> bool:
    return value.strip().lower() in PLACEHOLDERS


def _redact_argument(value: str) -> str:
    """A value as it was typed; one that is JSON may hold keys of its own."""
    if value[:1] in {"{", "["}:
        try:
            content = json.loads(value)
        except ValueError:
            return redact_text(value)
        public = redact(content)
        return value if public == content else json.dumps(public)
    return redact_text(value)
