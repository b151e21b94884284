"""Mode `shared_vllm` for several servers, on this host or others (`--num-inference-nodes N`).

No memory is shared then. The trainer has its own copy and sends each publish once to all servers, over a process group
(`MASTER_ADDR`, `MASTER_PORT`; gloo, or nccl between GPUs). All servers change to a version together or not at all: each
receives the tensors without loading them and reports a checksum; only when these agree, all are paused and load; only
when all have loaded, they resume. After a failure before that point all resume with the old version. A server that has
loaded but cannot be reached to resume serves nothing until it is reached again: then it, and any server that has
restarted, gets the same masters, while those that have the version already keep it.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from example_trainer.errors import ProofFailed, PublishFailed, ServerRefused, ServerUnavailable
from example_trainer.model import load_policy
from example_trainer.modeling.loading import PolicyOptions
from example_trainer.modeling.policy import Policy
from example_trainer.options.publish import DRAIN_SECONDS, InFlight
from example_trainer.processes.ports import free_port
from example_trainer.weight_protocol.client import Fence, NotYet, ServerClient, ServerInfo, check_host, wait_for
from example_trainer.weight_protocol.manifest import read_token
from example_trainer.weight_protocol.transfer import Backend, BroadcastGroup, Rendezvous, describe
from example_trainer.weights.base import PublishReport, WeightBridge
from example_trainer.weights.publish_loop import ParityCheck, SyncBudget, publish_with_retries, refuse_other_dtype
from example_trainer.weights.shared_vllm import begin_after_others

logger = logging.getLogger(__name__)

T = TypeVar("T")
_FAILURES = (RuntimeError, ProofFailed)
"""Failures of the process group and of the transfer, which pass once all have joined a new group."""
_FAILING = frozenset({500, 503})
"""Statuses from which a server may recover within the same publish."""
_END_PAUSE_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class BroadcastOptions:
    """The part of the trainer's configuration that concerns the broadcast bridge."""

    policy: PolicyOptions
    server_urls: Sequence[str]
    bridge_token: str | None = None
    wait_timeout_seconds: float = 600.0
    drain_seconds: float = DRAIN_SECONDS
    in_flight: InFlight = "drain"
    lease_seconds: float = 60.0
    sync_budget: float = 0.2
    max_staleness: int | None = None
    backend: Backend = "gloo"
    sync_check_every: int | None = 0


@dataclass(eq=False, slots=True)
class _Member:
    """One server: its client and the last known state."""

    client: ServerClient
    info: ServerInfo
    generated_tokens_total: int = 0


@dataclass(slots=True)
class _Cost:
    """The cost of one publish's fences, on all servers together."""

    fence_seconds: float = 0.0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    paused_requests: int = 0


@dataclass(slots=True)
class _JoinedGroup:
    """A process group that all have joined, and the boot ids of its servers."""

    group: BroadcastGroup
    boots: list[str] = field(default_factory=list)


