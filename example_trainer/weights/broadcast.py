"""Mode `shared_vllm` for several servers, on this host or others (`--num-inference-nodes N`).

No memory is shared then. The trainer has its own copy and sends each publish once to all servers, over a process group
(gloo, or nccl between GPUs) of which each worker process of a server is a member: those of a server with tensor
parallelism receive all weights, and each loads its part. All servers change to a version together or not at all
(`broadcast_exchange`). A server that has loaded but cannot be reached to resume serves nothing until it is reached
again: then it, and any server that has restarted, gets the same masters, while those that have the version already keep
it. For servers that come and go see `registered`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from example_trainer.errors import PublishFailed, ServerRefused, ServerUnavailable
from example_trainer.model import load_policy
from example_trainer.modeling.loading import policy_options, resolve_device
from example_trainer.modeling.policy import Policy
from example_trainer.options.training_options import TrainingOptions
from example_trainer.weight_protocol.client import ServerClient, ServerInfo, ShouldStop, check_host, never
from example_trainer.weights.base import Cost, PublishReport, WeightBridge
from example_trainer.weights.broadcast_exchange import (
    FAILURES,
    BroadcastExchange,
    meeting_address,
    refuse_nccl,
    refuse_unreachable,
)
from example_trainer.weights.connection import check_server, connect_server, until_it_answers
from example_trainer.weights.members import Member, MemberCalls
from example_trainer.weights.publish_loop import ParityCheck, SyncBudget, publish_with_retries
from example_trainer.weights.weight_source import WeightSource

logger = logging.getLogger(__name__)

T = TypeVar("T")
LEASE_SECONDS = 60.0


class BroadcastBridge(WeightBridge):
    """Implements `WeightBridge` by sending whole weights to any number of servers."""

    def __init__(
        self,
        config: TrainingOptions,
        make_source: Callable[[Policy], WeightSource] = WeightSource,
        *,
        lease_seconds: float = LEASE_SECONDS,
        should_stop: ShouldStop = never,
    ) -> None:
        """Keep the arguments; `make_source` decides how weights that are sharded over ranks are gathered.

        Waits for a server end once `should_stop` returns True.
        """
        self._config = config
        self._should_stop = should_stop
        self._make_source = make_source
        self._source: WeightSource | None = None
        self._members: list[Member] = []
        self._policy: Policy | None = None
        self._calls = MemberCalls(len(config.server_urls))
        self._exchange = BroadcastExchange(config, self._calls, lease_seconds=lease_seconds, should_stop=should_stop)
        self._budget = SyncBudget.from_config(config)
        self._check = ParityCheck(every=config.sync_check_every)
        self._has_published = False

    def prepare(self) -> Policy:
        """Wait for every server, and load the policy."""
        refuse_unreachable(meeting_address(self._config, os.environ)[0], self._config.server_urls)
        if self._config.broadcast_backend == "nccl":
            refuse_nccl(resolve_device(self._config.device))
        for url in self._config.server_urls:
            check_host(url, "--vllm-host or --inference-urls")
            connect = partial(connect_server, url, self._config.bridge_token)
            self._members.append(Member(*self._until_it_answers(connect, url)))
        self._policy = load_policy(policy_options(self._config))
        self._source = self._make_source(self._policy)
        for member in self._members:
            check_server(member.client.url, member.info.dtype, member.info.head_dtype, self._policy)
        return self._policy

    def publish(self, version: int) -> PublishReport:
        """Send the masters as they are now to every server; see the module's docstring."""
        if self._policy is None:
            raise PublishFailed("nothing is loaded; call prepare() before publish()")
        started = time.monotonic()
        cost = Cost()
        failed = f"version {version} did not reach every server"
        publish_with_retries(partial(self._publish_once, version, cost), failed, also=FAILURES)
        report = cost.report(version, time.monotonic() - started)
        self._budget.note(report)
        self._has_published = True
        self._verify(version)
        return report

    def highest_version(self) -> int:
        return max((info.policy_version or 0 for info in self._calls.all(self._members, _info)), default=0)

    def should_publish(self, steps_since_publish: int) -> bool:
        return self._budget.allows(steps_since_publish)

    def needs_publish(self) -> bool:
        """Return True if a server serves nothing: it has restarted, or could not be reached to end the last publish."""
        return self._has_published and any(self._calls.all(self._members, _serves_nothing))

    def close(self) -> None:
        self._leave()
        for member in self._members:
            member.client.close()
        self._members.clear()
        self._calls.close()

    def _publish_once(self, version: int, cost: Cost) -> None:
        try:
            if outdated := self._outdated_members(version):
                assert self._policy is not None
                assert self._source is not None
                self._exchange.send_and_switch(outdated, self._source, self._policy.device, version, cost)
        except (ServerRefused, ServerUnavailable, *FAILURES):
            self._leave()
            raise

    def _outdated_members(self, version: int) -> list[Member]:
        """Return the servers that do not serve `version` yet, once every server answers and is in no publish."""

        def look(member: Member) -> None:
            member.info = self._until_it_answers(partial(_settled_info, member.client), member.client.url)

        self._calls.all(self._members, look)
        for member in self._members:
            served = member.info.policy_version
            if served is not None and served > version:
                raise PublishFailed(f"{member.client.url} serves version {served}, which is above {version}")
        return [each for each in self._members if each.info.policy_version != version or each.info.torn]

    def _until_it_answers(self, ask: Callable[[], T], url: str) -> T:
        limit_seconds = self._config.wait_timeout
        return until_it_answers(ask, url, timeout_seconds=limit_seconds, should_stop=self._should_stop)

    def _leave(self) -> None:
        self._exchange.leave(self._members)

    def _verify(self, version: int) -> None:
        """Check the first publish to each server process, and later ones as often as `--sync-check` says."""
        due = self._check.is_due()
        for member in self._members:
            if due or member.info.boot_id not in self._check.proven:
                try:
                    self._prove(member, version)
                except (ServerRefused, ServerUnavailable) as error:  # after a restart it waits for a publish
                    logger.warning("version %d is not proven at %s: %s", version, member.client.url, error)

    def _prove(self, member: Member, version: int) -> None:
        assert self._policy is not None
        assert self._source is not None
        self._check.run(
            self._policy,
            member.client.generate,
            version=version,
            boot_id=member.info.boot_id,
            max_model_len=member.info.max_model_len,
            compare_with=self._source.compare if self._policy.is_sharded else None,
        )


def _info(member: Member) -> ServerInfo:
    return member.client.info()


def _settled_info(client: ServerClient) -> ServerInfo:
    info = client.info()
    if info.publishing:
        raise ServerUnavailable(f"at {client.url} an earlier publish has neither ended nor lapsed yet")
    return info


def _serves_nothing(member: Member) -> bool:
    try:
        info = member.client.info()
    except (ServerRefused, ServerUnavailable):
        return False
    return info.policy_version is None or info.torn
