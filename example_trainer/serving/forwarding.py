"""The forwarding of adapters from one server to others, so that a trainer need not send one to each of many.

A server that has loaded an adapter sends it to two others, each with half of the remaining addresses. An address that
is not reached is left out of the answer, with those behind it; the trainer sends the adapter there itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import httpx

logger = logging.getLogger(__name__)

BRANCHES = 2
DEEPER_SHARE = 0.7
"""Part of the time allowed that servers one level below get, so that each answers before its caller gives up."""

Reached = dict[str, dict[str, str]]
"""By address, the checksum of the adapter that arrived there and the server's boot id."""


class AdapterForwarder:
    """Sends adapters on; the other servers accept the bridge token of this one."""

    def __init__(self, token: str, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._token = token
        self._transport = transport

    async def forward(
        self, name: str, version: int, body: bytes, urls: Sequence[str], *, limit_seconds: float
    ) -> Reached:
        """Send an adapter to the servers at these addresses; return those that have it."""
        parts = [part for start in range(BRANCHES) if (part := urls[start::BRANCHES])]
        headers = {"Authorization": f"Bearer {self._token}"}
        async with httpx.AsyncClient(transport=self._transport, headers=headers, trust_env=False) as client:
            branches = (self._send(client, name, version, body, part, limit_seconds) for part in parts)
            found = await asyncio.gather(*branches)
        return {url: reached for branch in found for url, reached in branch.items()}

    async def _send(
        self, client: httpx.AsyncClient, name: str, version: int, body: bytes, urls: Sequence[str], limit_seconds: float
    ) -> Reached:
        first, *others = urls
        params: list[tuple[str, Any]] = [("name", name), ("version", version), *(("forward_to", url) for url in others)]
        params.append(("forward_seconds", DEEPER_SHARE * limit_seconds))
        try:
            answer = await client.post(f"{first}/lora/upload", params=params, content=body, timeout=limit_seconds)
            answer.raise_for_status()
            reached = answer.json()
            return {first: {name: reached[name] for name in ("digest", "boot_id")}, **reached.get("forwarded", {})}
        except (httpx.HTTPError, ValueError, KeyError) as error:
            logger.warning("adapter %s was not passed on to %s: %s", name, first, str(error) or type(error).__name__)
            return {}
