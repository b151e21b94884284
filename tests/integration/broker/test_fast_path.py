"""Calls answered by the connection itself match the application's answers: in order, whole, and authorised."""

import contextlib
import json
import socket
import time

import httpx
import pytest

from atropos_api.server import serve
from atropos_api.testing import make_memory_app, serve_in_thread, served_broker

SOON = 5.0
JSON = "Content-Type: application/json"


class Peer:
    """A connection that sends exactly the given bytes."""

    def __init__(self, url):
        host, port = url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=SOON)
        self.host = f"{host}:{port}"
        self._received = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def request(self, method, path, body=b"", *headers, version="1.1"):
        lines = [f"{method} {path} HTTP/{version}", f"Host: {self.host}", f"Content-Length: {len(body)}", *headers]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body

    def chunked(self, method, path, body, *headers):
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host}", "Transfer-Encoding: chunked", *headers]
        return "\r\n".join(lines).encode() + b"\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)

    def send(self, *requests):
        self.socket.sendall(b"".join(requests))

    def answer(self):
        """Return status, headers and body of the next answer."""
        while b"\r\n\r\n" not in self._received:
            self._receive()
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        length = int(headers["content-length"])
        while len(self._received) < length:
            self._receive()
        body, self._received = self._received[:length], self._received[length:]
        return int(status.split()[1]), headers, body

    def ask(self, *request, **options):
        self.send(self.request(*request, **options))
        return self.answer()

    def is_closed(self):
        with contextlib.suppress(ConnectionResetError):
            return self.socket.recv(1 << 16) == b""
        return True

    def _receive(self):
        piece = self.socket.recv(1 << 16)
        if not piece:
            raise EOFError(self._received)
        self._received += piece


@pytest.fixture
def peer(legacy):
    """A connection to a broker with a trainer and two environments."""
    legacy.start()
    legacy.register_env()
    legacy.register_env(desired_name="other")
    with Peer(legacy.url) as made:
        yield made


def status_of(env_id):
    return "GET", "/status-env", json.dumps({"env_id": env_id}).encode()


def test_both_ways_give_the_same_answers(peer, make_group):
    body = json.dumps(make_group(1)).encode()
    for method, path, content in [
        status_of(1),
        status_of(99),
        ("POST", "/scored_data", body),
        ("POST", "/scored_data", b"["),
        ("POST", "/scored_data", json.dumps(make_group(1) | {"scores": "x"}).encode()),
        ("POST", "/scored_data_list", b"[%b,%b]" % (body, body)),
        ("POST", "/v1/groups", b'{"environment_id":0,"groups":[%b]}' % body),
        ("POST", "/v1/groups", b'{"environment_id":7,"groups":[%b]}' % body),
    ]:
        peer.send(peer.request(method, path, content), peer.chunked(method, path, content))
        (status, headers, found), (long_status, long_headers, long_found) = peer.answer(), peer.answer()
        assert (status, headers.keys()) == (long_status, long_headers.keys()), path
        assert found == long_found or path == "/v1/groups", path


def test_pipelined_requests_are_answered_in_their_order(peer):
    question = {0: peer.request(*status_of(0)), 7: peer.request(*status_of(7))}
    requests, expected = [], []
    for place in range(60):
        kind = place % 4
        requests.append([question[0], question[7], peer.request("GET", "/livez"), peer.chunked(*status_of(7))][kind])
        expected.append([200, 404, 200, 404][kind])
    # More requests than are answered at once, some of them cut at any byte.
    requests += [question[7], question[0]] * 30
    expected += [404, 200] * 30
    stream = b"".join(requests)
    for start in range(0, len(stream), 1021):
        peer.socket.sendall(stream[start : start + 1021])
    assert [peer.answer()[0] for _ in expected] == expected


@pytest.mark.parametrize("path", ["/status-env", "/livez"])
def test_a_connection_that_was_to_be_closed_is_and_nothing_after_it_is_taken(peer, legacy, make_group, path):
    late = peer.request("POST", "/scored_data", json.dumps(make_group(1)).encode())
    peer.send(peer.request("GET", path, b'{"env_id": 0}', "Connection: close"), late)
    status, headers, _ = peer.answer()
    assert (status, headers["connection"]) == (200, "close")
    assert peer.is_closed()
    assert legacy.http.get("/status").json()["queue_size"] == 0


def test_after_a_direct_close_nothing_is_taken(legacy, make_group):
    legacy.start()
    with Peer(legacy.url) as peer:
        body = json.dumps(make_group(1)).encode()
        peer.send(peer.request("POST", "/scored_data", body, "Connection: close"))
        assert peer.answer()[0] == 200
        assert peer.is_closed()
    with Peer(legacy.url) as peer:
        first = peer.request("POST", "/scored_data", body, "Connection: close")
        peer.send(first, peer.request("POST", "/scored_data", body))
        assert peer.answer()[0] == 200
        assert peer.is_closed()
    assert legacy.http.get("/status").json()["queue_size"] == 2


