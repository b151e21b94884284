"""Request bodies in (bounded, inflated), small answers out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import msgspec
from fastapi import Request, Response
from isal import isal_zlib
from starlette.requests import ClientDisconnect

from atropos_api.errors import InvalidRequest, TooLarge
from atropos_api.http.inflating import GZIP_WBITS, inflate
from atropos_api.http.services import services_of

StructT = TypeVar("StructT")
AnyT = TypeVar("AnyT")

COMPRESS_FROM_BYTES: Final = 1000
THREAD_FROM_BYTES: Final = 2 << 20
"""Checking less takes no longer than a few milliseconds."""
MOST_LENIENT_BYTES: Final = 1 << 16
JSON: Final = "application/json"

_encoder = msgspec.json.Encoder()


async def read_body(request: Request) -> bytes:
    """The whole body, decompressed; never more in memory than the limits allow."""
    config = services_of(request).config
    declared, encoding = _length_and_encoding(request)
    if declared.isdigit() and int(declared) > config.max_body_bytes:
        raise _too_large(int(declared), config.max_body_bytes, "--max-body-bytes")
    chunks: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > config.max_body_bytes:
            raise _too_large(size, config.max_body_bytes, "--max-body-bytes")
        chunks.append(chunk)
        more = message.get("more_body", False)
    body = b"".join(chunks) if len(chunks) != 1 else chunks[0]
    return await inflate(body, config.max_inflated_bytes) if b"gzip" in encoding and body else body


async def beside_the_loop(check: Callable[[bytes], AnyT], body: bytes) -> AnyT:
    """What `check` makes of a body; of a large one it does so in a thread, for others would wait for it."""
    return check(body) if len(body) < THREAD_FROM_BYTES else await asyncio.to_thread(check, body)


def _length_and_encoding(request: Request) -> tuple[bytes, bytes]:
    length = encoding = b""
    for name, value in request.scope["headers"]:
        if name == b"content-length":
            length = value
        elif name == b"content-encoding":
            encoding = value.lower()
    return length, encoding


def decode_body(body: bytes, kind: type[StructT], *, strict: bool = True) -> StructT:
    """A small JSON body as its type; what is wrong with it is named. Not `strict`: numbers may come as text."""
    try:
        return _decode(body or b"{}", kind, strict=strict)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the body has the wrong shape: {error}", field="body") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", field="body") from None


def _decode(body: bytes, kind: type[StructT], *, strict: bool) -> StructT:
    try:
        return msgspec.json.decode(body, type=kind, strict=strict)
    except msgspec.ValidationError:
        if not strict or len(body) > MOST_LENIENT_BYTES:
            raise
        # To JSON 1.0 is an integer; some clients write every number so.
        return msgspec.convert(_with_integers(msgspec.json.decode(body)), kind)


def _with_integers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_integers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_integers(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def json_response(content: Any, status_code: int = 200) -> Response:
    return Response(_encoder.encode(content), status_code=status_code, media_type=JSON)


def wants_gzip(accept_encoding: str) -> bool:
    return "gzip" in accept_encoding.lower()


def compress(pieces: Iterable[bytes]) -> list[bytes]:
    """Gzip at the fastest level: more would cost the broker more than it saves anyone."""
    deflater = isal_zlib.compressobj(1, isal_zlib.DEFLATED, GZIP_WBITS)
    compressed = [*map(deflater.compress, pieces), deflater.flush()]
    return [piece for piece in compressed if piece]


def _too_large(size: int, limit: int, flag: str) -> TooLarge:
    return TooLarge(f"the body has {size} bytes or more, {limit} are allowed ({flag})", limit_bytes=limit)
