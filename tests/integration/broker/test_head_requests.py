"""HEAD requests, which load balancers and `curl -I` send, over a real socket."""

import httpx
import msgspec
import pytest

from atropos_api.http.auth import NO_HEADS
from atropos_api.routes.schema import operations_of
from atropos_api.testing import make_group, make_memory_app, serve_in_thread, served_broker

GETS = [one.path for one in operations_of(make_memory_app().routes) if one.method == "GET" and "{" not in one.path]
UNSAFE = [path for path in GETS if NO_HEADS.fullmatch(path)]
OWN_LENGTH = {"/metrics", "/v1/status"}
"""Paths whose text may be longer the next time."""

REGISTRATION = {
    "wandb_group": "group",
    "wandb_project": "project",
    "batch_size": 4,
    "max_token_len": 64,
    "checkpoint_dir": "checkpoints",
    "save_checkpoint_interval": 1,
    "starting_step": 0,
    "num_steps": 9,
}


@pytest.fixture(scope="module")
def client():
    with serve_in_thread(make_memory_app()) as url, httpx.Client(base_url=url, timeout=10) as client:
        yield client


@pytest.mark.parametrize("path", sorted({*GETS} - {*UNSAFE}))
def test_a_head_request_is_answered_as_a_get_without_its_body(client, path):
    """`/v1/events` never ends and the others have a body: a byte of one would spoil the connection's next answer."""
    head = client.head(path)
    with client.stream("GET", path) as get:
        assert head.status_code == get.status_code != 405
        assert head.headers.get("content-type") == get.headers.get("content-type")
        if path not in OWN_LENGTH:
            assert head.headers.get("content-length") == get.headers.get("content-length")
    assert client.get("/livez").json() == {"status": "ok"}


@pytest.mark.parametrize("prefix", ["", "/t/a-secret-token"])
def test_a_head_request_takes_no_batch_ends_no_run_and_makes_no_backup(prefix):
    with (
        served_broker(token="a-secret-token" if prefix else None) as url,
        httpx.Client(base_url=url + prefix) as client,
    ):
        client.post("/register", json=REGISTRATION).raise_for_status()
        client.post("/scored_data", content=msgspec.json.encode(make_group(4))).raise_for_status()
        for path in (*UNSAFE, "/v1/batches/1"):
            assert client.head(path).status_code == 405, path
        assert client.get("/batch").json()["batch"]
