"""Compressed bodies: inflated whole and exactly, or refused before they cost memory or time."""

import asyncio
import gzip
import os
import random
import tracemalloc
import zlib

import pytest

from atropos_api.errors import InvalidEncoding, TooLarge
from atropos_api.http.request import AT_ONCE_BYTES, MOST_MEMBERS, inflate

LIMIT = 256 << 20


def run(body, limit=LIMIT):
    return asyncio.run(inflate(body, limit))


def bomb(mebibytes):
    squeezer = zlib.compressobj(9, zlib.DEFLATED, 31)
    piece = bytes(1 << 20)
    return b"".join([*(squeezer.compress(piece) for _ in range(mebibytes)), squeezer.flush()])


@pytest.mark.parametrize("size", [0, 1, 1 << 20, AT_ONCE_BYTES, AT_ONCE_BYTES + 1])
def test_what_was_compressed_comes_out_again(size):
    text = random.Random(size).randbytes(1 + size // 3) * 3
    assert run(gzip.compress(text[:size], 1)) == text[:size]


def test_members_after_one_another_and_padding_are_one_body():
    assert run(gzip.compress(b"a") + gzip.compress(b"") + gzip.compress(b"b") + b"\0\0") == b"ab"


def test_a_bomb_costs_no_memory():
    body = bomb(64)
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge, match="inflates to more than"):
            run(body, limit=1 << 40)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * AT_ONCE_BYTES


def test_the_limit_is_exact():
    body = gzip.compress(os.urandom(1000))
    assert len(run(body, limit=1000)) == 1000
    with pytest.raises(TooLarge):
        run(body, limit=999)


@pytest.mark.parametrize(
    "body",
    [
        b"abc",
        gzip.compress(b"a" * 99)[:-9],
        gzip.compress(b"a") + b"x",
        gzip.compress(b"") * (MOST_MEMBERS + 1),
        zlib.compress(b"a"),
    ],
    ids=["no header", "cut off", "more behind it", "too many members", "zlib"],
)
def test_a_body_that_is_not_gzip_is_refused(body):
    with pytest.raises(InvalidEncoding, match="Invalid gzip payload"):
        run(body)
