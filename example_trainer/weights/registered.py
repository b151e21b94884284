"""Publishes to servers that come and go: the members of each publish are the ones that the broker lists as it begins.

A `WeightDelivery` brings the weights to them. The ones that have the version, and have been proven to compute with it,
are named to the broker, which lets them serve; all others join again. So a server that is lost on the way delays a
publish and never fails it, and a new one gets the policy by the next publish, or while the trainer waits for a batch.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from atropos_api.common.errors import AtroposError
from example_trainer.api import BackgroundCall
from example_trainer.errors import ProofFailed, PublishFailed, ServerRefused, ServerUnavailable, WaitStopped
from example_trainer.model import load_policy
from example_trainer.modeling.loading import policy_options
from example_trainer.modeling.policy import Policy
from example_trainer.options.training_options import TrainingOptions
from example_trainer.weight_protocol.client import ServerInfo, ShouldStop, never
from example_trainer.weights.base import Cost, PublishReport, WeightBridge
from example_trainer.weights.connection import check_server, named_token
from example_trainer.weights.delivery import Proof, WeightDelivery
from example_trainer.weights.members import QUICK_SECONDS, Member, MemberCalls, RegisteredMembers, Registry
from example_trainer.weights.publish_loop import ParityCheck

logger = logging.getLogger(__name__)

FIRST_LIMIT_SECONDS, LEAST_LIMIT_SECONDS = 60.0, 10.0
PROOF_SECONDS = 120.0
"""Limit of an answer to a proof, which on a busy server comes after those to the requests before it."""
USUAL_OF = 5
"""Number of publishes of which the longest is the usual time of one."""


class RegisteredBridge(WeightBridge):
    """Implements `WeightBridge` for the servers that are registered at the broker."""

    def __init__(
        self,
        config: TrainingOptions,
        registry: Registry,
        delivery: WeightDelivery,
        calls: MemberCalls,
        *,
        should_stop: ShouldStop = never,
    ) -> None:
        """Keep the arguments; waits for a server end once `should_stop` returns True."""
        self._config = config
        self._delivery = delivery
        self._calls = calls
        self._should_stop = should_stop
        self._members = RegisteredMembers(
            registry,
            config.policy,
            token=named_token(config.bridge_token),
            examine=self._examine,
            calls=calls,
            should_stop=should_stop,
        )
        self._policy: Policy | None = None
        self._check = ParityCheck(every=config.sync_check_every)
        self._usual: deque[float] = deque(maxlen=USUAL_OF)
        """Durations of the last deliveries in which no server was lost."""
        self._has_published = False

    def prepare(self) -> Policy:
        """Load the policy, and wait for the servers."""
        config = self._config
        self._policy = policy = load_policy(policy_options(config))
        self._delivery.attach(policy)
        self._members.wait_for(max(1, config.num_inference_nodes), config.wait_timeout, refuses_unfit=True)
        return policy

    def publish(self, version: int) -> PublishReport:
        """Bring the current masters to every member that can serve them, as `version`; see the module's docstring.

        A repeated publish of the same version reaches the servers that do not have it yet.
        """
        if self._policy is None:
            raise PublishFailed("nothing is loaded; call prepare() before publish()")
        started = time.monotonic()
        cost = Cost()
        serving: list[Member] = []
        while not serving:
            left = self._config.wait_timeout - (time.monotonic() - started)
            if left <= 0:
                raise PublishFailed(f"version {version} reached no server in {self._config.wait_timeout:g} s")
            members = self._members.wait_for(1, left)
            serving = self._prove(self._deliver(members, version, cost), version)
        servers = tuple(member.lease_id for member in serving)
        report = cost.report(version, time.monotonic() - started, servers)
        self._delivery.note(report)
        self._has_published = True
        return report

    def highest_version(self) -> int:
        infos = [member.info for member in self._members.present()]
        return max((max(info.policy_version or 0, info.highest_version or 0) for info in infos), default=0)

    def should_publish(self, steps_since_publish: int) -> bool:
        return self._delivery.should_publish(steps_since_publish)

    def needs_publish(self) -> bool:
        """Return True if a server waits for a policy: it is new, has restarted, or had no part in the last publish."""
        try:
            return self._has_published and self._members.has_joiners()
        except AtroposError as error:
            logger.debug("the registered servers are unknown: %s", error)
            return False

    def close(self) -> None:
        if self._policy is not None:
            self._delivery.close(self._members.known)
        self._members.close()
        self._calls.close()

    def _examine(self, info: ServerInfo, url: str) -> None:
        assert self._policy is not None
        check_server(url, info.dtype, info.head_dtype, self._policy)
        self._delivery.examine(info, url)

    def _deliver(self, members: Sequence[Member], version: int, cost: Cost) -> list[Member]:
        """Deliver to the members; return those that have the version."""
        limit_seconds = max(LEAST_LIMIT_SECONDS, 2 * max(self._usual)) if self._usual else FIRST_LIMIT_SECONDS
        began = time.monotonic()
        delivered = self._delivery.deliver(members, version, limit_seconds=limit_seconds)
        cost.add(delivered.cost)
        for member, error in delivered.lost.items():
            self._members.lose(member, error)
        if not delivered.lost:
            self._usual.append(time.monotonic() - began)
        return delivered.served

    def _prove(self, served: Sequence[Member], version: int) -> list[Member]:
        """Prove the version at members where none is proven yet, and at all if a check is due; return the sound ones.

        If one computes something else while others are sound, it is refused; if none is sound, or one that fails was
        proven before, the fault is the trainer's and is raised.
        """
        due = self._check.is_due()
        waiting = [member for member in served if due or not member.proven]
        if not waiting:
            return list(served)
        proof = self._delivery.proof()
        failed: dict[Member, ProofFailed] = {}
        lost: list[Member] = []
        for member in waiting:
            try:
                self._prove_one(member, version, proof)
            except ProofFailed as error:
                failed[member] = error
            except (ServerRefused, ServerUnavailable) as error:
                self._members.lose(member, error)
                lost.append(member)
        sound = [member for member in served if member not in failed and member not in lost]
        for member, failure in failed.items():
            if member.proven or not sound:
                raise failure
            self._members.refuse(member, failure)
        for member in sound:
            member.proven = True
            self._members.trust(member)
        return sound

    def _prove_one(self, member: Member, version: int, proof: Proof) -> None:
        self._delivery.check(member, version)
        member.client.patience_seconds = PROOF_SECONDS
        self._check.run(
            proof.policy,
            partial(self._generate, member),
            version=version,
            boot_id=member.info.boot_id,
            max_model_len=member.info.max_model_len,
            compare_with=proof.compare_with,
        )

    def _generate(self, member: Member, request: dict[str, Any]) -> dict[str, Any]:
        """Return a server's answer; raise an error as soon as the server does not answer requests for its state.

        Raises `WaitStopped` once the trainer is told to stop.
        """
        asked = BackgroundCall(partial(member.client.generate, request), name="proof")
        while not asked.wait(QUICK_SECONDS):
            if self._should_stop():
                raise WaitStopped(f"told to stop while {member.client.url} answers a proof")
            member.client.info()  # raises an error if the server does not answer at all
        return asked.result()
