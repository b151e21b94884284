"""A sequence sampled under two versions reaches the trainer through session and broker with both."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from atropos_api.client import BrokerClient
from atropos_api.testing import served_broker
from atropos_api.wire.groups import Group
from atropos_api.wire.messages import EnvironmentRequest, PolicyUpdate, RunRequest
from environments.sdk.config import APIServerConfig
from environments.sdk.groups import scored_group
from environments.sdk.inference.vllm import VllmServer
from environments.sdk.session.session import ManagedSession
from example_trainer.data import DataSettings, prepare_batch
from example_trainer.objective.advantages import AdvantageSettings
from example_trainer.objective.metrics import staleness_metrics, token_ages

pytestmark = pytest.mark.vllm

PROMPT = [5, 6, 7, 8]
OUTPUT_TOKENS = 1200


async def sample(url, tokenizer):
    server = VllmServer(APIServerConfig(server_type="vllm", base_url=f"{url}/v1"))
    session = ManagedSession(server, tokenizer)
    await session.completion(input_ids=PROMPT, n=2, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    await server.channel.aclose()
    return session.get_state()["nodes"]


@pytest.fixture(scope="module")
def crossing(shared_server, wait_until):
    """Two sequences of one request, during which a publish came, in an environment's form."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared_server.model)
    old = shared_server.version
    nodes = []
    asking = threading.Thread(target=lambda: nodes.extend(asyncio.run(sample(shared_server.url, tokenizer))))
    asking.start()
    wait_until(lambda: shared_server.debug()["requests_inside"] == 1)
    new = shared_server.publish(in_flight="recompute")["version"]
    asking.join(60)
    return Group(**scored_group(nodes, [1.0, 0.0])), old, new


@pytest.mark.parametrize("form", ["json", "columns"])
def test_each_token_keeps_its_version_into_masks_metrics_and_the_brokers_budget(crossing, form):
    """Half of a sequence's tokens are one step older than the other half."""
    group, old, new = crossing
    with served_broker() as url, BrokerClient(url, form=form) as client:
        request = RunRequest(name="r", batch_size=2, max_token_length=2048, num_steps=9, max_staleness=3)
        run = client.begin_run(request)
        for version, step in ((old, 4), (new, 5)):
            published(client, run, version, step)
        environment = client.register_environment(EnvironmentRequest(name="e", group_size=2, max_token_length=2048))
        client.submit(environment.environment_id, [group], idempotency_key="one")
        batch = client.get_batch(run.next_batch, run_id=run.run_id, epoch=run.epoch)
        check_trained(batch, group, old, new)

        client.commit(run.next_batch, run_id=run.run_id, epoch=run.epoch)
        client.submit(environment.environment_id, [group], idempotency_key="two")
        published(client, run, new + 1, 8)
        assert client.get_batch(run.next_batch + 1, run_id=run.run_id, epoch=run.epoch, wait_seconds=0.2) is None
        assert client.status()["counters"]["groups_expired_total"] == 1, "its oldest token is four steps old"


def published(client, run, version, step):
    update = PolicyUpdate(run_id=run.run_id, version=version, step=step, published_at=time.time(), epoch=run.epoch)
    client.update_policy(update)


def check_trained(batch, group, old, new):
    (carried,) = batch.groups
    assert carried.policy_versions == group.policy_versions
    settings = DataSettings(max_tokens=2048, advantages=AdvantageSettings(norm="none"))
    targets = prepare_batch(batch, settings).targets
    expected = [
        [version for start, end, version in spans for _ in range(start, end)] for spans in group.policy_versions
    ]
    assert all(set(versions) == {old, new} for versions in expected)
    assert all(len(versions) == OUTPUT_TOKENS for versions in expected), "exactly the trained tokens"
    flat = [version for versions in expected for version in versions]
    assert targets.versions.tolist() == targets.version_bounds.tolist() == flat
    found = staleness_metrics(token_ages(targets.version_bounds, {old: 4, new: 5}, 5))
    assert found["staleness/max"] == 1.0
    assert found["staleness/mean"] == pytest.approx(flat.count(old) / len(flat))
    assert found["staleness/age_unknown"] == 0.0
