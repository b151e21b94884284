"""Atropos' published SDK on the same environment as `ours_driver.py`; runs in an environment of its own.

Run by `sdk_cost.py`; takes one JSON object of settings as its argument.
"""

# ruff: noqa: ANN001, ANN002, ANN003, ANN201, ANN202 # the reference's own types are not known here

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
import uuid

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup  # type: ignore[import-not-found]


class CostEnv(BaseEnv):
    """One question; an answer is worth the number of its characters, modulo 7."""

    name = "cost"

    async def setup(self):
        """Do nothing: there is nothing to load."""

    async def get_next_item(self):
        return "How many characters does a good answer have? " * 4

    async def collect_trajectories(self, item):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            answer = await managed.chat_completion(
                messages=[{"role": "user", "content": item}], n=self.config.group_size, max_tokens=64, temperature=1.0
            )
            scores = [float(len(choice.message.content) % 7) for choice in answer.choices]
            nodes = managed.get_state()["nodes"]
            group = ScoredDataGroup(
                tokens=[node.tokens for node in nodes],
                masks=[node.masked_tokens for node in nodes],
                inference_logprobs=[node.logprobs for node in nodes],
                scores=scores,
            )
            return group, []

    async def evaluate(self, *_, **__):
        """Do nothing: evaluations are not measured."""


async def measure(settings):
    url, workers, groups = settings["url"], settings["workers"], settings["groups"]
    config = BaseEnvConfig(
        group_size=8,
        tokenizer_name=settings["tokenizer"],
        rollout_server_url=url,
        use_wandb=False,
        ensure_scores_are_not_same=False,
        max_token_length=2048,
    )
    server = APIServerConfig(
        server_type="vllm", base_url=f"{url}/v1", api_key="x", model_name="m", tokenizer_name=settings["tokenizer"]
    )
    env = CostEnv(config, [server], slurm=False, testing=False)
    env.max_token_len = 2048
    env.env_id = 0
    left = sent = 0

    async def work():
        nonlocal left, sent
        while left > 0:
            left -= 1
            key = str(uuid.uuid4())
            env.running_items[key] = {"item": await env.get_next_item()}
            group = await env.handle_env(key)
            sent += group is not None

    async def collect(count):
        nonlocal left
        left = count
        await asyncio.gather(*(work() for _ in range(workers)))

    await collect(2 * workers)
    started = time.process_time()
    await collect(groups)
    spent = time.process_time() - started
    assert sent == groups + 2 * workers, sent
    return spent / groups


if __name__ == "__main__":
    logging.disable(logging.INFO)
    print(asyncio.run(measure(json.loads(sys.argv[1]))))
