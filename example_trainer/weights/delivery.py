"""The delivery of one version to the members of a publish, by adapter or by broadcast.

A delivery names the members that serve the version when it returns, and the error of each one that was lost on the
way. Adapters need no agreement: each server has the version at once or is lost. A broadcast is all or nothing: if a
member is lost, the exchange starts again with the others. `checkpoint_delivery` has the third way, whole checkpoints.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from example_trainer.errors import (
    CannotShare,
    CannotSwap,
    ProofFailed,
    PublishFailed,
    ServerRefused,
    ServerUnavailable,
    TrainerError,
)
from example_trainer.modeling.loading import policy_options
from example_trainer.options.publish import served_rank
from example_trainer.options.training_options import TrainingOptions
from example_trainer.weight_protocol.base_record import BASE_DIRECTORY
from example_trainer.weight_protocol.client import ServerInfo, ShouldStop, never
from example_trainer.weight_protocol.transfer import AdapterPayload
from example_trainer.weights.adapter_target import AtroposServer, adapter_name
from example_trainer.weights.base import Cost, PublishReport
from example_trainer.weights.broadcast_exchange import (
    FAILURES,
    GIVEN_UP_LEASE_SECONDS,
    BroadcastExchange,
    meeting_address,
    refuse_unreachable,
)
from example_trainer.weights.logprob_parity import Compare
from example_trainer.weights.members import Member, MemberCalls, look
from example_trainer.weights.publish_loop import ATTEMPTS, SyncBudget
from example_trainer.weights.served_model import ServedBase, prepare_base
from example_trainer.weights.weight_source import WeightSource

if TYPE_CHECKING:
    from collections.abc import Callable

    from example_trainer.modeling.policy import Policy

logger = logging.getLogger(__name__)

SENT_AT_ONCE = 8
"""Servers that get an adapter from the trainer; they pass it on to the others, each to two at a time."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The trainer's side of a logprob comparison."""

    policy: Policy
    compare_with: Compare | None = None
    """A comparison with a forward that all ranks do together; None if `policy` is whole here."""


@dataclass(slots=True)
class Delivered:
    """The outcome of a delivery."""

    served: list[Member]
    lost: dict[Member, Exception] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)


class WeightDelivery(Protocol):
    """One way to give servers the trainer's weights."""

    def attach(self, policy: Policy) -> None:
        """Take the policy whose weights are delivered from here on."""

    def examine(self, info: ServerInfo, url: str) -> None:
        """Raise a `TrainerError` for a server that cannot take these weights."""

    def deliver(self, members: Sequence[Member], version: int, *, limit_seconds: float) -> Delivered:
        """Bring the current weights to the members, as `version`.

        No exchange waits longer than the limit, in addition to the time that whole weights may take.
        """

    def check(self, member: Member, version: int) -> None:
        """Raise `ProofFailed` if the server says that it has other weights than were sent."""

    def proof(self) -> Proof:
        """Return what the logprobs of a server are compared with, after a delivery."""

    def should_publish(self, steps_since_publish: int) -> bool:
        """Return True if a publish is due after this many optimizer steps without one, by default after each."""
        return steps_since_publish > 0

    def note(self, report: PublishReport) -> None:
        """Take the cost of a publish into account, if publishes are spaced by it."""

    def close(self, members: Sequence[Member]) -> None:
        """End what is kept between publishes."""


class AdapterDelivery(WeightDelivery):
    """Implements `WeightDelivery` by adapters that are sent into the servers' memory while they decode."""

    def __init__(self, config: TrainingOptions, calls: MemberCalls) -> None:
        self._config = config
        self._calls = calls
        self._policy: Policy | None = None
        self._base: ServedBase | None = None
        self._payload: AdapterPayload | None = None

    def attach(self, policy: Policy) -> None:
        self._policy, self._base = policy, ServedBase(self._config.model_name)
        if policy_options(self._config).quantises_base:
            self._base = prepare_base(policy, self._config.required_run_dir / BASE_DIRECTORY)

    def examine(self, info: ServerInfo, url: str) -> None:
        if not info.lora:
            rank = served_rank(1 if self._policy is None else int(self._policy.adapter_config().get("r", 1)))
            raise CannotSwap(
                f"the vLLM server at {url} serves no adapters: start it with --enable-lora --max-lora-rank {rank}"
            )
        assert self._base is not None
        self._base.check(info.base_digest, url)

    def deliver(self, members: Sequence[Member], version: int, *, limit_seconds: float) -> Delivered:
        assert self._policy is not None
        policy = self._policy
        payload = AdapterPayload.write(policy.adapter_tensors(policy.dtype), policy.adapter_config())
        self._payload = payload
        delivered = Delivered([member for member in members if serves(member.info, version)])
        waiting = [member for member in members if member not in delivered.served]
        for member in waiting:
            member.client.patience_seconds = limit_seconds
        passed_on = self._pass_on(waiting[:SENT_AT_ONCE], waiting[SENT_AT_ONCE:], version, payload, delivered)
        direct = [member for member in waiting[SENT_AT_ONCE:] if member.client.url not in passed_on]
        self._pass_on(direct, [], version, payload, delivered)
        delivered.served += [member for member in waiting[SENT_AT_ONCE:] if member not in direct]
        return delivered

    def check(self, member: Member, version: int) -> None:
        assert self._payload is not None
        AtroposServer(member.client).check(version, self._payload)

    def proof(self) -> Proof:
        assert self._policy is not None
        return Proof(self._policy)

    def note(self, report: PublishReport) -> None:
        """Do nothing: an adapter interrupts no request."""

    def close(self, members: Sequence[Member]) -> None:
        """Do nothing: nothing is kept between publishes."""

    def _pass_on(
        self,
        members: Sequence[Member],
        others: Sequence[Member],
        version: int,
        payload: AdapterPayload,
        delivered: Delivered,
    ) -> set[str]:
        """Send the adapter to `members`, which pass it on to `others`; return the addresses that it reached there."""
        shares = {
            member: [other.client.url for other in others[index :: len(members)]]
            for index, member in enumerate(members)
        }

        def send(member: Member) -> set[str]:
            answer = member.client.upload_adapter(
                adapter_name(version), version, payload.body, forward_to=shares[member]
            )
            reached = answer.get("forwarded") or {}
            if wrong := [url for url, found in {**reached, "": answer}.items() if found["digest"] != payload.digest()]:
                raise ProofFailed(f"version {version} arrived with another checksum{' at '.join(['', *wrong])}")
            return set(reached)

        passed_on: set[str] = set()
        for member, answer in self._calls.each(members, send).items():
            if isinstance(answer, TrainerError):
                delivered.lost[member] = answer
            else:
                delivered.served.append(member)
                passed_on |= answer
        return passed_on


