"""The members of a publish: the servers that it goes to, and the calls made to all of them at once.

`RegisteredMembers` takes them from the broker's registry: members are the servers of the policy that serve or join
when a publish begins. A server that is unfit (another dtype, no adapters) is refused for as long as its lease lasts;
one that does not answer is left out for a while, longer each time, so that it does not delay every publish.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from atropos_api.wire import InferenceServer, ServerSet
from example_trainer.errors import ServerRefused, ServerUnavailable, TrainerError
from example_trainer.weight_protocol.client import NotYet, ServerClient, ServerInfo, ShouldStop, never, wait_for
from example_trainer.weight_protocol.manifest import read_token

logger = logging.getLogger(__name__)

T = TypeVar("T")
CALLED_AT_ONCE = 64
WAITING_AT_ONCE = 4096
"""Calls that may wait for each other: as many as a broker keeps servers. A thread is made only where none is idle."""
QUICK_SECONDS = 2.0
"""Time in which a server that can take part in a publish reports its state."""

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 5.0, 120.0
MEMBER_STATES = frozenset({"serving", "joining"})


@dataclass(eq=False, slots=True)
class Member:
    """One server: its client and the last known state."""

    client: ServerClient
    info: ServerInfo
    lease_id: str = ""
    """Its lease at the broker; empty for a server that is not registered."""
    proven: bool = False
    """True once a publish to it has been proven under this lease."""
    generated_tokens_total: int = 0


class MemberCalls:
    """Calls to several servers at once."""

    def __init__(self, most: int = CALLED_AT_ONCE) -> None:
        self._pool = ThreadPoolExecutor(most, thread_name_prefix="servers")
        # To join a broadcast each server waits for all others, so none of these calls may wait for another to end.
        self._waiting = ThreadPoolExecutor(WAITING_AT_ONCE, thread_name_prefix="broadcast")
        self.submit = self._waiting.submit

    def each(self, members: Sequence[Member], call: Callable[[Member], T]) -> dict[Member, T | TrainerError]:
        """Return each server's answer, or the error with which its call ended."""

        def attempt(member: Member) -> T | TrainerError:
            try:
                return call(member)
            except TrainerError as error:
                return error

        return dict(zip(members, self._pool.map(attempt, members), strict=True))

    def all(self, members: Sequence[Member], call: Callable[[Member], T]) -> list[T]:
        """Return the servers' answers; raise the first error once all calls have ended."""
        answers = []
        for answer in self.each(members, call).values():
            if isinstance(answer, TrainerError):
                raise answer
            answers.append(answer)
        return answers

    def close(self) -> None:
        self._pool.shutdown(wait=False)
        self._waiting.shutdown(wait=False)


class Registry(Protocol):
    """The call that is made to the broker."""

    def get_servers(self, policy: str | None = None) -> ServerSet: ...


@dataclass(slots=True)
class _Trouble:
    """The time for which a server is left out."""

    until: float
    pause_seconds: float