def test_http_1_0_is_answered_and_closed(peer):
    assert peer.ask(*status_of(0), version="1.0")[0] == 200
    assert peer.is_closed()


def test_a_caller_that_waits_to_be_told_to_go_on_is_told(peer, make_group):
    body = json.dumps(make_group(1)).encode()
    peer.send(peer.request("POST", "/scored_data", body, "Expect: 100-continue")[: -len(body)])
    assert peer.socket.recv(100).startswith(b"HTTP/1.1 100")
    peer.send(body)
    assert peer.answer()[0] == 200


def test_a_fault_is_said_to_be_one_and_costs_the_next_call_nothing(caplog):
    app = make_memory_app()
    with serve_in_thread(app) as url, Peer(url) as peer:
        app.context.legacy.status.status_env = lambda _: {}["fault"]
        status, _, body = peer.ask(*status_of(0))
        assert (status, json.loads(body)["type"].rpartition("/")[2]) == (500, "internal-error")
        del app.context.legacy.status.status_env
        assert peer.ask(*status_of(0))[0] == 404
    assert [record.levelname for record in caplog.records if record.name.endswith("fast_path")] == ["ERROR"]


def test_the_request_guard_checks_direct_calls_too(make_group):
    body = json.dumps(make_group(1)).encode()
    with served_broker(token="secret-token") as url, Peer(url) as peer:
        assert peer.ask(*status_of(0))[0] == 401
        assert peer.ask("POST", "/scored_data", body, "Authorization: Bearer wrong-token")[0] == 401
        assert peer.ask("POST", "/scored_data", body, "Authorization: Bearer secret-token")[0] == 200
        assert peer.ask("POST", "/t/secret-token/scored_data", body)[0] == 200
    with served_broker() as url, Peer(url) as peer:
        for header in ("Origin: http://evil.example", "Sec-Fetch-Site: cross-site", "Referer: http://evil.example/"):
            assert peer.ask("POST", "/scored_data", body, header)[0] == 403
        peer.host = "evil.example"
        assert peer.ask("POST", "/scored_data", body)[0] == 403
        peer.host = "127.0.0.1"
        assert json.loads(peer.ask("GET", "/v1/status")[2])["counters"]["groups_received_total"] == 0


def test_an_idle_connection_is_closed_though_only_direct_calls_were_made(monkeypatch):
    monkeypatch.setattr(serve, "KEEP_ALIVE_SECONDS", 1)
    with served_broker() as url, Peer(url) as peer:
        began = time.monotonic()
        while time.monotonic() < began + 1.5:
            assert peer.ask(*status_of(0))[0] == 404
            time.sleep(0.3)
        assert peer.is_closed()


def test_connections_that_only_make_direct_calls_do_not_give_way_as_silent_ones():
    with served_broker(max_connections=4, header_timeout=30.0) as url, contextlib.ExitStack() as stack:
        peers = [stack.enter_context(Peer(url)) for _ in range(4)]
        for peer in peers:
            assert peer.ask(*status_of(0))[0] == 404
        time.sleep(1.2)
        with Peer(url) as refused:
            assert refused.answer()[0] == 503
        assert [peer.ask(*status_of(0))[0] for peer in peers] == [404] * 4


def test_a_peer_that_asks_and_never_reads_is_stopped_and_others_are_answered():
    with served_broker(stall_timeout=1.0) as url, Peer(url) as greedy, httpx.Client(base_url=url) as client:
        greedy.socket.setblocking(False)
        flood = greedy.request(*status_of(0)) * 1000
        sent, deadline = 0, time.monotonic() + 2.5
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < deadline:
                try:
                    sent += greedy.socket.send(flood)
                except BlockingIOError:
                    assert client.get("/status").status_code == 200
        # The kernels' buffers between the two, and only a little of the broker's.
        assert sent < 50_000_000
        greedy.socket.setblocking(True)


@pytest.mark.parametrize("legacy", [{"max_queued_sequences": 4}], indirect=True)
def test_pressure_holds_the_answer_back_as_it_does_for_everyone(peer, legacy, make_group):
    legacy.http.get("/batch")
    assert peer.ask("POST", "/scored_data", json.dumps(make_group(1)).encode())[0] == 200
    peer.send(peer.request("POST", "/scored_data", json.dumps(make_group(2)).encode()))
    peer.socket.settimeout(0.5)
    with pytest.raises(TimeoutError):
        peer.answer()
    legacy.http.get("/reset_data")
    peer.socket.settimeout(SOON)
    assert peer.answer()[0] == 200
    assert legacy.http.get("/v1/status").json()["counters"]["pressure_total"] == 0
