"""Two trainer processes publish their shards to the real vLLM from memory: both servers change, or neither."""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from example_trainer.distributed.rank0_proxy import CollectiveWeightSource, RankedBridge
from example_trainer.distributed.ranks import joined_ranks
from example_trainer.modeling.loading import policy_options
from example_trainer.processes.ports import free_port
from example_trainer.weights.broadcast import BroadcastBridge
from example_trainer.weights.testing import config_of

pytestmark = pytest.mark.vllm

FORKS = multiprocessing.get_context("forkserver")
BUCKET = 1 << 14
"""Bucket size in bytes: the tiny model takes several, so that a publish can break off between two."""


def rank_main(rank: int, meeting: str, model: str, urls: list[str], tensor_parallel: int, orders: Any, told: Any):
    """Run one rank, which publishes, changes its weights or kills itself on command."""
    torch.set_num_threads(1)
    config = config_of(
        urls[0],
        model,
        dtype="float32",
        device="cpu",
        world_size=2,
        trainer_tensor_parallel_size=tensor_parallel,
        num_inference_nodes=len(urls),
        inference_urls=urls,
        bridge_token="known",
        wait_timeout=120,
        drain_seconds=0,
    )
    group = partial(
        joined_ranks,
        rank,
        2,
        f"file://{meeting}",
        device="cpu",
        timeout_seconds=120,
        tensor_parallel_size=tensor_parallel,
    )
    with group() as ranks:
        source = partial(CollectiveWeightSource, ranks, limit_bytes=BUCKET)
        inner = BroadcastBridge(config, source, lease_seconds=5) if rank == 0 else None
        bridge = RankedBridge(inner, policy_options(config), ranks, by_bucket=True)
        policy = bridge.prepare()
        if bridge._source is not None:
            bridge._source = type(bridge._source)(policy, limit_bytes=BUCKET)
        told.put((rank, "ready"))
        while (order := orders.get()) is not None:
            told.put((rank, carry_out(order, bridge, policy)))
        bridge.close()


def carry_out(order: tuple[str, int], bridge: RankedBridge, policy: Any) -> Any:
    kind, number = order
    if kind == "shift":
        with torch.no_grad():
            for master in policy.masters.values():
                master.mul_(1 + number / 100)
        return None
    if kind == "dies in":
        gathered = []
        whole = type(policy).whole_weight

        def dying(self: Any, *arguments: Any, **settings: Any) -> Any:
            gathered.append(1)
            if len(gathered) > 3:
                os._exit(7)
            return whole(self, *arguments, **settings)

        type(policy).whole_weight = dying  # type: ignore[method-assign]
    try:
        report = bridge.publish(number)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return report.version


class TwoRanks:
    """Two processes that take commands."""

    def __init__(self, meeting: Any, model: Any, urls: list[str], tensor_parallel: int) -> None:
        self.told = FORKS.Queue()
        self.orders = [FORKS.Queue(), FORKS.Queue()]
        self.processes = [
            FORKS.Process(
                target=rank_main, args=(rank, str(meeting), str(model), urls, tensor_parallel, orders, self.told)
            )
            for rank, orders in enumerate(self.orders)
        ]
        for process in self.processes:
            process.start()
        assert self.answers() == {0: "ready", 1: "ready"}

    def answers(self, count: int = 2) -> dict[int, Any]:
        return dict(self.told.get(timeout=150) for _ in range(count))

    def order(self, first: Any, second: Any = None) -> None:
        self.orders[0].put(first)
        self.orders[1].put(second or first)

    def both(self, *order: Any) -> dict[int, Any]:
        self.order(order)
        return self.answers()

    def end(self) -> None:
        for orders in self.orders:
            orders.put(None)
        for process in self.processes:
            process.join(20)
            process.kill()


@pytest.fixture(scope="module")
def servers(start_server):
    ports = [free_port(), free_port()]
    with ThreadPoolExecutor(2) as pool:
        start = partial(start_server, "--await-policy", environ={"ATROPOS_BRIDGE_TOKEN": "known"})
        return list(pool.map(lambda port: start(port=port), ports))


@pytest.fixture
def ranks(servers, tmp_path, request):
    urls, tensor_parallel = [server.url for server in servers], request.param
    made = TwoRanks(tmp_path / "meeting", servers[0].model, urls, tensor_parallel)
    yield made
    made.end()


def greedy(server, version):
    """Return the server's greedy tokens and their logprobs, all of this version."""
    answer = server.post(
        "/generate",
        {
            "prompt": {"prompt_token_ids": [5, 6, 7]},
            "max_tokens": 16,
            "temperature": 0.0,
            "logprobs": 0,
            "compact": True,
        },
    ).json()
    assert {span[2] for spans in answer["policy_versions"] for span in spans} == {version}
    return answer["token_ids"], answer["logprobs"]


@pytest.mark.parametrize("ranks", [1, 2], indirect=True, ids=["rows", "layers"])
def test_two_ranks_publish_to_two_servers_in_memory_and_every_version_is_proven(ranks, servers):
    base = max(server.version or 0 for server in servers)
    seen = []
    for version in range(base + 1, base + 4):
        assert ranks.both("shift", version) == {0: None, 1: None}
        assert ranks.both("publish", version) == {0: version, 1: version}
        assert [server.version for server in servers] == [version, version]
        first, second = (greedy(server, version) for server in servers)
        assert first == second
        seen.append(str(first))
    assert len(set(seen)) == 3, "each publish changed what is sampled"


@pytest.mark.parametrize("ranks", [1], indirect=True)
def test_a_rank_that_dies_in_a_publish_ends_the_other_and_both_servers_keep_their_version(ranks, servers):
    before = [server.version for server in servers]
    version = (max(each or 0 for each in before)) + 1
    ranks.order(("publish", version), ("dies in", version))
    started = time.monotonic()
    answer = ranks.answers(1)
    assert "RanksFailed" in answer[0]
    assert time.monotonic() - started < 60, "the other does not wait for its time limit"
    assert [server.version for server in servers] == before
    assert all(not server.info()["publishing"] for server in servers)
