"""A request as the calls see it that are made all the time: bytes, and what they need of the head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fastapi import Request
from starlette.datastructures import QueryParams


class Asked(NamedTuple):
    """`headers` have lower-case names; `body` is whole and decompressed."""

    path: str
    query: bytes
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes

    @classmethod
    def of(cls, request: Request, body: bytes) -> Asked:
        scope = request.scope
        return cls(scope["path"], scope["query_string"], scope["headers"], body)

    def header(self, name: bytes) -> str | None:
        """The first one of that name."""
        for found, value in self.headers:
            if found == name:
                return value.decode("latin-1")
        return None

    def parameter(self, name: str) -> str | None:
        """A parameter of the query."""
        return QueryParams(self.query.decode("latin-1")).get(name)
