"""Query parameters, with the field and value named when they are wrong."""

from __future__ import annotations

import re
from typing import Final

from fastapi import Request

from atropos_api.errors import InvalidRequest
from atropos_api.http.asked import Asked

LONGEST_WAIT_SECONDS: Final = 60.0
LONGEST_KEY: Final = 200

_INTEGER: Final = re.compile(r"-?[0-9]{1,18}", re.ASCII)
_DECIMAL: Final = re.compile(r"[0-9]{1,400}(\.[0-9]{0,400})?([eE][+-]?[0-9]{1,3})?", re.ASCII)


def read_int(request: Request, name: str, default: int | None = None, *, least: int | None = None) -> int | None:
    text = request.query_params.get(name)
    return default if text is None else parse_int(text, name, least=least)


def parse_int(text: str, name: str, *, least: int | None = None) -> int:
    # Narrower than Python's own reading, which takes 1_000 and the digits of every script.
    value = int(text) if _INTEGER.fullmatch(text) else None
    if value is None or (least is not None and value < least):
        wanted = "an integer" if least is None else f"an integer of {least} or more"
        raise InvalidRequest(f"{name}: {wanted} is needed, got {text[:80]!r}", field=name, value=text[:80])
    return value


def read_wait(request: Request) -> float:
    """Seconds to wait, capped."""
    text = request.query_params.get("wait", "0")
    if _DECIMAL.fullmatch(text) is None:
        raise InvalidRequest(f"wait: seconds of 0 or more are needed, got {text[:80]!r}", field="wait", value=text[:80])
    return min(float(text), LONGEST_WAIT_SECONDS)


def read_key(asked: Asked) -> str | None:
    """The idempotency key, where one is given."""
    key = asked.header(b"idempotency-key")
    if key is not None and not 0 < len(key) <= LONGEST_KEY:
        raise InvalidRequest(f"Idempotency-Key: 1 to {LONGEST_KEY} characters are needed", field="Idempotency-Key")
    return key
