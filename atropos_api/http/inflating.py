"""Gunzip of request bodies in bounded memory: a small body that claims to be a huge one is refused without becoming it.

Up to `AT_ONCE_BYTES` come out in one pass. What would be larger is refused if it is too much larger than what was sent,
for no data of rollouts compresses like a bomb; else it is first only counted, piece by piece and beside the event loop,
and inflated for real once it is known to be within the limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

from isal import isal_zlib

from atropos_api.errors import InvalidEncoding, TooLarge

GZIP_WBITS: Final = 31
PIECE_BYTES: Final = 1 << 20
AT_ONCE_BYTES: Final = 8 << 20
MOST_TIMES_LARGER: Final = 100
MOST_MEMBERS: Final = 64
"""Compressors write one member, or a few one after another; thousands of empty ones only cost time."""


async def inflate(body: bytes, limit_bytes: int) -> bytes:
    """All members of a gzip body; `TooLarge` if they hold more than `limit_bytes`."""
    parts: list[bytes] = []
    room = min(limit_bytes, AT_ONCE_BYTES)
    for piece in _pieces(body):
        room -= len(piece)
        if room < 0:
            parts.clear()
            return await asyncio.to_thread(_inflate_large, body, min(limit_bytes, len(body) * MOST_TIMES_LARGER))
        parts.append(piece)
    return b"".join(parts)


def _inflate_large(body: bytes, limit_bytes: int) -> bytes:
    size = 0
    for piece in _pieces(body):
        size += len(piece)
        if size > limit_bytes:
            raise TooLarge(
                f"the body inflates to more than {limit_bytes} bytes: --max-inflated-bytes, or {MOST_TIMES_LARGER} "
                "times what was sent",
                limit_bytes=limit_bytes,
            )
    return b"".join(_pieces(body))


def _pieces(body: bytes) -> Iterator[bytes]:
    rest = body
    for _ in range(MOST_MEMBERS):
        member = isal_zlib.decompressobj(wbits=GZIP_WBITS)
        data = rest
        while not member.eof:
            try:
                piece = member.decompress(data, PIECE_BYTES)
            except isal_zlib.error as error:  # type: ignore[misc]
                raise _bad_gzip(str(error)) from None
            data = member.unconsumed_tail
            if not piece and not data and not member.eof:
                raise _bad_gzip("it ends too early")
            yield piece
        # Zeroes after the last member are padding.
        rest = member.unused_data.lstrip(b"\0")
        if not rest:
            return
    raise _bad_gzip(f"it has more than {MOST_MEMBERS} members")


def _bad_gzip(reason: str) -> InvalidEncoding:
    return InvalidEncoding(f"Invalid gzip payload: {reason}", field="body")
