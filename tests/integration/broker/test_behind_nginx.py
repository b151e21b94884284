"""The broker behind nginx as `deploy/nginx/broker.conf` sets it up: a prefix, TLS, tokens, long polls and events."""

import os
import re
import shutil
import ssl
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest

from atropos_api.client import BrokerClient
from atropos_api.testing import make_group, served_broker
from atropos_api.wire import EnvironmentRequest, PolicyUpdate, RunRequest
from example_trainer.processes.ports import free_port

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
CONFIGURATION = Path(__file__).parents[3] / "deploy/nginx/broker.conf"
TOKEN = "a-token-behind-nginx"
RUN = RunRequest(name="proxied", batch_size=4, max_token_length=64, num_steps=3)

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed here; make test-all installs it")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificate")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -keyout broker.key -out broker.crt -subj /CN=localhost"
    subprocess.run(
        [*command.split(), "-addext", "subjectAltName=DNS:localhost"], cwd=folder, check=True, capture_output=True
    )
    return folder


@pytest.fixture
def address(certificate, tmp_path, monkeypatch):
    """The broker's URL behind nginx, in front of a broker with a token."""
    port = free_port()
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "broker.crt"))
    with served_broker(token=TOKEN) as broker:
        server = CONFIGURATION.read_text(encoding="utf-8").replace("listen 443 ssl", f"listen 127.0.0.1:{port} ssl")
        server = server.replace("/etc/nginx/", f"{certificate}/").replace("http://127.0.0.1:8000/", f"{broker}/")
        (tmp_path / "temp").mkdir()
        places = "".join(
            f"{name}_temp_path {tmp_path}/temp/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        (tmp_path / "nginx.conf").write_text(
            f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/error.log; "
            f"{'user root; ' if os.geteuid() == 0 else ''}events {{}} "
            f"http {{ access_log {tmp_path}/access.log; {places}\n{server}\n}}\n",
            encoding="utf-8",
        )
        process = subprocess.Popen([NGINX, "-c", str(tmp_path / "nginx.conf")], stderr=subprocess.PIPE, text=True)
        url = f"https://localhost:{port}/atropos"
        try:
            deadline = time.monotonic() + 20
            while not _answers(url):
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < deadline, (tmp_path / "error.log").read_text()
            yield url
        finally:
            process.terminate()
            process.wait(timeout=20)
            process.stderr.close()


def _answers(url):
    try:
        return httpx.get(f"{url}/livez", verify=ssl.create_default_context()).status_code == 200
    except httpx.TransportError:
        time.sleep(0.05)
        return False


def ask(url, **headers):
    return httpx.get(url, headers=headers, verify=ssl.create_default_context(), timeout=30)


def test_a_run_goes_through_the_proxy_and_its_prefix(address):
    with BrokerClient(address, token=TOKEN) as client:
        run = client.begin_run(RUN)
        environment = EnvironmentRequest(name="env", group_size=4, max_token_length=64)
        ident = client.register_environment(environment).environment_id
        threading.Timer(2.0, client_submits, (address, ident)).start()
        began = time.monotonic()
        batch = client.get_batch(1, run_id=run.run_id, epoch=run.epoch, wait_seconds=20)
        assert 1.5 < time.monotonic() - began < 15, "the long poll did not end when the batch was there"
        assert len(batch.groups) == 1
        client.commit(1, run_id=run.run_id, epoch=run.epoch)
        assert client.status()["counters"]["batches_committed_total"] == 1


def client_submits(address, ident):
    with BrokerClient(address, token=TOKEN) as client:
        client.submit(ident, [make_group(4, 6)], idempotency_key="one")


def test_a_token_is_needed_in_the_header_or_in_the_path_and_none_is_logged(address, tmp_path):
    assert ask(f"{address}/v1/status").status_code == 401
    assert ask(f"{address}/v1/status", Authorization="Bearer wrong-token").status_code == 401
    assert ask(f"{address}/v1/status", Authorization=f"Bearer {TOKEN}").status_code == 200
    assert ask(f"{address}/t/{TOKEN}/v1/status").status_code == 200
    assert ask(f"{address}/metrics", Authorization=f"Bearer {TOKEN}").text.startswith("# HELP atropos_")
    logs = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert TOKEN not in logs


def test_events_arrive_when_they_happen(address):
    with BrokerClient(address, token=TOKEN) as client:
        run = client.begin_run(RUN)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        context = ssl.create_default_context()
        with httpx.stream("GET", f"{address}/v1/events", headers=headers, verify=context, timeout=30) as response:
            lines = response.iter_lines()
            assert next(line for line in lines if line.startswith("event:")) == "event: status"
            for version in (1, 2):
                update = PolicyUpdate(run_id=run.run_id, version=version, step=version, published_at=time.time())
                sent = time.monotonic()
                client.update_policy(update)
                seen = next(line for line in lines if line == "event: policy")
                assert seen
                assert time.monotonic() - sent < 3, "the proxy holds events back"
                next(line for line in lines if line == "event: status")


def test_a_large_body_passes_and_the_pages_of_the_broker_stay_below_the_prefix(address):
    with BrokerClient(address, token=TOKEN) as client:
        client.begin_run(RUN)
        environment = EnvironmentRequest(name="env", group_size=4, max_token_length=0)
        ident = client.register_environment(environment).environment_id
        answer = client.submit(ident, [make_group(4, 200_000)], idempotency_key="large")
        assert answer.accepted == 1
    page = ask(f"{address}/docs", Authorization=f"Bearer {TOKEN}").text
    assert re.findall(r'(?:src|href)="(/[^"]*)"', page) == [], "a link to the root would miss the prefix"
