"""The metrics of an environment server tell what it does, also while its event loop works."""

import contextlib

import anyio
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from atropos_api.common.prometheus import MetricsEndpoint
from atropos_api.testing import memory_broker
from environments.sdk.runtime.metrics import METRICS, PREFIX
from environments.sdk.runtime.worker import EnvironmentWorker

from .test_serve import ArithmeticEnv, make_env, make_fake, train

pytestmark = pytest.mark.anyio


class Fallible(ArithmeticEnv):
    """Each fifth item fails at its first attempt, each third has only equal scores."""

    count = 0

    async def collect_trajectories(self, item):
        self.count += 1
        if self.count % 5 == 0:
            raise RuntimeError("planted")
        group, more = await super().collect_trajectories(item)
        same = self.count % 3 == 0
        return {**group, "scores": [1.0 if same else float(index) for index in range(len(group["scores"]))]}, more


async def test_what_an_environment_does_is_counted(tokenizer_folder):
    fake = make_fake()
    env = make_env(fake, tokenizer_folder, cls=Fallible, ensure_scores_are_not_same=True, eval_at_end=True)
    _, client = memory_broker()
    worker = EnvironmentWorker(env, client)
    with contextlib.closing(MetricsEndpoint(worker.metrics.collect, host="127.0.0.1", port=0)) as endpoint:
        async with client, httpx.AsyncClient() as http, anyio.create_task_group() as group:
            with anyio.fail_after(30):
                group.start_soon(lambda: train(client, fake=fake, steps=4, batch_size=32))
                await worker.serve()
                text = (await http.get(f"http://127.0.0.1:{endpoint.port}/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    values = {name.removeprefix(PREFIX): family.samples[0].value for name, family in families.items() if family.samples}
    assert {f"{PREFIX}{metric.name.removesuffix('_total')}" for metric in METRICS} <= set(families)
    assert values["groups_sent"] >= 16
    assert values["retries"] >= 3
    assert values["step"] == 4
    assert values["policy_version"] == 5
    assert (values["servers_up"], values["requests_in_flight"], values["rollouts_in_progress"]) == (1, 0, 0)
    assert values["sampled_tokens"] > 16 * 8
    (dropped,) = families[f"{PREFIX}groups_dropped"].samples
    assert dropped.labels == {"reason": "equal-scores"}
    assert dropped.value >= 5
    rollouts = {
        (s.name, s.labels["outcome"], s.labels.get("le")): s.value for s in families[f"{PREFIX}rollout_seconds"].samples
    }
    counted = rollouts[f"{PREFIX}rollout_seconds_count", "succeeded", None]
    assert counted == rollouts[f"{PREFIX}rollout_seconds_bucket", "succeeded", "+Inf"] >= values["groups_sent"]
    assert rollouts[f"{PREFIX}rollout_seconds_count", "failed", None] == 0
    evaluated = {sample.labels["metric"] for sample in families[f"{PREFIX}evaluation"].samples}
    assert "eval/accuracy" in evaluated
