"""Measures the cost of an idle environment server: it serves a real broker whose run takes no more groups.

Run by `sdk_cost.py`; takes one JSON object of settings as its argument and prints CPU seconds per second.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import anyio
from ours_driver import CostEnv

from atropos_api.client import AsyncBrokerClient
from atropos_api.testing import served_broker
from atropos_api.wire.messages import RunRequest
from environments.sdk import APIServerConfig, BaseEnvConfig
from environments.sdk.runtime.cli import collect_rarely
from environments.sdk.runtime.worker import EnvironmentWorker

WARM_SECONDS = 2.0


async def measure(settings: dict[str, Any]) -> float:
    """Return CPU seconds of this thread alone, without the broker's."""
    config = BaseEnvConfig(
        group_size=8,
        tokenizer_name=settings["tokenizer"],
        rollout_server_url=settings["broker"],
        use_wandb=False,
        ensure_scores_are_not_same=False,
    )
    env = CostEnv(config, APIServerConfig(server_type="vllm", base_url=f"{settings['url']}/v1"))
    async with AsyncBrokerClient(settings["broker"]) as client, anyio.create_task_group() as group:
        await client.begin_run(RunRequest(name="idle", batch_size=8, num_steps=1000, max_token_length=2048))
        group.start_soon(EnvironmentWorker(env, client).serve)
        await anyio.sleep(WARM_SECONDS)
        assert env.metrics.sent > 0, "the queue was never filled"
        sent, started = env.metrics.sent, time.thread_time()
        await anyio.sleep(settings["seconds"])
        spent = time.thread_time() - started
        assert env.metrics.sent == sent, "there was room for more"
        group.cancel_scope.cancel()
    await env.aclose()
    return spent / float(settings["seconds"])


if __name__ == "__main__":
    collect_rarely()
    with served_broker() as broker:
        settings = json.loads(sys.argv[1]) | {"broker": broker}
        print(anyio.run(measure, settings, backend_options={"use_uvloop": True}))
