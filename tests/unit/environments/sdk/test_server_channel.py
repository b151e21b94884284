"""The server channel waits out an outage with one probe, and reports mistakes at once."""

import socket
import time

import anyio
import pytest

from environments.sdk.config import APIServerConfig
from environments.sdk.errors import InferenceHostUnknown, InferenceRefused, InferenceUnavailable
from environments.sdk.inference.http_transport import Response
from environments.sdk.inference.retries import ServerChannel

pytestmark = pytest.mark.anyio

URL = "http://server/generate"


class Scripted:
    """A transport that gives the outcomes of a list, then always a success."""

    def __init__(self, *outcomes, seconds=0.0):
        self.outcomes = list(outcomes)
        self.asked = 0
        self.at_once = 0
        self.most_at_once = 0
        self.seconds = seconds

    async def request(self, method, url, body):
        self.asked += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await anyio.sleep(self.seconds)
            outcome = self.outcomes.pop(0) if self.outcomes else Response(200, b"{}")
            if isinstance(outcome, OSError):
                raise outcome
            return outcome
        finally:
            self.at_once -= 1

    async def aclose(self):
        pass


def channel(transport, *, wait=5.0, **config):
    return ServerChannel(APIServerConfig(**config), wait_timeout_seconds=wait, transport=transport)


@pytest.mark.parametrize(
    "outage",
    [ConnectionRefusedError("refused"), Response(503, b'{"type": "urn:atropos:problem:paused"}'), Response(502, b"")],
)
async def test_an_outage_is_waited_out(outage):
    transport = Scripted(outage, outage)
    assert await channel(transport).post(URL, b"{}", "train") == b"{}"
    assert transport.asked == 3


async def test_during_an_outage_only_one_request_probes():
    transport = Scripted(*[ConnectionRefusedError("refused")] * 10_000)
    line = channel(transport)
    async with anyio.create_task_group() as group:
        for _ in range(50):
            group.start_soon(line.post, URL, b"{}", "train")
        await anyio.sleep(0.6)
        during = transport.asked
        transport.outcomes.clear()
    # All fifty saw the failure once, one went on asking (three times on an idle machine), then each asked once more.
    assert 50 < during < 70
    assert transport.asked <= during + 50


async def test_waiting_has_an_end_that_names_the_server():
    transport = Scripted(*[ConnectionRefusedError("refused")] * 99)
    with pytest.raises(InferenceUnavailable, match=r"no inference server answers at .*--openai\.base_url"):
        await channel(transport, wait=0.3).post(URL, b"{}", "train")


async def test_a_refusal_is_reported_at_once_with_the_servers_words():
    transport = Scripted(Response(422, b'{"detail": "unknown field temprature"}'))
    with pytest.raises(InferenceRefused, match="unknown field temprature"):
        await channel(transport).post(URL, b"{}", "train")
    assert transport.asked == 1


async def test_a_server_error_that_comes_again_is_about_the_request():
    transport = Scripted(*[Response(500, b"boom")] * 9)
    with pytest.raises(InferenceRefused, match="boom"):
        await channel(transport).post(URL, b"{}", "train")
    assert transport.asked == 3


@pytest.mark.usefixtures("no_such_name")
async def test_a_mistyped_host_is_reported_at_once():
    """R33: there is no wait for a name that does not resolve."""
    started = time.monotonic()
    line = ServerChannel(APIServerConfig(base_url="http://no-such-host.invalid:9001/v1"), wait_timeout_seconds=60)
    with pytest.raises(InferenceHostUnknown, match=r"no-such-host\.invalid"):
        await line.post("http://no-such-host.invalid:9001/generate", b"{}", "train")
    await line.aclose()
    assert time.monotonic() - started < 30


async def test_a_name_server_that_fails_while_a_run_is_in_progress_is_an_outage():
    lost = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    transport = Scripted(Response(200, b"1"), lost, lost, Response(200, b"2"))
    line = ServerChannel(
        APIServerConfig(base_url="http://of-a-pod.test:9001/v1"), wait_timeout_seconds=60, transport=transport
    )
    assert await line.post("http://of-a-pod.test:9001/generate", b"{}", "train") == b"1"
    assert await line.post("http://of-a-pod.test:9001/generate", b"{}", "train") == b"2"


@pytest.mark.parametrize(("value", "logged"), [("1", True), ("0", False), (None, False)])
async def test_each_attempt_of_a_request_is_logged_if_atropos_variable_asks_for_it(value, logged, caplog, monkeypatch):
    monkeypatch.delenv("ATROPOS_DEBUG_REQUESTS", raising=False)
    if value is not None:
        monkeypatch.setenv("ATROPOS_DEBUG_REQUESTS", value)
    with caplog.at_level("INFO"):
        line = channel(Scripted(Response(503, b"")), api_key="s3cret-key")
        await line.post(URL, b'{"prompt": {"prompt_token_ids": [5, 7]}}', "train")
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("request ")]
    assert lines == [f'request POST {URL} {{"prompt": {{"prompt_token_ids": [5, 7]}}}}'] * (2 if logged else 0)
    assert "s3cret-key" not in caplog.text


async def test_evaluation_has_its_own_limit():
    transport = Scripted(seconds=0.02)
    line = channel(transport, num_max_requests_at_once=3, num_requests_for_eval=2)
    async with anyio.create_task_group() as group:
        for split in ("train", "eval"):
            for _ in range(10):
                group.start_soon(line.post, URL, b"{}", split)
    assert transport.most_at_once == 5
    assert [limit.used for limit in line.limits.values()] == [0, 0]


async def test_a_cancelled_probe_leaves_the_others_a_way_on():
    transport = Scripted(*[ConnectionRefusedError("refused")] * 6)
    line = channel(transport)
    done = []

    async def post():
        done.append(await line.post(URL, b"{}", "train"))

    async with anyio.create_task_group() as group:
        with anyio.move_on_after(0.05):
            await line.post(URL, b"{}", "train")
        group.start_soon(post)
        group.start_soon(post)
    assert len(done) == 2