class BroadcastBridge(WeightBridge):
    """Implements `WeightBridge` by sending whole weights to any number of servers."""

    def __init__(self, options: BroadcastOptions) -> None:
        self._options = options
        self._members: list[_Member] = []
        self._policy: Policy | None = None
        self._joined: _JoinedGroup | None = None
        self._budget = SyncBudget(options.sync_budget, most_steps=options.max_staleness)
        self._check = ParityCheck(every=options.sync_check_every)
        self._has_published = False
        self._pool = ThreadPoolExecutor(len(options.server_urls), thread_name_prefix="servers")

    def prepare(self) -> Policy:
        """Wait for every server, and load the policy."""
        for url in self._options.server_urls:
            check_host(url, "--vllm-host or --inference-urls")
            client, info = self._until_it_answers(url, partial(self._connect, url))
            self._members.append(_Member(client, info))
        self._policy = load_policy(self._options.policy)
        for member in self._members:
            refuse_other_dtype(member.client.url, member.info.dtype, self._policy)
        return self._policy

    def publish(self, version: int) -> PublishReport:
        """Send the masters as they are now to every server; see the module's docstring."""
        if self._policy is None:
            raise PublishFailed("nothing is loaded; call prepare() before publish()")
        started = time.monotonic()
        cost = _Cost()
        failed = f"version {version} did not reach every server"
        publish_with_retries(partial(self._publish_once, version, cost), failed, also=_FAILURES)
        report = PublishReport(
            version=version,
            seconds=time.monotonic() - started,
            fence_seconds=cost.fence_seconds,
            recomputed_tokens=cost.recomputed_tokens,
            generated_tokens=cost.generated_tokens,
            paused_requests=cost.paused_requests,
        )
        self._budget.note(report)
        self._has_published = True
        self._verify(version)
        return report

    def highest_version(self) -> int:
        return max((info.policy_version or 0 for info in self._call_each(self._members, _info)), default=0)

    def should_publish(self, steps_since_publish: int) -> bool:
        return self._budget.allows(steps_since_publish)

    def needs_publish(self) -> bool:
        """Return True if a server serves nothing: it has restarted, or could not be reached to end the last publish."""
        return self._has_published and any(self._pool.map(_serves_nothing, self._members))

    def close(self) -> None:
        self._leave()
        for member in self._members:
            member.client.close()
        self._members.clear()
        self._pool.shutdown()

    def _until_it_answers(self, url: str, ask: Callable[[], T]) -> T:
        def poll() -> T:
            try:
                return ask()
            except (ServerRefused, ServerUnavailable) as error:
                raise NotYet(str(error)) from error

        return wait_for(poll, what=f"the vLLM server at {url}", timeout_seconds=self._options.wait_timeout_seconds)

    def _connect(self, url: str) -> tuple[ServerClient, ServerInfo]:
        client = ServerClient(url, self._options.bridge_token or os.environ.get("ATROPOS_BRIDGE_TOKEN"))
        try:
            info = client.info()
        except (ServerRefused, ServerUnavailable):
            client.close()
            raise
        if info.token_path and (token := read_token(info.token_path)):
            client.use_token(token)
        return client, info

    def _publish_once(self, version: int, cost: _Cost) -> None:
        try:
            if outdated := self._outdated_members(version):
                self._send_and_switch(outdated, version, cost)
        except (ServerRefused, ServerUnavailable, *_FAILURES):
            self._leave()
            raise

    def _outdated_members(self, version: int) -> list[_Member]:
        """Return the servers that do not serve `version` yet, once every server answers and is in no publish."""

        def look(member: _Member) -> None:
            member.info = self._until_it_answers(member.client.url, partial(_settled_info, member.client))

        self._call_each(self._members, look)
        for member in self._members:
            served = member.info.policy_version
            if served is not None and served > version:
                raise PublishFailed(f"{member.client.url} serves version {served}, which is above {version}")
        return [each for each in self._members if each.info.policy_version != version or each.info.torn]

    def _send_and_switch(self, members: list[_Member], version: int, cost: _Cost) -> None:
        assert self._policy is not None
        boots = [member.info.boot_id for member in members]
        if self._joined is None or self._joined.boots != boots:
            self._leave()
            self._joined = _JoinedGroup(self._join(members, self._policy), boots)
        self._send(members, self._joined.group, self._policy)
        self._switch_version(members, version, cost)

    def _join(self, members: list[_Member], policy: Policy) -> BroadcastGroup:
        """Return a new group of the trainer and these servers."""
        with ExitStack() as held:
            address = os.environ.get("MASTER_ADDR", "127.0.0.1")
            port = int(os.environ.get("MASTER_PORT") or free_port(held=held))
            rendezvous = Rendezvous(address, port, 0, len(members) + 1, self._options.backend)
            group_id = uuid.uuid4().hex
            waiting = [
                self._pool.submit(member.client.join_broadcast, group_id, replace(rendezvous, rank=rank))
                for rank, member in enumerate(members, 1)
            ]
            try:
                group = BroadcastGroup.join(rendezvous, policy.device)
            finally:
                wait(waiting)
        if failed := next((error for each in waiting if (error := each.exception())), None):
            group.close()
            raise failed
        return group

    def _send(self, members: list[_Member], group: BroadcastGroup, policy: Policy) -> None:
        """Send the weights to every server, to be kept without loading; raise unless all received what was sent."""
        tensors = policy.checkpoint_tensors(policy.dtype)
        described, transfer_id = describe(tensors), uuid.uuid4().hex
        waiting = [self._pool.submit(member.client.receive_broadcast, transfer_id, described) for member in members]
        try:
            digest = group.send(tensors)
        except BaseException:
            group.close()  # ends the servers' wait for the remaining tensors
            wait(waiting)
            raise
        digests = [each.result() for each in waiting]
        if wrong := [each.client.url for each, found in zip(members, digests, strict=True) if found != digest]:
            raise ProofFailed(f"the bytes received differ from those sent, at {', '.join(wrong)}")

    def _switch_version(self, members: list[_Member], version: int, cost: _Cost) -> None:
        """Pause all servers, load on all, resume all; a failure before all have loaded is undone on all."""
        options = self._options
        ids = {member: uuid.uuid4().hex for member in members}
        fences: dict[_Member, Fence] = {}

        def begin(member: _Member) -> None:
            fences[member] = begin_after_others(
                member.client,
                ids[member],
                lease_seconds=options.lease_seconds,
                drain_seconds=options.drain_seconds,
                in_flight=options.in_flight,
            )

        with ExitStack() as leases:
            for member, publish_id in ids.items():
                leases.enter_context(member.client.lease(publish_id, options.lease_seconds))
            try:
                self._call_each(members, begin)
                self._call_each(members, lambda each: each.client.load_broadcast(ids[each], version))
            except BaseException:
                self._call_each(members, lambda each: _abort_publish(each.client, ids[each]))
                raise
            end = partial(_end, version=version, lease_seconds=options.lease_seconds)
            ended = self._call_each(members, lambda each: end(each.client, ids[each]))
        for member, answer in zip(members, ended, strict=True):
            _add(cost, member, fences[member], answer)

    def _leave(self) -> None:
        """Close the group: no server waits in it any longer, and received tensors that are not loaded are discarded."""
        joined, self._joined = self._joined, None
        if joined is not None:
            joined.group.close()
            self._call_each(self._members, lambda each: _leave_group(each.client))

    def _verify(self, version: int) -> None:
        """Check the first publish to each server process, and later ones as often as `--sync-check` says."""
        due = self._check.is_due()
        for member in self._members:
            if due or member.info.boot_id not in self._check.proven:
                try:
                    self._prove(member, version)
                except (ServerRefused, ServerUnavailable) as error:  # after a restart it waits for a publish
                    logger.warning("version %d is not proven at %s: %s", version, member.client.url, error)

    def _prove(self, member: _Member, version: int) -> None:
        assert self._policy is not None
        self._check.run(
            self._policy,
            member.client.generate,
            version=version,
            boot_id=member.info.boot_id,
            max_model_len=member.info.max_model_len,
        )

    def _call_each(self, members: Sequence[_Member], call: Callable[[_Member], T]) -> list[T]:
        """Call these servers in parallel and return the answers; raise the first error once all calls have ended."""
        waiting = [self._pool.submit(call, member) for member in members]
        wait(waiting)
        return [each.result() for each in waiting]