class BroadcastDelivery(WeightDelivery):
    """Implements `WeightDelivery` by a broadcast of whole weights, for which the servers' fences close together."""

    def __init__(
        self,
        config: TrainingOptions,
        calls: MemberCalls,
        make_source: Callable[[Policy], WeightSource] = WeightSource,
        *,
        should_stop: ShouldStop = never,
    ) -> None:
        """Keep the arguments; `make_source` decides how weights that are sharded over ranks are gathered.

        Once `should_stop` returns True, no fence waits for running requests to end.
        """
        self._config = config
        self._calls = calls
        self._exchange = BroadcastExchange(
            config, calls, lease_seconds=GIVEN_UP_LEASE_SECONDS, gives_up=True, should_stop=should_stop
        )
        self._budget = SyncBudget.from_config(config)
        self._make_source = make_source
        self._policy: Policy | None = None
        self._source: WeightSource | None = None

    def attach(self, policy: Policy) -> None:
        self._policy, self._source = policy, self._make_source(policy)

    def examine(self, info: ServerInfo, url: str) -> None:
        if info.hostname != socket.gethostname():
            refuse_unreachable(meeting_address(self._config, os.environ)[0], [url])
        refuse_other_weights(info, url, "receive a broadcast")

    def deliver(self, members: Sequence[Member], version: int, *, limit_seconds: float) -> Delivered:
        assert self._policy is not None
        assert self._source is not None
        delivered = Delivered([])
        self._exchange.patience_seconds = limit_seconds
        for member in members:
            # A fence waits for running requests: that is not a sign of a server that is gone.
            member.client.patience_seconds = limit_seconds + self._config.drain_seconds
        failures: Counter[Member] = Counter()
        attempts = 0
        while True:
            left = [member for member in members if member not in delivered.lost]
            outdated = [member for member in left if not serves(member.info, version)]
            if not outdated:
                break
            try:
                self._exchange.send_and_switch(outdated, self._source, self._policy.device, version, delivered.cost)
                break
            except (ServerRefused, ServerUnavailable, *FAILURES) as error:
                failures.update(self._exchange.failed.keys())
                attempts = 0 if self._note_lost(left, failures, delivered) else attempts + 1
                self._exchange.leave([member for member in left if member not in delivered.lost])
                if attempts >= ATTEMPTS:  # the fault is not that of one server
                    raise PublishFailed(f"version {version} did not reach the servers: {error}") from error
                logger.warning("version %d is sent again, to the servers that are left: %s", version, error)
        delivered.served = [member for member in members if member not in delivered.lost]
        return delivered

    def check(self, member: Member, version: int) -> None:
        """Do nothing: the bytes were compared on their way."""

    def proof(self) -> Proof:
        assert self._policy is not None
        assert self._source is not None
        return Proof(self._policy, self._source.compare if self._policy.is_sharded else None)

    def should_publish(self, steps_since_publish: int) -> bool:
        return self._budget.allows(steps_since_publish)

    def note(self, report: PublishReport) -> None:
        self._budget.note(report)

    def close(self, members: Sequence[Member]) -> None:
        self._exchange.leave(members)

    def _note_lost(self, members: Sequence[Member], failures: Counter[Member], delivered: Delivered) -> bool:
        """Note the members that do not answer after a failure, and those that have failed for the second time.

        Return True if there are any.
        """
        known = len(delivered.lost)
        for member, info in self._calls.each(members, look).items():
            if isinstance(info, TrainerError):
                delivered.lost[member] = info
                continue
            member.info = info
            if failures[member] > 1 and (failure := self._exchange.failed.get(member)) is not None:
                delivered.lost[member] = failure
        return len(delivered.lost) > known


def refuse_other_weights(info: ServerInfo, url: str, task: str) -> None:
    """Raise `CannotShare` for a server that cannot do `task`, because it serves adapters or shares its weights."""
    if info.lora or info.sharing:
        what, flag = ("serves adapters", "--enable-lora") if info.lora else ("shares its weights", "--share-weights")
        raise CannotShare(
            f"the vLLM server at {url} {what} and cannot {task}: start it without {flag}, or train with "
            "--weight-bridge-mode lora_only"
        )


def serves(info: ServerInfo, version: int) -> bool:
    """Return True if a server has exactly this version, whole."""
    return info.policy_version == version and not info.torn
