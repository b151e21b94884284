"""The broker counts a step that moved no weights: the version keeps its own step, the run goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from atropos_api.client import BrokerClient
from atropos_api.client.errors import BrokerRefused
from atropos_api.testing import served_broker
from atropos_api.wire import PolicyUpdate, RunRequest


@pytest.fixture
def client() -> Iterator[BrokerClient]:
    with served_broker() as url, BrokerClient(url) as client:
        yield client


def announce(client: BrokerClient, run_id: str, *, version: int, step: int) -> tuple[int, int]:
    client.update_policy(PolicyUpdate(run_id=run_id, version=version, step=step, published_at=time.time()))
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
