"""The clients repeat only calls that are safe to repeat, and report the cause if the broker does not answer."""

import shutil
import socket
import ssl
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from atropos_api.client import (
    AsyncBrokerClient,
    BrokerClient,
    BrokerHostUnknown,
    BrokerRefused,
    BrokerUnreachable,
)
from atropos_api.common.secrets import TokenSource
from atropos_api.testing import make_group, memory_broker
from atropos_api.wire import EnvironmentRequest, RunRequest

RUN = RunRequest(name="r", batch_size=4, max_token_length=9, num_steps=1)


def client_of(answers):
    """Return a client whose broker gives these answers in turn, and the count of its calls."""
    calls = []

    def answer(request):
        calls.append(request)
        outcome = answers[min(len(calls), len(answers)) - 1]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return BrokerClient("http://broker", transport=httpx.MockTransport(answer), retry_seconds=1.0), calls


def test_a_broker_that_comes_back_within_the_time_is_not_an_error():
    client, calls = client_of([httpx.ConnectError("refused"), httpx.Response(502), httpx.Response(200, json={})])
    assert client.status() == {}
    assert len(calls) == 3


@pytest.mark.parametrize("page", ["<html>back in a minute</html>", "[]"])
def test_a_success_that_no_broker_gave_counts_as_a_broker_that_does_not_answer(page):
    """As an error of its own kind it ended a server's renewals for good: the server refused every request from then."""
    client, _ = client_of([httpx.Response(200, text=page)])
    with pytest.raises(BrokerUnreachable, match=r"http://broker/v1/status answers with something else than a broker"):
        client.status()
    with pytest.raises(BrokerUnreachable, match=r"/v1/batches/1\?.* answers with something else than a broker"):
        client.get_batch(1, run_id="r", epoch=1)


def test_a_run_is_not_begun_twice_because_an_answer_was_lost():
    client, calls = client_of([httpx.ReadError("broken off")])
    with pytest.raises(BrokerUnreachable):
        client.begin_run(RUN)
    assert len(calls) == 1


@pytest.mark.parametrize("failure", [httpx.ConnectError("refused"), httpx.Response(408, json={"detail": "not whole"})])
def test_a_run_that_never_reached_the_broker_is_begun_again(failure):
    info = {
        "run_id": "r", "epoch": 1, "next_batch": 1, "highest_policy_version": 0, "committed_batch": 0,
        "leftover_groups": 0,
    }  # fmt: skip
    client, calls = client_of([failure, httpx.Response(200, json=info)])
    assert client.begin_run(RUN).epoch == 1
    assert len(calls) == 2


def test_pressure_is_retried_when_the_broker_says_so():
    full = httpx.Response(503, headers={"Retry-After": "0"}, json={"detail": "full"})
    taken = httpx.Response(202, json={"accepted": 1, "buffered": 0, "duplicates": 0, "pacing": None})
    client, calls = client_of([full, full, taken])
    assert client.submit(1, [make_group()], idempotency_key="k").accepted == 1
    assert {call.headers["Idempotency-Key"] for call in calls} == {"k"}


def test_a_refusal_is_not_repeated_and_carries_the_problem():
    problem = {"type": "https://x/invalid-group", "detail": "scores[1]: no", "field": "scores[1]"}
    client, calls = client_of([httpx.Response(422, json=problem)])
    with pytest.raises(BrokerRefused, match=r"scores\[1\]: no") as caught:
        client.submit(1, [make_group()], idempotency_key="k")
    assert (caught.value.kind, caught.value.status, len(calls)) == ("invalid-group", 422, 1)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://localhost:8000", "localhost"])
