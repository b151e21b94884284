"""An environment's `cleanup` runs to its end, and does not keep the environment from its own."""

import anyio
import pytest

from environments.sdk.base_env import BaseEnv
from environments.sdk.config import BaseEnvConfig, ServerBaseline
from environments.sdk.groups import GroupRules
from environments.sdk.rehearsal import Rehearsal
from environments.sdk.runtime import rollouts
from environments.sdk.runtime.delivery import Delivery
from environments.sdk.runtime.rollouts import DrawnItem, RolloutRunner

pytestmark = pytest.mark.anyio


class Slow(BaseEnv):
    name = "slow"
    cleanup_seconds = 0.1
    collects = False
    """True if the cancellation is to come while it collects; else it comes during the cleanup."""

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(group_size=2), ServerBaseline(server_type="vllm")

    async def setup(self):
        self.waits, self.cleaned = anyio.Event(), False

    async def get_next_item(self):
        return 1

    async def collect_trajectories(self, item):
        if self.collects:
            self.waits.set()
            await anyio.sleep_forever()
        return None, []

    async def cleanup(self):
        self.waits.set()
        await anyio.sleep(self.cleanup_seconds)
        self.cleaned = True


async def run_of(env, *, cancel):
    def rules():
        return GroupRules(group_size=2, max_token_length=0, ensure_scores_are_not_same=False)

    await env.setup()
    async with anyio.create_task_group() as tasks:
        runner = RolloutRunner(env, Delivery(env, rules, lambda *_: None))
        tasks.start_soon(runner.collect, DrawnItem(1))
        if cancel:
            await env.waits.wait()
            tasks.cancel_scope.cancel()


@pytest.mark.parametrize("collects", [True, False])
async def test_a_cleanup_that_does_not_end_keeps_no_environment_from_its_end(tmp_path, monkeypatch, caplog, collects):
    monkeypatch.setattr(rollouts, "CLEANUP_SECONDS", 0.05)
    async with Rehearsal(Slow, [1], tmp_path) as rehearsal:
        env = rehearsal.env
        env.collects, env.cleanup_seconds = collects, 3
        await run_of(env, cancel=True)
    assert not env.cleaned
    assert "cleanup is cut off 0.05 s after the cancellation of its rollout, of item 1" in caplog.text


async def test_a_cleanup_has_no_limit_while_its_rollout_is_not_cancelled(tmp_path, monkeypatch):
    monkeypatch.setattr(rollouts, "CLEANUP_SECONDS", 0.01)
    async with Rehearsal(Slow, [1], tmp_path) as rehearsal:
        await run_of(rehearsal.env, cancel=False)
    assert rehearsal.env.cleaned
