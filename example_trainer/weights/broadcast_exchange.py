"""The exchange of a broadcast: weights reach several servers over one process group, and all switch together.

Each server receives the tensors without loading them and reports a checksum; only when these agree, all are paused and
load; only when all have loaded, they resume. After a failure before that point all resume with the old version. The
group is kept from one publish to the next as long as its members are the same server processes.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed

from atropos_api.common.identity import is_this_host, split_address
from example_trainer.api import BackgroundCall
from example_trainer.errors import ProofFailed, PublishFailed, ServerRefused, ServerUnavailable, TrainerError
from example_trainer.options.training_options import TrainingOptions
from example_trainer.processes.ports import LOOPBACK, as_port, free_port
from example_trainer.weight_protocol.broadcast_group import (
    TIMEOUT_SECONDS,
    BroadcastGroup,
    Rendezvous,
    gpu_uuid,
)
from example_trainer.weight_protocol.client import ServerClient, ServerInfo, ShouldStop, never
from example_trainer.weight_protocol.transfer import is_loopback
from example_trainer.weights.base import Cost
from example_trainer.weights.members import Member, MemberCalls, look
from example_trainer.weights.publish_loop import OpenPublish
from example_trainer.weights.weight_source import WeightSource

logger = logging.getLogger(__name__)

T = TypeVar("T")
FAILURES = (RuntimeError, ProofFailed)
"""Failures of the process group and of the transfer, which pass once all have joined a new group."""

GIVEN_UP_LEASE_SECONDS = 20.0
"""Lease of a publish where servers are given up: one that is not told of its end resumes after this time."""

SLOWEST_BYTES_PER_SECOND = 50e6
"""Rate below which a server that gets or reads whole weights is given up."""

_POLL_SECONDS = 0.01


@dataclass(slots=True)
class _JoinedGroup:
    """A process group that all have joined, and the boot ids of its servers."""

    group: BroadcastGroup
    boots: list[str] = field(default_factory=list)


class BroadcastExchange:
    """Sends the weights of a policy to servers and makes them switch to a version, all or none of them."""

    def __init__(
        self,
        config: TrainingOptions,
        calls: MemberCalls,
        *,
        lease_seconds: float,
        gives_up: bool = False,
        should_stop: ShouldStop = never,
    ) -> None:
        """Keep the arguments; with `gives_up`, nothing waits any more for a server that does not answer.

        Once `should_stop` returns True, no fence waits for running requests to end.
        """
        self.patience_seconds = TIMEOUT_SECONDS
        """Limit for all to join, for one bucket, and for a server to be told that it resumes."""
        self.failed: dict[Member, Exception] = {}
        """The servers that caused the failure of the last exchange, each with its error."""
        self._config = config
        self._lease_seconds = lease_seconds
        self._gives_up = gives_up
        self._should_stop = should_stop
        self._calls = calls
        self._joined: _JoinedGroup | None = None
        self._transfer_id = ""
        """Id of the weights that were sent last."""

    def send_and_switch(
        self, members: Sequence[Member], source: WeightSource, device: torch.device, version: int, cost: Cost
    ) -> None:
        """Send the weights as they are now, and have them served as `version`."""
        self.failed = {}
        boots = [member.info.boot_id for member in members]
        if self._joined is None or self._joined.boots != boots:
            self.leave(members)
            self._joined = _JoinedGroup(self._join(members, device), boots)
        self._joined.group.timeout_seconds = self.patience_seconds
        self._send(members, source, self._joined.group)
        self._switch_version(members, version, cost)

    def leave(self, members: Sequence[Member]) -> None:
        """Close the group: no server waits in it any longer, and received tensors that are not loaded are discarded."""
        joined, self._joined = self._joined, None
        if joined is not None:
            joined.group.close()
            self._calls.all(members, lambda each: _leave_group(each.client))

    def _join(self, members: Sequence[Member], device: torch.device) -> BroadcastGroup:
        """Return a new group of the trainer, as rank 0, and the workers of these servers."""
        *firsts, size = accumulate((member.info.workers for member in members), initial=1)
        address, fixed_port = meeting_address(self._config, os.environ)
        with ExitStack() as held:
            port = fixed_port or port_at(address, held)
            rendezvous = Rendezvous(address, port, 0, size, self._config.broadcast_backend)
            group_id = uuid.uuid4().hex
            waiting = [
                self._calls.submit(member.client.join_broadcast, group_id, replace(rendezvous, rank=first))
                for first, member in zip(firsts, members, strict=True)
            ]
            group = self._meet(rendezvous, device, members, waiting, meets_again=fixed_port is not None)
        try:
            gpus = {member.client.url: each.result() for member, each in zip(members, waiting, strict=True)}
            if self._config.broadcast_backend == "nccl":
                refuse_shared_gpu(gpu_uuid(device), gpus)
        except BaseException:
            group.close()
            raise
        return group

    def _meet(
        self,
        rendezvous: Rendezvous,
        device: torch.device,
        members: Sequence[Member],
        waiting: Sequence[Future[Any]],
        *,
        meets_again: bool,
    ) -> BroadcastGroup:
        """Return the trainer's membership once all have joined; raise a server's error without waiting for the others.

        Joining cannot be interrupted: a thread is left behind that waits for the rest of its time. If the next group
        `meets_again` at the same port, this one has to leave it first.
        """
        abandoned = threading.Event()

        def join() -> BroadcastGroup:
            group = BroadcastGroup.join(rendezvous, device, self.patience_seconds)
            if abandoned.is_set():
                group.close()
            return group

        joining = BackgroundCall(join, name="join-broadcast")
        while not joining.wait(_POLL_SECONDS):
            if failed := self._note_failed(members, waiting):
                abandoned.set()
                if meets_again:
                    joining.wait()
                raise failed[0]
        try:
            return joining.result()
        except RuntimeError:
            if not self._gives_up:
                wait(waiting)
            raise

    def _send(self, members: Sequence[Member], source: WeightSource, group: BroadcastGroup) -> None:
        """Send the weights to every server, to be kept without loading; raise unless all received what was sent."""
        self._transfer_id = uuid.uuid4().hex
        longest = sum(bucket.nbytes for bucket in source.buckets) / SLOWEST_BYTES_PER_SECOND
        waiting = [
            self._calls.submit(
                member.client.receive_broadcast,
                self._transfer_id,
                source.buckets,
                member.client.patience_seconds + longest,
            )
            for member in members
        ]
        for each in waiting:
            each.add_done_callback(partial(_close_if_failed, group))
        try:
            digest = group.send(source.buckets, partial(source.packed, device=group.device))
        except BaseException:
            causes = self._note_failed(members, waiting)
            group.close()  # ends the servers' wait for the remaining buckets
            if not self._gives_up:
                wait(waiting)
            if causes:  # a server's error is the cause; this one follows from it
                raise causes[0] from None
            raise
        wait(waiting)
        if failed := self._note_failed(members, waiting):
            raise failed[0]
        received = {member: each.result() for member, each in zip(members, waiting, strict=True)}
        if wrong := [member for member, found in received.items() if found != digest]:
            urls = ", ".join(member.client.url for member in wrong)
            error = ProofFailed(f"the bytes received differ from those sent, at {urls}")
            self.failed = dict.fromkeys(wrong, error)
            raise error

    def _switch_version(self, members: Sequence[Member], version: int, cost: Cost) -> None:
        """Pause all servers, load on all, resume all; a failure before all have loaded is undone on all."""
        config, opened = self._config, dict[Member, OpenPublish]()
        with ExitStack() as leases:

            def begin(member: Member) -> None:
                publish = OpenPublish(
                    member.client,
                    lease_seconds=self._lease_seconds,
                    drain_seconds=config.drain_seconds,
                    in_flight=config.in_flight,
                    should_stop=self._should_stop,
                )
                opened[member] = leases.enter_context(publish)

            def load(member: Member) -> None:
                member.client.load_broadcast(opened[member].publish_id, version, self._transfer_id)

            def abort(member: Member) -> None:
                # A server may have to load its previous weights again.
                opened[member].abort(timeout_seconds=member.client.patience_seconds)

            try:
                self._call_each(members, begin)
                self._call_each(members, load)
            except BaseException:
                self._calls.all(self._reachable(list(opened)), abort)
                raise
            # All have loaded, so each has to resume: the call is repeated until the lease has lapsed.
            seconds = self.patience_seconds if self._gives_up else self._lease_seconds
            ended = self._call_each(members, lambda each: opened[each].end(version, within_seconds=seconds))
        for member, answer in zip(members, ended, strict=True):
            cost.note(member, opened[member].fence, answer)

    def _note_failed(self, members: Sequence[Member], waiting: Sequence[Future[Any]]) -> list[BaseException]:
        """Return the errors with which calls have ended so far."""
        ended = [(member, each.exception()) for member, each in zip(members, waiting, strict=True) if each.done()]
        self.failed = {member: error for member, error in ended if isinstance(error, Exception)}
        return [error for _, error in ended if error is not None]

    def _call_each(self, members: Sequence[Member], call: Callable[[Member], T]) -> list[T]:
        """Call these servers in parallel and return the answers; raise the first error once all calls have ended."""
        answers = self._calls.each(members, call)
        self.failed = {member: answer for member, answer in answers.items() if isinstance(answer, TrainerError)}
        for error in self.failed.values():
            raise error
        return [answer for answer in answers.values() if not isinstance(answer, TrainerError)]

    def _reachable(self, members: Sequence[Member]) -> Sequence[Member]:
        """Return the servers to tell of an abort: all, or those that answer if the others are given up."""
        if not self._gives_up:
            return members
        return [member for member, info in self._calls.each(members, look).items() if isinstance(info, ServerInfo)]


def _close_if_failed(group: BroadcastGroup, receiving: Future[str]) -> None:
    """End the sender's wait as soon as a receiver reports a failure: NCCL does not notice that a member is gone."""
    if receiving.exception() is not None:
        group.close()


