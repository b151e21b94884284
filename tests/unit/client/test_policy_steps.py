"""The announcement of a publish carries the step its weights come from, and the model name to request."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest

from atropos_api.client import BrokerClient
from atropos_api.client.calls import BrokerRefused
from atropos_api.testing import served_broker
from atropos_api.wire import EnvironmentRequest, PolicyUpdate, RunRequest


@pytest.fixture
def client() -> Iterator[BrokerClient]:
    with served_broker() as url, BrokerClient(url) as client:
        yield client


def announce(client: BrokerClient, run_id: str, *, version: int, step: int, name: str | None = None) -> tuple[int, int]:
    update = PolicyUpdate(run_id=run_id, version=version, step=step, published_at=time.time(), policy_name=name)
    client.update_policy(update)
    run = client.status()["run"]
    return run["policy_version"], run["policy_step"]


def test_a_version_may_stand_for_later_steps_but_never_for_an_earlier_one(client: BrokerClient) -> None:
    run_id = client.begin_run(RunRequest(name="r", batch_size=4, max_token_length=64, num_steps=9)).run_id
    assert announce(client, run_id, version=1, step=0) == (1, 0)
    assert announce(client, run_id, version=1, step=1) == (1, 1)
    assert announce(client, run_id, version=1, step=0) == (1, 1)
    assert announce(client, run_id, version=4, step=2) == (4, 2)
    with pytest.raises(BrokerRefused, match="never used"):
        announce(client, run_id, version=3, step=3)


def test_r23_environments_old_and_new_are_told_the_name_of_a_policy_that_has_one(client: BrokerClient) -> None:
    run_id = client.begin_run(RunRequest(name="r", batch_size=4, max_token_length=64, num_steps=9)).run_id
    known = client.register_environment(EnvironmentRequest(name="e", group_size=4, max_token_length=64))
    for version, name in ((1, None), (2, "policy-v2"), (3, "policy-v3"), (4, None)):
        announce(client, run_id, version=version, step=version - 1, name=name)
        assert client.heartbeat(known.environment_id).policy_name == name
        assert httpx.get(f"{client.url}/info").json().get("policy_name") == name
