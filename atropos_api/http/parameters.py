"""Query parameters, with the field and value named when they are wrong."""

from __future__ import annotations

import math

from fastapi import Request

from atropos_api.errors import InvalidRequest

LONGEST_WAIT_SECONDS = 60.0


def read_int(request: Request, name: str, default: int | None = None, *, least: int | None = None) -> int | None:
    text = request.query_params.get(name)
    return default if text is None else parse_int(text, name, least=least)


def parse_int(text: str, name: str, *, least: int | None = None) -> int:
    try:
        value = int(text) if len(text) < 20 else None
    except ValueError:
        value = None
    if value is None or (least is not None and value < least):
        wanted = "an integer" if least is None else f"an integer of {least} or more"
        raise InvalidRequest(f"{name}: {wanted} is needed, got {text[:80]!r}", field=name, value=text[:80])
    return value


def read_wait(request: Request) -> float:
    """Seconds to wait, capped."""
    text = request.query_params.get("wait", "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds) or seconds < 0:
        raise InvalidRequest(f"wait: seconds of 0 or more are needed, got {text[:80]!r}", field="wait", value=text[:80])
    return min(seconds, LONGEST_WAIT_SECONDS)