def _info(member: _Member) -> ServerInfo:
    return member.client.info()


def _settled_info(client: ServerClient) -> ServerInfo:
    info = client.info()
    if info.publishing:
        raise ServerUnavailable(f"at {client.url} an earlier publish has neither ended nor lapsed yet")
    return info


def _serves_nothing(member: _Member) -> bool:
    try:
        info = member.client.info()
    except (ServerRefused, ServerUnavailable):
        return False
    return info.policy_version is None or info.torn


def _abort_publish(client: ServerClient, publish_id: str) -> None:
    """Make a server restore its previous weights; one that has not begun the publish has nothing to restore."""
    try:
        client.abort_publish(publish_id)
    except (ServerRefused, ServerUnavailable) as error:
        unknown = isinstance(error, ServerRefused) and error.kind == "publish-lapsed"
        logger.log(logging.DEBUG if unknown else logging.WARNING, "%s", error)


def _leave_group(client: ServerClient) -> None:
    try:
        client.leave_broadcast()
    except (ServerRefused, ServerUnavailable) as error:
        logger.debug("%s", error)


def _end(client: ServerClient, publish_id: str, version: int, *, lease_seconds: float) -> dict[str, Any]:
    """Make a server resume. All have loaded, so this one has to: the call is repeated until the lease has lapsed."""
    deadline = time.monotonic() + lease_seconds
    while True:
        try:
            return client.end_publish(publish_id, version)
        except (ServerRefused, ServerUnavailable) as error:
            lasting = isinstance(error, ServerRefused) and error.status not in _FAILING
            if lasting or time.monotonic() > deadline:
                raise
            logger.warning("%s; repeating the call", error)
            time.sleep(_END_PAUSE_SECONDS)


def _add(cost: _Cost, member: _Member, fence: Fence, ended: dict[str, Any]) -> None:
    cost.fence_seconds = max(cost.fence_seconds, float(ended.get("fence_seconds", 0.0)))
    cost.recomputed_tokens += int(ended.get("recomputed_tokens", 0))
    cost.generated_tokens += max(0, fence.generated_tokens_total - member.generated_tokens_total)
    cost.paused_requests += fence.paused_requests
    member.generated_tokens_total = fence.generated_tokens_total
