"""Measures the cost of a straggler under the three rules for late rollouts, and how much shorter trained rollouts are.

    python -m benchmarks.stragglers [--steps 20]

A real worker and a real broker in this process; a trainer that takes a batch of 64 as soon as there is one, and
rollouts that take the time of their length: lognormal, 40 ms in the middle, 0.5 the deviation of the logarithm, a token
a millisecond. With a straggler one of the 8 rollouts of each group takes 50 times as long. It prints the steps per
second, as a share of those without a straggler, and the mean length of the trained rollouts, as a share of all lengths.
Expected: `wait` loses almost all speed, and `close` keeps at least 0.9 of it.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, get_args

import anyio

from atropos_api.client import AsyncBrokerClient
from atropos_api.testing import memory_broker
from atropos_api.wire import PolicyUpdate, RunRequest
from environments.arithmetic_server import ArithmeticEnv, ArithmeticEnvConfig
from environments.sdk.config import APIServerConfig, BaseEnvConfig, LateMembers
from environments.sdk.groups import Item, ScoredDataItem
from environments.sdk.runtime.worker import EnvironmentWorker
from example_trainer.group_sequences import leave_out_absent
from example_trainer.tiny.tokenizer import save_tokenizer

GROUP_SIZE, BATCH_SIZE = 8, 64
MIDDLE_TOKENS, DEVIATION, TOKEN_SECONDS = 40, 0.5, 0.001
SLOWER = 50


class TimedRollouts(ArithmeticEnv):
    """An environment whose rollouts last as long as their lengths say, without any server."""

    straggler = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.lengths: list[int] = []
        self._rng = random.Random(0)

    async def check_servers(self) -> None:
        """Check nothing: there are no servers."""

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem | None, list[Item]]:  # noqa: ARG002
        length = max(1, round(self._rng.lognormvariate(math.log(MIDDLE_TOKENS), DEVIATION)))
        self.lengths.append(length)
        slower = SLOWER if self.straggler and len(self.lengths) % GROUP_SIZE == 0 else 1
        await anyio.sleep(length * TOKEN_SECONDS * slower)
        return ScoredDataItem(
            tokens=[5] * (length + 1),
            masks=[-100] + [5] * length,
            scores=self._rng.random(),
            inference_logprobs=[1.0] + [-0.5] * length,
            policy_versions=[(1, length + 1, 1)],
            generation_params={"temperature": 1.0},
        ), []

    async def collect_trajectories(self, item: Item) -> Any:
        return await super(ArithmeticEnv, self).collect_trajectories(item)


async def train(client: AsyncBrokerClient, steps: int, warm_up: int) -> tuple[float, list[int]]:
    """Take all batches; return the steps per second after the first ones, and the lengths of the trained rollouts."""
    request = RunRequest(name="run", batch_size=BATCH_SIZE, max_token_length=4096, num_steps=steps)
    run = await client.begin_run(request)
    update = PolicyUpdate(run_id=run.run_id, version=1, step=0, published_at=time.time(), epoch=run.epoch)
    await client.update_policy(update)
    lengths: list[int] = []
    started = time.monotonic()
    for number in range(1, steps + 1):
        batch = None
        while batch is None:
            batch = await client.get_batch(number, run_id=run.run_id, epoch=run.epoch, wait_seconds=5)
        for group in leave_out_absent(batch)[0].groups:
            lengths += [len(tokens) - 1 for tokens in group.tokens]
        await client.commit(number, run_id=run.run_id, epoch=run.epoch)
        if number == warm_up:
            started = time.monotonic()
    seconds = time.monotonic() - started
    await client.finish_run(run.run_id, epoch=run.epoch)
    return (steps - warm_up) / seconds, lengths


async def measure(
    tokenizer: Path, late: LateMembers, factor: float, steps: int, *, straggler: bool
) -> tuple[float, float]:
    """Return the steps per second, and the mean trained length as a share of the mean of all lengths."""
    config = ArithmeticEnvConfig(
        group_size=GROUP_SIZE,
        max_num_workers=16,
        use_wandb=False,
        tokenizer_name=str(tokenizer),
        late_members=late,
        late_factor=factor,
        drain_seconds=0,
    )
    env = TimedRollouts(config, APIServerConfig(server_type="vllm"))
    env.straggler = straggler
    _, client = memory_broker()
    found: list[tuple[float, list[int]]] = []

    async def run_trainer() -> None:
        found.append(await train(client, steps, warm_up=2))

    async with client, anyio.create_task_group() as tasks:
        tasks.start_soon(run_trainer)
        await EnvironmentWorker(env, client).serve()
    ((rate, lengths),) = found
    return rate, statistics.fmean(lengths) / statistics.fmean(env.lengths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--factor", type=float, default=BaseEnvConfig().late_factor)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(Path(folder))
        quiet = 0.0
        print(f"{'rule':8} {'straggler':10} {'steps/s':>8} {'share':>6} {'length':>7}")
        for straggler in (False, True):
            for late in get_args(LateMembers):
                rate, length = anyio.run(
                    functools.partial(measure, Path(folder), late, options.factor, options.steps, straggler=straggler)
                )
                quiet = quiet or rate
                print(f"{late:8} {'yes' if straggler else 'no':10} {rate:8.2f} {rate / quiet:6.2f} {length:7.3f}")


if __name__ == "__main__":
    main()
