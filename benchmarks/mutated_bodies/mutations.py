"""Malformed requests, made by kind from bodies that clients send."""

from __future__ import annotations

import copy
import functools
import gzip
import json
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

JUNK: tuple[Any, ...] = (
    None, True, False, 0, -1, 3.5, "", "1.5", "text", [], {}, [[]], [None], [[None]], [[[1]]], {"a": 1}, 2**31, 2**63,
    -(2**63) - 1, 10**400, 1e308, "\u0000", "\u2028", "x" * 100_000, [[1] * 10_000],
)  # fmt: skip
HUGE_NUMBERS = (
    "1e999",
    "-1e999",
    "1e308",
    "9" * 400,
    "0." + "0" * 400 + "1",
    "1e-999",
    "-0",
    "1E+400",
    "123456789e300",
)
BOMB_BYTES = 64 << 20


@dataclass(slots=True)
class Mutant:
    """One request as it is sent; if it `lies` about its framing, a close without an answer is accepted."""

    kind: str
    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    framing: str = "length"
    lies: bool = False

    def wire(self, rng: random.Random) -> bytes:
        """Return head and body as they are sent."""
        headers = {"Host": "localhost", "Content-Type": "application/json", "Connection": "close", **self.headers}
        body = self.body
        if self.framing == "length":
            headers["Content-Length"] = str(len(body))
        elif self.framing == "chunked":
            headers["Transfer-Encoding"] = "chunked"
            body = chunk(body, rng)
        elif self.framing == "broken chunks":
            headers["Transfer-Encoding"] = "chunked"
            body = flip(chunk(body, rng), rng)
        else:
            headers["Content-Length"] = self.framing
        head = f"POST {self.path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return head.encode("latin-1") + b"\r\n" + body


def make(rng: random.Random, bodies: list[tuple[str, bytes, dict[str, str]]]) -> Mutant:
    """Return a mutant of one of `bodies` (path, bytes, headers)."""
    path, body, headers = rng.choice(bodies)
    is_json = headers.get("Content-Type", "application/json") == "application/json"
    kinds = (*BYTE_KINDS, *JSON_KINDS) if is_json else BYTE_KINDS
    mutate = rng.choice(kinds)
    mutant = Mutant(mutate.__name__.replace("_", " "), path, body, dict(headers))
    mutate(mutant, rng)
    return mutant


def truncated(mutant: Mutant, rng: random.Random) -> None:
    mutant.body = mutant.body[: rng.randrange(len(mutant.body))]


def flipped_bits(mutant: Mutant, rng: random.Random) -> None:
    mutant.body = flip(mutant.body, rng)


def spliced(mutant: Mutant, rng: random.Random) -> None:
    first, second, third = sorted(rng.randrange(len(mutant.body)) for _ in range(3))
    body = mutant.body
    mutant.body = rng.choice(
        (
            body[:first] + body[second:],
            body[:second] + body[first:],
            body[:first] + rng.randbytes(20) + body[first:],
            body[:third] + body[first:second] + body[third:],
        )
    )


def emptied(mutant: Mutant, rng: random.Random) -> None:
    mutant.body = rng.choice((b"", b" ", b"\0" * 100, b"null", b"[]", b"{}", b'""', b"0", rng.randbytes(200)))


def gzip_garbage(mutant: Mutant, rng: random.Random) -> None:
    packed = gzip.compress(mutant.body, 1)
    mutant.headers["Content-Encoding"] = rng.choice(("gzip", "GZIP", "gzip, gzip", "x-gzip"))
    mutant.body = rng.choice(
        (
            packed[: rng.randrange(len(packed))],
            flip(packed, rng),
            mutant.body,
            gzip.compress(packed),
            packed + packed,
            packed + rng.randbytes(50),
            b"\x1f\x8b\x08\x00" + rng.randbytes(200),
            zlib.compress(mutant.body),
            gzip.compress(b"") * 3000,
        )
    )


def gzip_bomb(mutant: Mutant, rng: random.Random) -> None:
    mutant.headers["Content-Encoding"] = "gzip"
    mutant.body = make_bomb(rng.choice((b" ", b"[", b"0", b"\0")))


@functools.cache
def make_bomb(content: bytes) -> bytes:
    squeezer = zlib.compressobj(9, zlib.DEFLATED, 31)
    piece = content * (1 << 20)
    parts = [squeezer.compress(piece) for _ in range(BOMB_BYTES >> 20)]
    return b"".join((*parts, squeezer.flush()))


def other_encoding(mutant: Mutant, rng: random.Random) -> None:
    mutant.headers["Content-Encoding"] = rng.choice(("deflate", "br", "zstd", "identity", "compress", "\xff", ","))
    if rng.random() < 0.5:
        mutant.body = zlib.compress(mutant.body)


def other_content_type(mutant: Mutant, rng: random.Random) -> None:
    mutant.headers["Content-Type"] = rng.choice(
        (
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
            "",
            "\xfe/\xff",
            "a" * 5000,
        )
    )


