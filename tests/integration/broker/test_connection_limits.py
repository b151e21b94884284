"""Slow, silent and greedy connections on real sockets are closed in time and do not affect other clients."""

import contextlib
import json
import select
import socket
import time

import httpx
import pytest

from atropos_api.testing import make_memory_app, serve_in_thread, served_broker

SOON = 4.0


@pytest.fixture
def served():
    with served_broker(header_timeout=0.4, stall_timeout=0.6) as url:
        yield url


@pytest.fixture(scope="module")
def url_of_broker():
    with served_broker() as url:
        yield url


def dial(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=SOON)


def read_to_end(connection):
    """Return everything until the broker closes the connection; a reset counts as the end."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(1 << 16):
            received += chunk
    return received


def drip(connection, piece, interval=0.1):
    """Send `piece` again and again until the broker closes the connection; return its answer."""
    connection.settimeout(interval)
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline:
        try:
            connection.sendall(piece)
            received = connection.recv(1 << 16)
        except TimeoutError:
            continue
        except (ConnectionResetError, BrokenPipeError):
            return b""
        return received
    raise AssertionError("the broker still listens to a connection that drips")


def test_a_connection_that_says_nothing_is_closed(served):
    with dial(served) as connection:
        started = time.monotonic()
        assert b" 408 " in read_to_end(connection)
        assert time.monotonic() - started < 3


@pytest.mark.parametrize("head", [b"", b"GET /status HTTP/1.1\r\nHost: localhost\r\n"])
@pytest.mark.parametrize("piece", [b"X-A: b\r\n", b"\r\n"])
def test_headers_that_drip_are_given_up(served, head, piece):
    if head and piece == b"\r\n":
        piece = b"X"
    with dial(served) as connection:
        connection.sendall(head)
        drip(connection, piece)


def test_line_ends_dripped_after_an_answer_keep_no_connection(served):
    with dial(served) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in connection.recv(1 << 16)
        drip(connection, b"\r\n")


@pytest.mark.parametrize("ending", ["HTTP/1.1\r\nConnection: close", "HTTP/1.0"])
@pytest.mark.parametrize(
    ("call", "status"), [("POST /nothing", 404), ("GET /v1/status", 200), ("PUT /v1/policy/x", 404)]
)
def test_a_body_that_no_call_reads_costs_no_peer_its_answer(url_of_broker, call, status, ending):
    """A connection that is closed with unread input is reset, and the answer may be lost with it."""
    body = bytes(3_000_000)
    head = f"{call} {ending}\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with dial(url_of_broker) as connection:
        connection.sendall(head + body)
        received = b""
        while chunk := connection.recv(1 << 16):
            received += chunk
    assert received.startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize("path", ["/scored_data", "/v1/groups"])
def test_a_body_that_drips_is_given_up(served, path):
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n".encode()
    with dial(served) as connection:
        connection.sendall(head)
        assert drip(connection, b"[").startswith(b"HTTP/1.1 408")


def test_a_chunked_body_that_never_ends_is_given_up(served):
    with dial(served) as connection:
        connection.sendall(b"POST /scored_data HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert drip(connection, b"1\r\n[\r\n").startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    "start",
    [
        b"GET / HTTP/1.1\r\nX-Long: ",
        b"GET /",
        b"POST /scored_data HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1;",
        b"POST /scored_data HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-Trailer: ",
    ],
)
def test_endless_headers_trailers_and_extensions_are_cut_off(served, start):
    with dial(served) as connection:
        connection.sendall(start)
        answer = b""
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                connection.sendall(b"a" * 65536)
        with contextlib.suppress(ConnectionError):
            answer = read_to_end(connection)
        assert answer == b"" or b" 431 " in answer or b" 400 " in answer
        with pytest.raises(ConnectionError):  # noqa: PT012
            for _ in range(200):  # what comes within LINGER_SECONDS of the refusal is still read
                connection.sendall(b"a" * 65536)
                time.sleep(0.05)


def test_a_client_that_sends_large_headers_in_one_go_can_read_why_they_are_refused(url_of_broker):
    """It writes all before it reads: a reset in the meantime would destroy the answer."""
    head = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"a" * 8_000_000 + b"\r\n\r\n"
    for _ in range(10):
        with dial(url_of_broker) as connection:
            connection.sendall(head)
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 431 ")


def test_garbage_gets_a_problem_and_an_end(served):
    with dial(served) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00 not http\r\n\r\n")
        head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400")
        assert json.loads(body)["type"].endswith("/malformed-request")


def test_a_reader_that_never_reads_its_batch_is_cut_off_and_the_batch_offered_again(make_group):
    with served_broker(stall_timeout=0.6) as url, httpx.Client(base_url=url, timeout=20) as client:
        from_reader = {"wandb_group": "", "wandb_project": "", "batch_size": 4, "max_token_len": 64}
        rest = {"checkpoint_dir": "", "save_checkpoint_interval": 1, "starting_step": 0, "num_steps": 9}
        client.post("/register", json=from_reader | rest)
        client.post("/scored_data", json=make_group(7) | {"images": "x" * 40_000_000})
        with dial(url) as stuck:
            stuck.sendall(b"GET /batch HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert stuck.recv(100).startswith(b"HTTP/1.1 200")
            # The next poller waits for its turn, which comes once the first one is given up.
            started = time.monotonic()
            batch = client.get("/batch").json()["batch"]
            assert time.monotonic() - started < SOON
        assert batch[0]["tokens"][0][0] == 7


def test_stuck_connections_cost_the_others_nothing(served):
    unfinished = b"POST /scored_data HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n[[["
    with contextlib.ExitStack() as stack, httpx.Client(base_url=served) as client:
        for index in range(200):
            connection = stack.enter_context(dial(served))
            connection.sendall(unfinished[: index % len(unfinished)])
        times = []
        for _ in range(50):
            started = time.monotonic()
            assert client.get("/status").status_code == 200
            times.append(time.monotonic() - started)
    assert sorted(times)[45] < 0.1


def test_too_many_connections_give_way_to_those_that_ask_something():
    with served_broker(max_connections=20, header_timeout=30.0) as url, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(dial(url)) for _ in range(20)]
        refused = stack.enter_context(dial(url))
        assert b" 503 " in read_to_end(refused)
        time.sleep(1.1)
        assert httpx.get(f"{url}/status").status_code == 200
        closed, _, _ = select.select(silent, [], [], SOON)
        assert b" 503 " in read_to_end(closed[0])


def test_a_caller_that_leaves_is_not_waited_for():
    app = make_memory_app()
    with serve_in_thread(app) as url:
        run = {"name": "r", "batch_size": 4, "max_token_length": 9, "num_steps": 3}
        httpx.post(f"{url}/v1/runs", json=run)
        waiters = app.context.groups_notifier._waiters
        with dial(url) as connection:
            connection.sendall(b"GET /v1/batches/1?wait=60 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            wait_for(lambda: len(waiters) == 1)
        wait_for(lambda: not waiters)


def test_a_caller_that_leaves_in_the_middle_of_its_body_leaves_no_trace_in_the_log(served, caplog):
    with dial(served) as connection:
        connection.sendall(b"POST /scored_data HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n[")
    time.sleep(0.2)
    assert httpx.get(f"{served}/status").status_code == 200
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def wait_for(condition):
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
