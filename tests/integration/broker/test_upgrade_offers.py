"""Requests that offer HTTP/2, as every request of a Java `HttpClient` does by default, on real sockets."""

import json
import re
import socket
import time

import pytest

from atropos_api.testing import served_broker

OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
RUN = json.dumps({"name": "run", "batch_size": 4, "max_token_length": 64, "num_steps": 9, "take_over": True}).encode()
HEAD = b"POST /v1/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n" + OFFER
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(RUN) + RUN
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(RUN) + RUN + b"\r\n0\r\n\r\n"
STATUS = b"GET /status HTTP/1.1\r\nHost: 127.0.0.1\r\n" + OFFER + b"\r\n"


@pytest.fixture(scope="module")
def connect():
    with served_broker() as url:
        host, port = url.removeprefix("http://").split(":")
        yield lambda: socket.create_connection((host, int(port)), timeout=10)


def read(connection, pattern, count=1):
    """Return the first `count` matches of the pattern in what the broker sends."""
    received = b""
    while len(found := re.findall(pattern, received)) < count:
        piece = connection.recv(1 << 16)
        assert piece, received
        received += piece
    return found


def statuses(connection, count=1):
    return [int(status) for status in read(connection, rb"HTTP/1\.1 (\d+) ", count)]


@pytest.mark.parametrize("request_bytes", [WHOLE, CHUNKED], ids=["a length", "chunks"])
@pytest.mark.parametrize("cut", [None, 40, len(HEAD) - 10, -20], ids=["whole", "head", "before its end", "body"])
def test_a_request_that_offers_another_protocol_is_read_whole_and_so_is_the_next(connect, request_bytes, cut):
    """Its body was lost: an empty one was answered, and the real one read as the next request."""
    with connect() as connection:
        for piece in (request_bytes,) if cut is None else (request_bytes[:cut], request_bytes[cut:]):
            connection.sendall(piece)
            time.sleep(0.05)
        assert statuses(connection) == [200]
        connection.sendall(STATUS)
        assert statuses(connection) == [200]


def test_requests_with_an_offer_may_follow_each_other_without_a_wait(connect):
    with connect() as connection:
        connection.sendall(STATUS + WHOLE + STATUS + CHUNKED)
        assert statuses(connection, 4) == [200] * 4


def test_a_late_trainer_that_offers_another_protocol_does_not_end_its_successors_run(connect):
    """The epoch is in the body, which was lost: the call ended the run of whichever trainer had it."""
    with connect() as connection:
        connection.sendall(WHOLE)
        (run_id,) = read(connection, rb'"run_id":"([^"]+)".*\}')
        body = b'{"epoch": 7}'
        path = b"/v1/runs/%b/finish" % run_id
        connection.sendall(HEAD.replace(b"/v1/runs", path) + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert statuses(connection) == [409]
