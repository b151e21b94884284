"""Request bodies, query parameters and small answers.

`read_body` bounds the memory of a body, also of a gzip one. Up to `AT_ONCE_BYTES` are inflated in one pass. For more, a
thread first only counts the bytes, piece by piece, and inflates the body once it is known to be within the limit. That
limit is at most `MOST_TIMES_LARGER` times what was sent, because rollouts never compress better. Errors name the field
and the value that are wrong. `RequestView` is a request as the most frequent calls need it: the body's bytes and parts
of the head.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from fastapi import Request, Response
from isal import isal_zlib
from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect

from atropos_api.errors import InvalidEncoding, InvalidRequest, TooLarge
from atropos_api.http.context import context_of

StructT = TypeVar("StructT")
AnyT = TypeVar("AnyT")
COMPRESS_FROM_BYTES: Final = 1000
THREAD_FROM_BYTES: Final = 2 << 20
"""Checking a smaller body takes a few milliseconds at most."""

MOST_LENIENT_BYTES: Final = 1 << 16
OTHER_ENCODINGS: Final = frozenset({b"br", b"compress", b"deflate", b"zstd"})
"""Encodings that are refused by name. Any other text, such as `utf-8`, is no compression, and clients do send it."""

_REFUSED_GZIP: Final = re.compile(r"gzip\s*;\s*q=0(\.0*)?\s*(,|$)")
JSON: Final = "application/json"

_encoder = msgspec.json.Encoder()


async def read_body(request: Request) -> bytes:
    """Return the whole body, decompressed; memory use stays within the limits."""
    config = context_of(request).config
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
    if body and encoding in OTHER_ENCODINGS:
        raise InvalidEncoding(f"Content-Encoding: gzip is the only one read, got {encoding.decode()}", field="body")
    return await inflate(body, config.max_inflated_bytes) if b"gzip" in encoding and body else body


async def in_thread_if_large(check: Callable[[bytes], AnyT], body: bytes) -> AnyT:
    """Return `check(body)`; a large body is checked in a thread, because other requests would wait for it."""
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
    """Decode a small JSON body as `kind`; errors name what is wrong. Without `strict`, numbers may come as text."""
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
        # In JSON 1.0 is an integer too; some clients write every number like this.
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
    """Return True if `Accept-Encoding` names gzip, unless it refuses it by a weight of 0."""
    text = accept_encoding.lower()
    return "gzip" in text and _REFUSED_GZIP.search(text) is None


def compress(pieces: Iterable[bytes]) -> list[bytes]:
    """Compress with gzip at the fastest level: more would cost the broker more than it saves anyone."""
    deflater = isal_zlib.compressobj(1, isal_zlib.DEFLATED, GZIP_WBITS)
    compressed = [*map(deflater.compress, pieces), deflater.flush()]
    return [piece for piece in compressed if piece]


def _too_large(size: int, limit: int, flag: str) -> TooLarge:
    return TooLarge(f"the body has {size} bytes or more, {limit} are allowed ({flag})", limit_bytes=limit)


GZIP_WBITS: Final = 31
PIECE_BYTES: Final = 1 << 20
AT_ONCE_BYTES: Final = 8 << 20
MOST_TIMES_LARGER: Final = 100
MOST_MEMBERS: Final = 64
"""Limit on gzip members: compressors write one or a few; thousands of empty ones only cost time."""


async def inflate(body: bytes, limit_bytes: int) -> bytes:
    """Inflate all members of a gzip body; raise `TooLarge` if they hold more than `limit_bytes`."""
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
                f"the body inflates to more than {limit_bytes} bytes: the limit is --max-inflated-bytes, and "
                f"{MOST_TIMES_LARGER} times the size as sent",
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
        # Zeros after the last member are padding.
        rest = member.unused_data.lstrip(b"\0")
        if not rest:
            return
    raise _bad_gzip(f"it has more than {MOST_MEMBERS} members")


def _bad_gzip(reason: str) -> InvalidEncoding:
    return InvalidEncoding(f"Invalid gzip payload: {reason}", field="body")


LONGEST_WAIT_SECONDS: Final = 60.0
LONGEST_KEY: Final = 200
_INTEGER: Final = re.compile(r"-?[0-9]{1,18}", re.ASCII)
_DECIMAL: Final = re.compile(r"[0-9]{1,400}(\.[0-9]{0,400})?([eE][+-]?[0-9]{1,3})?", re.ASCII)


def read_int(request: Request, name: str, default: int | None = None, *, least: int | None = None) -> int | None:
    text = request.query_params.get(name)
    return default if text is None else parse_int(text, name, least=least)


def parse_int(text: str, name: str, *, least: int | None = None) -> int:
    # Stricter than Python's `int`, which accepts 1_000 and the digits of every script.
    value = int(text) if _INTEGER.fullmatch(text) else None
    if value is None or (least is not None and value < least):
        wanted = "an integer" if least is None else f"an integer of {least} or more"
        raise InvalidRequest(f"{name}: {wanted} is needed, got {text[:80]!r}", field=name, value=text[:80])
    return value


def read_wait(request: Request) -> float:
    """Return the seconds to wait, at most `LONGEST_WAIT_SECONDS`."""
    text = request.query_params.get("wait", "0")
    if _DECIMAL.fullmatch(text) is None:
        raise InvalidRequest(f"wait: seconds of 0 or more are needed, got {text[:80]!r}", field="wait", value=text[:80])
    return min(float(text), LONGEST_WAIT_SECONDS)


def read_key(view: RequestView) -> str | None:
    """Return the idempotency key, or None if none is given."""
    key = view.header(b"idempotency-key")
    if key is not None and not 0 < len(key) <= LONGEST_KEY:
        raise InvalidRequest(f"Idempotency-Key: 1 to {LONGEST_KEY} characters are needed", field="Idempotency-Key")
    return key


class RequestView(NamedTuple):
    """A request for the frequent calls: `headers` have lower-case names; `body` is whole and decompressed."""

    path: str
    query: bytes
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes

    @classmethod
    def of(cls, request: Request, body: bytes) -> RequestView:
        scope = request.scope
        return cls(scope["path"], scope["query_string"], scope["headers"], body)

    def header(self, name: bytes) -> str | None:
        """Return the first header of that name."""
        for found, value in self.headers:
            if found == name:
                return value.decode("latin-1")
        return None

    def parameter(self, name: str) -> str | None:
        return QueryParams(self.query.decode("latin-1")).get(name)
