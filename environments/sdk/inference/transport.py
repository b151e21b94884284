"""HTTP requests to inference servers over kept connections: what a `Channel` sends through.

aiohttp, because its C parser costs a third of httpx's CPU a request; beside a model on the same cores that is tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import aiohttp


OnPiece = Callable[[bytes], None]
"""Handed the parts of a successful answer's body as they arrive."""


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    content: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


class Transport(Protocol):
    """What carries requests: `HttpTransport`, or an application called in process."""

    async def request(
        self, method: str, url: str, body: bytes | None, *, on_piece: OnPiece | None = None
    ) -> Response: ...

    async def aclose(self) -> None: ...


class HttpTransport:
    """Connections to any number of servers, opened on the first request."""

    def __init__(self, headers: Mapping[str, str], *, timeout_seconds: float | None = None) -> None:
        self._headers = dict(headers)
        self._timeout_seconds = timeout_seconds
        self._session: aiohttp.ClientSession | None = None

    async def request(self, method: str, url: str, body: bytes | None, *, on_piece: OnPiece | None = None) -> Response:
        """Send and await the whole answer; raises `OSError` when the connection fails or the time is over."""
        import aiohttp  # only a served environment needs it, `--help` does not

        session = self._session or self._open()
        try:
            try:
                return await _send(session, method, url, body, on_piece)
            except aiohttp.ServerDisconnectedError:
                # Closed while idle, or before it answered: what we send changes nothing there, so it may be repeated.
                return await _send(session, method, url, body, on_piece)
        except OSError:
            raise
        except aiohttp.ClientError as error:
            raise ConnectionError(f"{type(error).__name__} {error}".rstrip()) from error

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        # No limit of connections here: the channel has its own for training and evaluation.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=0),
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=self._timeout_seconds),
        )
        return self._session


async def _send(
    session: aiohttp.ClientSession, method: str, url: str, body: bytes | None, on_piece: OnPiece | None
) -> Response:
    async with session.request(method, url, data=body) as answer:
        if on_piece is None or not answer.ok:
            return Response(answer.status, await answer.read())
        parts = []
        async for part in answer.content.iter_any():
            parts.append(part)
            on_piece(part)
        return Response(answer.status, b"".join(parts))
