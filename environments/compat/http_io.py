"""`atroposlib.utils.io`: the JSON of an aiohttp answer, or its error with what the server said."""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["parse_http_response"]


async def parse_http_response(resp: Any, logger: logging.Logger | None = None) -> Any:
    """The decoded body; a refusal is logged with its text and raised."""
    try:
        resp.raise_for_status()
    except Exception:
        told = logger or logging.getLogger(__name__)
        told.error("HTTP %s from %s: %s", resp.status, resp.url, await resp.text())
        raise
    return await resp.json()