def lying_length(mutant: Mutant, rng: random.Random) -> None:
    length = len(mutant.body)
    lie = rng.choice((length + rng.randrange(1, 10**6), rng.randrange(length), -1, 10**30, "0x10", "1,2", "+5", ""))
    mutant.framing, mutant.lies = str(lie), True


def chunked(mutant: Mutant, rng: random.Random) -> None:  # noqa: ARG001 - the form of all mutations
    mutant.framing = "chunked"


def broken_chunks(mutant: Mutant, rng: random.Random) -> None:  # noqa: ARG001 - the form of all mutations
    mutant.framing, mutant.lies = "broken chunks", True


def wrong_type(mutant: Mutant, rng: random.Random) -> None:
    value = json.loads(mutant.body)
    for _ in range(rng.choice((1, 1, 1, 3))):
        value = replace(value, rng, copy.deepcopy(rng.choice(JUNK)))
    mutant.body = json.dumps(value).encode()


def huge_number(mutant: Mutant, rng: random.Random) -> None:
    insert(mutant, rng, rng.choice(HUGE_NUMBERS))


def not_finite(mutant: Mutant, rng: random.Random) -> None:
    insert(
        mutant, rng, rng.choice(("NaN", "Infinity", "-Infinity", "nan", "-NaN", "1e", "0x1", "01", "1_0", "+1", ".5"))
    )


def deep_nesting(mutant: Mutant, rng: random.Random) -> None:
    depth = rng.choice((50, 500, 1500, 20_000, 200_000))
    opening, closing = rng.choice((("[", "]"), ('{"a":', "}"), ('[{"b":', "}]")))
    insert(mutant, rng, opening * depth + "1" + closing * (depth if rng.random() < 0.7 else 0))


def duplicate_keys(mutant: Mutant, rng: random.Random) -> None:
    text = mutant.body.decode()
    place = text.index("{") + 1
    key = rng.choice(("tokens", "masks", "scores", "groups", "environment_id", "env_id", "messages", "nobody"))
    mutant.body = f"{text[:place]}{json.dumps(key)}:{json.dumps(rng.choice(JUNK))},{text[place:]}".encode()


def surrogates(mutant: Mutant, rng: random.Random) -> None:
    insert(mutant, rng, rng.choice(('"\\ud800"', '"\\udfff\\ud800"', '"a\\ud83d"', '"\\u0000"', '"\\uZZZZ"', '"\\')))
    if rng.random() < 0.3:
        mutant.body = mutant.body.replace(b'"\\', b'"\xed\xa0\x80\\')


def wrong_charset(mutant: Mutant, rng: random.Random) -> None:
    name = rng.choice(("utf-16", "utf-32", "utf-16-le", "utf-8-sig", "utf-7", "cp037"))
    mutant.headers["Content-Type"] = f"application/json; charset={name}"
    mutant.body = mutant.body.decode().encode(name)


def ragged(mutant: Mutant, rng: random.Random) -> None:
    value = json.loads(mutant.body)
    rows = [row for row in walk(value) if isinstance(row, list) and row]
    row = rng.choice(rows)
    rng.choice((row.pop, lambda: row.append(row[0]), row.clear, lambda: row.extend(row * 50)))()
    mutant.body = json.dumps(value).encode()


Kind = Callable[[Mutant, random.Random], None]
BYTE_KINDS: tuple[Kind, ...] = (
    truncated, flipped_bits, flipped_bits, spliced, emptied, gzip_garbage, other_encoding, other_content_type,
    lying_length, chunked, broken_chunks,
)  # fmt: skip
JSON_KINDS: tuple[Kind, ...] = (
    gzip_bomb, wrong_type, wrong_type, wrong_type, huge_number, not_finite, deep_nesting, duplicate_keys, surrogates,
    wrong_charset, ragged,
)  # fmt: skip


def flip(body: bytes, rng: random.Random) -> bytes:
    flipped = bytearray(body)
    for _ in range(rng.choice((1, 1, 2, 10, 100)) if flipped else 0):
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def chunk(body: bytes, rng: random.Random) -> bytes:
    parts, place = [], 0
    while place < len(body):
        piece = body[place : place + rng.choice((1, 7, 500, 20_000))]
        place += len(piece)
        parts.append(b"%x\r\n%s\r\n" % (len(piece), piece))
    return b"".join((*parts, b"0\r\n\r\n"))


def insert(mutant: Mutant, rng: random.Random, text: str) -> None:
    """Replace some value of the body by raw text."""
    marker = "\u2603"
    value = replace(json.loads(mutant.body), rng, marker)
    mutant.body = json.dumps(value, ensure_ascii=False).replace(f'"{marker}"', text).encode("utf-8", "surrogatepass")


def replace(value: Any, rng: random.Random, new: Any) -> Any:
    """Return `value` with one of its parts, at any depth, replaced by `new`."""
    places = [(holder, key) for holder in walk(value) for key in keys(holder)]
    if not places:
        return new
    holder, key = rng.choice(places)
    holder[key] = new
    return value


def walk(value: Any) -> list[Any]:
    found = [value] if isinstance(value, list | dict) else []
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        found += walk(child)
    return found


def keys(holder: Any) -> list[Any]:
    return list(holder) if isinstance(holder, dict) else list(range(len(holder)))
