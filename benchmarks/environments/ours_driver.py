"""Our SDK on the environment of `sdk_cost.py`: collects, checks and sends groups, and prints its CPU seconds a group.

Run by `sdk_cost.py`; takes one JSON object of settings as its argument.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import anyio

from atropos_api.client import AsyncBrokerClient
from atropos_api.wire.messages import EnvironmentInfo, EnvironmentRequest, Pacing
from environments.sdk import APIServerConfig, BaseEnv, BaseEnvConfig, scored_group
from environments.sdk.groups import GroupRules
from environments.sdk.runtime.broker_session import BrokerConnection
from environments.sdk.runtime.cli import collect_rarely
from environments.sdk.runtime.delivery import Delivery
from environments.sdk.runtime.rollouts import RolloutRunner


class CostEnv(BaseEnv):
    """One question; an answer is worth the number of its characters, modulo 7."""

    name = "cost"

    async def setup(self) -> None:
        """Do nothing: there is nothing to load."""

    async def get_next_item(self) -> str:
        return "How many characters does a good answer have? " * 4

    async def collect_trajectories(self, item: str) -> tuple[Any, list[Any]]:
        async with self.server.managed_server() as session:
            answer = await session.chat_completion(
                messages=[{"role": "user", "content": item}], n=self.config.group_size, max_tokens=64, temperature=1.0
            )
            scores = [float(len(choice.message.content) % 7) for choice in answer.choices]
            return scored_group(session.nodes, scores), []

    async def evaluate(self, *_: Any, **__: Any) -> None:
        """Do nothing: evaluations are not measured."""


async def measure(settings: dict[str, Any]) -> float:
    url, workers, groups = settings["url"], settings["workers"], settings["groups"]
    config = BaseEnvConfig(
        group_size=8,
        tokenizer_name=settings["tokenizer"],
        rollout_server_url=url,
        use_wandb=False,
        ensure_scores_are_not_same=False,
    )
    env = CostEnv(config, APIServerConfig(server_type="vllm", base_url=f"{url}{settings['prefix']}/v1"))
    rules = GroupRules(group_size=8, max_token_length=2048, ensure_scores_are_not_same=False)
    async with AsyncBrokerClient(url) as client:
        link = make_link(client)
        collector = RolloutRunner(env, Delivery(env, lambda: rules, link.hand_in))
        left = 0

        async def work() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await collector.collect(await collector.next_item())

        async def collect(count: int) -> None:
            nonlocal left
            left = count
            async with anyio.create_task_group() as rollouts:
                for _ in range(workers):
                    rollouts.start_soon(work)
            await link.flush()

        async with anyio.create_task_group() as background:
            background.start_soon(link.keep_submitting)
            await collect(2 * workers)
            started = time.process_time()
            await collect(groups)
            spent = time.process_time() - started
            background.cancel_scope.cancel()
    assert env.metrics.sent == groups + 2 * workers
    await env.server.aclose()
    return spent / groups


def make_link(client: AsyncBrokerClient) -> BrokerConnection:
    request = EnvironmentRequest(name="cost", group_size=8, max_token_length=2048)
    link = BrokerConnection(client, request, wait_timeout_seconds=60)
    pacing = Pacing(
        state="run",
        revision=1,
        current_step=0,
        num_steps=1,
        batch_size=8,
        outstanding_sequences=0,
        room_sequences=1 << 30,
        policy_version=1,
        policy_step=0,
    )
    link.info = EnvironmentInfo(
        environment_id=1,
        display_name="cost",
        pacing=pacing,
        run_id="cost",
        batch_size=8,
        max_token_length=2048,
        num_steps=1,
        checkpoint_dir="",
        checkpoint_interval=0,
        wandb_project="",
        wandb_group="",
    )
    return link


if __name__ == "__main__":
    collect_rarely()  # as the command line of an environment does
    print(anyio.run(measure, json.loads(sys.argv[1]), backend_options={"use_uvloop": True}))