def test_a_url_without_http_is_reported_at_once(url):
    started = time.monotonic()
    with BrokerClient(url) as client:
        for call in (client.status, lambda: client.wait_until_ready(600)):
            with pytest.raises(BrokerHostUnknown, match=f"does not begin with http.*try http://{url}"):
                call()
    assert time.monotonic() - started < 5


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A self-signed certificate for 127.0.0.1, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    made = ["-keyout", folder / "key", "-out", folder / "certificate", "-days", "2", "-nodes", "-subj", "/CN=broker"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    for_us = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(["openssl", "req", "-x509", *curve, *made, *for_us], check=True, capture_output=True)
    return folder / "certificate", folder / "key"


class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(("trusted", "scheme"), [(True, "https"), (False, "https"), (False, "HTTPS")])
def test_a_private_certificate_is_trusted_where_the_environment_names_it(certificate, monkeypatch, trusted, scheme):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        if trusted:
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        with BrokerClient(f"{scheme}://127.0.0.1:{server.server_port}", retry_seconds=0.0) as client:
            if trusted:
                assert client.status() == {}
            else:
                with pytest.raises(BrokerUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
                    client.status()
        server.shutdown()


@pytest.mark.usefixtures("no_such_name")
def test_a_mistyped_host_is_reported_at_once():
    started = time.monotonic()
    with BrokerClient("http://no-such-host.invalid:8000") as client:
        with pytest.raises(BrokerHostUnknown, match=r"no-such-host\.invalid"):
            client.wait_until_ready(600)
        with pytest.raises(BrokerHostUnknown):
            client.status()
    assert time.monotonic() - started < 30


class LostName(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """A broker whose name cannot be looked up any more after its first answer, for some calls."""

    def __init__(self, failures, *, number=socket.EAI_NONAME, answers_first=True):
        self._left = [*[None] * answers_first, *[socket.gaierror(number, "no name server answers")] * failures]

    def handle_request(self, request):
        failure = self._left.pop(0) if self._left else None
        if failure is not None:
            raise httpx.ConnectError(str(failure), request=request) from failure
        return httpx.Response(200, json={})

    async def handle_async_request(self, request):
        return self.handle_request(request)


def test_a_name_server_that_fails_while_a_run_is_in_progress_is_an_outage():
    with BrokerClient("http://of-a-pod.test:8000", transport=LostName(failures=3)) as client:
        client.status()
        assert client.status() == {}
    with BrokerClient("http://of-a-pod.test:8000", transport=LostName(99), retry_seconds=0.1) as client:
        client.status()
        with pytest.raises(BrokerUnreachable, match="no name server answers"):
            client.status()
        with pytest.raises(BrokerUnreachable):
            client.wait_until_ready(0.1)


def test_a_name_server_that_does_not_answer_is_waited_for_from_the_start():
    """At the start of a pod it often does not, and the name was said to be wrong."""
    silent = LostName(failures=3, number=socket.EAI_AGAIN, answers_first=False)
    with BrokerClient("http://of-a-new-pod.test:8000", transport=silent) as client:
        client.wait_until_ready(5)


@pytest.mark.anyio
async def test_the_async_client_waits_for_a_name_server_too():
    async with AsyncBrokerClient("http://of-another-pod.test:8000", transport=LostName(failures=3)) as client:
        await client.wait_until_ready(5)
        await client.leave(1)


def test_waiting_ends_with_the_words_people_search_for():
    with (
        BrokerClient("http://127.0.0.1:9") as client,
        pytest.raises(BrokerUnreachable, match="Atropos API not reachable"),
    ):
        client.wait_until_ready(0.1)


@pytest.mark.anyio
async def test_the_async_client_makes_the_same_calls():
    _, client = memory_broker()
    async with client:
        await client.wait_until_ready(5)
        run = await client.begin_run(RUN)
        request = EnvironmentRequest(name="env", group_size=4, max_token_length=9)
        environment = (await client.register_environment(request)).environment_id
        answer = await client.submit(environment, [make_group(4)], idempotency_key="k")
        assert (answer.accepted, answer.pacing.outstanding_sequences) == (1, 4)
        batch = await client.get_batch(1, run_id=run.run_id, epoch=run.epoch)
        assert batch.groups[0].env_id == environment
        await client.commit(1, run_id=run.run_id, epoch=run.epoch)
        await client.finish_run(run.run_id, epoch=run.epoch)
        assert (await client.heartbeat(environment)).state == "finished"


@pytest.mark.anyio
@pytest.mark.usefixtures("no_such_name")
async def test_the_async_client_tells_a_mistyped_host_too():
    async with AsyncBrokerClient("http://no-such-host.invalid:8000") as client:
        with pytest.raises(BrokerHostUnknown):
            await client.wait_until_ready(600)


def broker_with_token(accepted, on_call=lambda count: None):
    """A broker that takes the current token of `accepted`, and the tokens that it received."""
    shown = []

    def answer(request):
        shown.append(request.headers.get("Authorization"))
        on_call(len(shown))
        return httpx.Response(200 if shown[-1] == f"Bearer {accepted[0]}" else 401, json={"detail": "token"})

    return httpx.MockTransport(answer), shown


def test_a_token_file_is_read_again_when_its_token_is_refused(tmp_path):
    path, accepted = tmp_path / "token", ["first-token"]
    path.write_text("first-token\n")
    transport, shown = broker_with_token(accepted)
    with BrokerClient("http://broker", token=TokenSource(file=path), transport=transport) as client:
        client.status()
        accepted[0] = "second-token"
        path.write_text("second-token\n")
        client.status()
        client.status()
    assert shown == [f"Bearer {which}-token" for which in ("first", "first", "second", "second")]


@pytest.mark.anyio
async def test_a_token_that_changes_later_here_than_at_the_broker_is_waited_for(tmp_path):
    path, accepted = tmp_path / "token", ["first-token"]
    path.write_text("first-token\n")
    transport, shown = broker_with_token(
        accepted, on_call=lambda count: path.write_text("second-token\n") if count == 4 else None
    )
    async with AsyncBrokerClient("http://broker", token=TokenSource(file=path), transport=transport) as client:
        await client.status()
        accepted[0] = "second-token"
        await client.status()
    assert shown == [*["Bearer first-token"] * 4, "Bearer second-token"]


def test_a_token_that_was_never_taken_is_refused_at_once(tmp_path):
    path = tmp_path / "token"
    path.write_text("wrong-token\n")
    transport, shown = broker_with_token(["right-token"])
    with (
        BrokerClient("http://broker", token=TokenSource(file=path), transport=transport) as client,
        pytest.raises(BrokerRefused, match="401"),
    ):
        client.status()
    assert len(shown) == 1


def test_a_token_without_a_file_is_not_tried_again():
    accepted = ["first-token"]
    transport, shown = broker_with_token(accepted)
    with BrokerClient("http://broker", token="first-token", transport=transport) as client:
        client.status()
        accepted[0] = "second-token"
        with pytest.raises(BrokerRefused, match="401"):
            client.status()
    assert len(shown) == 2