def _leave_group(client: ServerClient) -> None:
    try:
        client.leave_broadcast()
    except (ServerRefused, ServerUnavailable) as error:
        logger.debug("%s", error)


def meeting_address(config: TrainingOptions, environ: Mapping[str, str]) -> tuple[str, int | None]:
    """Return the host and port at which the servers meet the trainer; None for any free port."""
    if config.broadcast_address is not None:
        return split_address(config.broadcast_address)
    return trainer_address(config.world_size, environ)


def trainer_address(world_size: int, environ: Mapping[str, str]) -> tuple[str, int | None]:
    """Return the host of the trainer, and the port that it may listen on there; None for any free port.

    `MASTER_PORT` is taken by the ranks' own group if there are several, and by torchrun if it has started this process.
    """
    port_is_taken = world_size > 1 or "TORCHELASTIC_RUN_ID" in environ
    port = None if port_is_taken else environ.get("MASTER_PORT")
    # Kubernetes sets MASTER_PORT to an address where a service has the name "master".
    return environ.get("MASTER_ADDR", LOOPBACK), as_port(port, "$MASTER_PORT") if port else None


def port_at(address: str, held: ExitStack) -> int:
    """Return a port of that address on which no process listens; no other gets it until `held` is closed."""
    try:
        return free_port(address, held=held)
    except OSError:  # an address that leads to this machine but is not its own
        return free_port("0.0.0.0", held=held)  # noqa: S104 - no socket listens on it


