"""R8: a batch counts as delivered once the transport took its last byte, whatever the trainer does afterwards."""

import json
import socket

import pytest

GROUPS = 60
BATCH = b"GET /batch HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def dial(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def fetch_and_hang_up(url):
    """Request a batch on a connection of its own, and close it as soon as the last byte has come."""
    with dial(url) as connection:
        connection.sendall(BATCH)
        received = b""
        while b"\r\n\r\n" not in received:
            received += connection.recv(1 << 16)
        head, _, body = received.partition(b"\r\n\r\n")
        lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        while len(body) < int(lines[b"content-length"]):
            body += connection.recv(1 << 16)
    return [item["tokens"][0][0] for item in json.loads(body)["batch"]]


@pytest.mark.parametrize("length", [3, 60_000])
def test_a_trainer_that_hangs_up_at_once_gets_each_batch_once(legacy, make_group, length):
    legacy.start(batch_size=4)
    count = GROUPS if length == 3 else 6
    for ident in range(count):
        legacy.http.post("/scored_data", json=make_group(ident, length=length)).raise_for_status()
    assert [fetch_and_hang_up(legacy.url) for _ in range(count)] == [[ident] for ident in range(count)]


def test_a_trainer_that_leaves_in_the_middle_gets_the_batch_again(legacy, make_group):
    legacy.start(batch_size=4)
    for ident in range(2):
        legacy.http.post("/scored_data", json=make_group(ident, length=400_000)).raise_for_status()
    with dial(legacy.url) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(BATCH)
        connection.recv(1000)
    assert fetch_and_hang_up(legacy.url) == [0]
    assert fetch_and_hang_up(legacy.url) == [1]