class RegisteredMembers:
    """The servers of one policy at the broker, as far as this trainer can publish to them."""

    def __init__(
        self,
        registry: Registry,
        policy_name: str,
        *,
        token: str | None,
        examine: Callable[[ServerInfo, str], None],
        calls: MemberCalls,
        should_stop: ShouldStop = never,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep the arguments; `examine` raises a `TrainerError` for a server, at an address, that is unfit."""
        self._should_stop = should_stop
        self._registry = registry
        self._policy_name = policy_name
        self._token = token
        self._examine = examine
        self._calls = calls
        self._clock = clock
        self._known: dict[str, Member] = {}
        self._unfit: dict[str, TrainerError] = {}
        self._troubles: dict[str, _Trouble] = {}

    def wait_for(self, count: int, timeout_seconds: float, *, refuses_unfit: bool = False) -> list[Member]:
        """Return the members once there are so many; with `refuses_unfit`, raise the error of an unfit one if there
        is no other.
        """

        def poll() -> list[Member]:
            members = self.present()
            if not members and self._unfit and refuses_unfit:
                raise next(iter(self._unfit.values()))
            if len(members) < count:
                raise NotYet(f"{len(members)} of {count} are there")
            return members

        what = f"{count} registered inference server{'s' * (count > 1)} of the policy {self._policy_name}"
        return wait_for(poll, what=what, timeout_seconds=timeout_seconds, should_stop=self._should_stop)

    def present(self) -> list[Member]:
        """Return the members of a publish that begins now, with their present state."""
        found = self._registry.get_servers(self._policy_name)
        rows = {row.lease_id: row for row in found.servers if row.state in MEMBER_STATES and row.mode != "fixed"}
        if found.complete:
            self._forget(lease_id for lease_id in [*self._known, *self._unfit, *self._troubles] if lease_id not in rows)
        due = [row for row in rows.values() if row.lease_id not in self._known and self._is_due(row.lease_id)]
        for row in due:
            self._connect(row)
        asked = [member for lease_id, member in self._known.items() if self._is_due(lease_id)]
        for member, info in self._calls.each(asked, look).items():
            listed = rows.get(member.lease_id)
            if isinstance(info, TrainerError):
                self.lose(member, info)
            elif listed is not None and info.boot_id != listed.boot_id:  # another server has its address
                self.lose(member, _replaced(listed))
            else:
                member.info = info
        return [member for lease_id, member in self._known.items() if self._is_due(lease_id)]

    def has_joiners(self) -> bool:
        """Return True if a server waits for a publish that could reach it."""
        rows = self._registry.get_servers(self._policy_name).servers
        return any(row.state == "joining" and row.mode != "fixed" and self._is_due(row.lease_id) for row in rows)

    @property
    def known(self) -> list[Member]:
        """All servers to which there is a connection, also those that are left out at present."""
        return list(self._known.values())

    def lose(self, member: Member, error: Exception) -> None:
        """Leave a server out for a while, because it did not take part in a publish."""
        member.proven = False
        self._leave_out(member.lease_id, member.client.url, error)

    def refuse(self, member: Member, error: TrainerError) -> None:
        """Leave a server out for as long as its lease lasts."""
        self._known.pop(member.lease_id, None)
        self._unfit[member.lease_id] = error
        member.client.close()
        logger.error("the server at %s gets no policy: %s", member.client.url, error)

    def trust(self, member: Member) -> None:
        """Forget earlier troubles of a server that has taken part in a publish."""
        self._troubles.pop(member.lease_id, None)

    def close(self) -> None:
        self._forget(list(self._known))

    def _leave_out(self, lease_id: str, url: str, error: Exception) -> None:
        before = self._troubles.get(lease_id)
        pause = FIRST_PAUSE_SECONDS if before is None else min(2 * before.pause_seconds, LONGEST_PAUSE_SECONDS)
        self._troubles[lease_id] = _Trouble(self._clock() + pause, pause)
        logger.warning("the server at %s is left out for %.0f s: %s", url, pause, error)

    def _is_due(self, lease_id: str) -> bool:
        trouble = self._troubles.get(lease_id)
        return lease_id not in self._unfit and (trouble is None or self._clock() >= trouble.until)

    def _connect(self, row: InferenceServer) -> None:
        client = ServerClient(row.url, self._token, repeats=False)
        try:
            info = _registered_info(client, row)
        except (ServerRefused, ServerUnavailable) as error:
            client.close()
            self._leave_out(row.lease_id, row.url, error)
            return
        member = Member(client, info, row.lease_id)
        try:
            # A server on this host may have a token of its own, which only its user can read.
            is_here = info.hostname == socket.gethostname()
            if is_here and info.token_path and (token := read_token(info.token_path, row.url)):
                client.use_token(token)
            self._examine(info, row.url)
        except TrainerError as error:
            self.refuse(member, error)
        else:
            self._known[row.lease_id] = member

    def _forget(self, lease_ids: Iterable[str]) -> None:
        for lease_id in list(lease_ids):
            member = self._known.pop(lease_id, None)
            if member is not None:
                member.client.close()
            self._unfit.pop(lease_id, None)
            self._troubles.pop(lease_id, None)


def _registered_info(client: ServerClient, row: InferenceServer) -> ServerInfo:
    info = client.info(timeout_seconds=QUICK_SECONDS)
    if info.boot_id != row.boot_id:
        raise _replaced(row)
    return info


def _replaced(row: InferenceServer) -> ServerUnavailable:
    return ServerUnavailable(f"another server than the registered one answers at {row.url}")


def look(member: Member) -> ServerInfo:
    """Return the present state of a server, which answers at once if it can take part in a publish."""
    return member.client.info(timeout_seconds=QUICK_SECONDS)