def refuse_unreachable(address: str, urls: Sequence[str]) -> None:
    """Raise `PublishFailed` if a server on another host is to meet the trainer on this host's loopback interface."""
    if is_loopback(address) and (far := [url for url in urls if not is_this_host(urlsplit(url).hostname or "")]):
        raise PublishFailed(
            f"the server at {far[0]} cannot meet the trainer at {address}, which is the loopback interface; set "
            "--broadcast-address to an address of this host that it reaches"
        )


def refuse_nccl(device: torch.device) -> None:
    """Raise `PublishFailed` if the trainer's torch has no NCCL, or the trainer no GPU."""
    reasons = {
        "this build of torch has no NCCL": not torch.distributed.is_nccl_available(),
        f"the trainer's device is {device}": device.type != "cuda",
    }
    for reason, holds in reasons.items():
        if holds:
            raise PublishFailed(f"--broadcast-backend nccl: {reason}; use --broadcast-backend gloo")


def refuse_shared_gpu(own: str | None, gpus: Mapping[str, Sequence[str | None]]) -> None:
    """Raise `PublishFailed` if two members of a group of NCCL use one GPU, which NCCL cannot do.

    `gpus` has the GPU of each worker of each server, by the server's address.
    """
    holders = {own: "the trainer"} if own is not None else {}
    for url, gpu in ((url, gpu) for url, found in gpus.items() for gpu in found):
        if gpu is None:
            raise PublishFailed(f"--broadcast-backend nccl: the server at {url} has no GPU; use gloo")
        if gpu in holders:
            raise PublishFailed(
                f"--broadcast-backend nccl: the server at {url} and {holders[gpu]} use one GPU ({gpu}), which NCCL "
                "refuses; give each a GPU of its own (--vllm-gpu), or use --broadcast-backend gloo"
            )
        holders[gpu] = f"the server at {url}"
