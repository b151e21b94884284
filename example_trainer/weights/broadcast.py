"""Weights for several servers, on this host or others: `--num-inference-nodes N` with `shared_vllm`.

No memory is shared then. The trainer has a copy of its own and sends each publish once to all servers, over a process
group (`MASTER_ADDR`, `MASTER_PORT`; gloo, or nccl between GPUs). All move to a version together or not at all: each
receives aside and tells a checksum; only when these agree all are paused, load, and go on. Should one fail before that,
all go on with the old version; should one fail while it loads, it serves nothing until a whole publish has reached it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from example_trainer.errors import PublishFailed
from example_trainer.model import Policy, PolicyOptions, load_policy
from example_trainer.running.ports import free_port
from example_trainer.weights.bridge import PublishReport, WeightBridge
from example_trainer.weights.broadcast_group import Backend, BroadcastGroup, Rendezvous, describe
from example_trainer.weights.errors import ProofFailed, ServerRefused, ServerUnavailable
from example_trainer.weights.proof import Difference, prove
from example_trainer.weights.server_client import Fence, ServerClient
from example_trainer.weights.sync_check import SyncCheck
from example_trainer.weights.token_file import read_token
from example_trainer.weights.waiting import NotYet, check_host, wait_for

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FAILURES = (ServerRefused, ServerUnavailable, RuntimeError, ProofFailed)


@dataclass(frozen=True, kw_only=True, slots=True)
class BroadcastOptions:
    """What of the trainer's configuration concerns the broadcast bridge."""

    policy: PolicyOptions
    server_urls: Sequence[str]
    bridge_token: str | None = None
    wait_timeout_seconds: float = 600.0
    drain_seconds: float = 0.5
    lease_seconds: float = 60.0
    backend: Backend = "gloo"
    sync_check_every: int = 0


class BroadcastBridge(WeightBridge):
    """Implements `WeightBridge` by sending whole weights to any number of servers."""

    def __init__(self, options: BroadcastOptions) -> None:
        self._options = options
        self._clients: list[ServerClient] = []
        self._policy: Policy | None = None
        self._group: BroadcastGroup | None = None
        self._boots: list[str] = []
        self._check = SyncCheck(every=options.sync_check_every)
        self._limit: Difference | None = None
        self._pool = ThreadPoolExecutor(len(options.server_urls), thread_name_prefix="servers")

    def prepare(self) -> Policy:
        for url in self._options.server_urls:
            check_host(url, "--vllm-host")
            self._clients.append(
                wait_for(
                    partial(self._connect, url),
                    what=f"the vLLM server at {url}",
                    timeout_seconds=self._options.wait_timeout_seconds,
                )
            )
        self._policy = load_policy(self._options.policy)
        return self._policy

    def publish(self, version: int) -> PublishReport:
        """Send the masters as they are now to every server; see the module's docstring."""
        if self._policy is None:
            raise PublishFailed("nothing is loaded; call prepare() before publish()")
        started = time.monotonic()
        try:
            boots = [info.boot_id for info in self._each(ServerClient.info)]
            if self._group is None or boots != self._boots:
                self._join()
            self._send(self._policy)
            fence_seconds, recomputed = self._move(version)
        except _FAILURES as error:
            self._group = None  # some may still wait in it
            raise PublishFailed(f"version {version} did not reach every server: {error}") from error
        report = PublishReport(
            version=version,
            seconds=time.monotonic() - started,
            fence_seconds=fence_seconds,
            recomputed_tokens=recomputed,
        )
        self._verify(version, boots)
        return report

    def highest_version(self) -> int:
        return max((info.policy_version or 0 for info in self._each(ServerClient.info)), default=0)

    def should_publish(self, steps_since_publish: int) -> bool:
        return steps_since_publish > 0

    def needs_publish(self) -> bool:
        """Whether a server has restarted since: it serves nothing so far."""
        if not self._boots:
            return False
        try:
            return any(info.policy_version is None or info.torn for info in self._each(ServerClient.info))
        except (ServerRefused, ServerUnavailable):
            return False

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self._clients.clear()
        self._pool.shutdown()

    def _connect(self, url: str) -> ServerClient:
        client = ServerClient(url, self._options.bridge_token or os.environ.get("ATROPOS_BRIDGE_TOKEN"))
        try:
            info = client.info()
        except (ServerRefused, ServerUnavailable) as error:
            client.close()
            raise NotYet(str(error)) from error
        if info.token_path and (token := read_token(info.token_path)):
            client.use_token(token)
        return client

    def _join(self) -> None:
        """A new group of the trainer and all servers."""
        address = os.environ.get("MASTER_ADDR", "127.0.0.1")
        port = int(os.environ.get("MASTER_PORT") or free_port())
        size = len(self._clients) + 1
        ours = Rendezvous(address, port, 0, size, self._options.backend)
        assert self._policy is not None
        device = self._policy.device
        waiting = [
            self._pool.submit(client.join_broadcast, replace(ours, rank=rank))
            for rank, client in enumerate(self._clients, 1)
        ]
        self._group = BroadcastGroup.join(ours, device)
        for each in waiting:
            each.result()

    def _send(self, policy: Policy) -> None:
        """Every server has the weights aside, and they are what was sent; else raises."""
        assert self._group is not None
        tensors = policy.checkpoint_tensors(policy.dtype)
        told = describe(tensors)
        waiting = [self._pool.submit(client.receive_broadcast, told) for client in self._clients]
        digest = self._group.send(tensors)
        arrived = [each.result() for each in waiting]
        if wrong := [client.url for client, found in zip(self._clients, arrived, strict=True) if found != digest]:
            raise ProofFailed(f"other bytes than were sent have arrived at {', '.join(wrong)}")

    def _move(self, version: int) -> tuple[float, int]:
        """Pause all, load everywhere, go on everywhere; before anything is loaded, a failure changes nothing."""
        options = self._options
        fences: dict[ServerClient, Fence] = {}

        def begin(client: ServerClient) -> None:
            fences[client] = client.begin_publish(
                lease_seconds=options.lease_seconds, drain_seconds=options.drain_seconds, in_flight="drain"
            )

        try:
            self._each(begin)
            self._each(lambda client: client.load_broadcast(fences[client].publish_id))
        except _FAILURES:
            for client, fence in fences.items():
                try:
                    client.abort_publish(fence.publish_id)
                except (ServerRefused, ServerUnavailable) as error:
                    logger.warning("%s", error)
            raise
        ended = self._each(lambda client: client.end_publish(fences[client].publish_id, version))
        fence_seconds = max(float(each.get("fence_seconds", 0.0)) for each in ended)
        return fence_seconds, sum(int(each.get("recomputed_tokens", 0)) for each in ended)

    def _verify(self, version: int, boots: list[str]) -> None:
        """Prove the first publish to each start of a server, and as often as asked from then on."""
        assert self._policy is not None
        if self._check.is_due() or boots != self._boots:
            for client in self._clients:
                info = client.info()
                agreement = prove(
                    self._policy,
                    client.generate,
                    version=version,
                    boot_id=info.boot_id,
                    max_model_len=info.max_model_len,
                    limit=self._limit,
                )
                self._limit = agreement.limit
        self._boots = boots

    def _each(self, call: Callable[[ServerClient], T]) -> list[T]:
        """The answers of all servers, asked at once; raises what the first failing one raised, when all are done."""
        waiting = [self._pool.submit(call, client) for client in self._clients]
        for each in waiting:
            each.exception()
        return [each.result() for each in waiting]
