"""How the clients show the broker's token: in each request's header, the newest one that a file holds."""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

import httpx

from atropos_api.common.token_file import TokenSource

UNAUTHORIZED: Final = 401


class BearerAuth(httpx.Auth):
    """Sends `Authorization: Bearer <token>`; repeats a refused request where the token's file has a new one."""

    def __init__(self, token: str | TokenSource | None) -> None:
        self._source = token if isinstance(token, TokenSource) else TokenSource(token)
        self._was_accepted = False

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        self._sign(request)
        response = yield request
        if response.status_code == UNAUTHORIZED and self._source.reload():
            self._sign(request)
            yield request

    def note(self, outcome: httpx.Response | httpx.TransportError) -> None:
        """Remember whether the broker has taken a token of this source for a call that needs one."""
        if isinstance(outcome, httpx.Response) and outcome.is_success:
            self._was_accepted = True

    def awaits_replacement(self, outcome: httpx.Response | httpx.TransportError) -> bool:
        """Whether the broker may have read a new token before this process can: on another host files change later."""
        refused = isinstance(outcome, httpx.Response) and outcome.status_code == UNAUTHORIZED
        return refused and self._was_accepted and self._source.file is not None

    def _sign(self, request: httpx.Request) -> None:
        if self._source.value:
            request.headers["Authorization"] = f"Bearer {self._source.value}"
