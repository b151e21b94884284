"""The protocol between a launch and what places its programs: a launch asks for roles, and gets seats.

A *role* is one program, or a gang: several processes of one program, such as the ranks of a trainer, that start and
end together. A *seat* is the part of a node that one process of a role has got, with a supervisor of its own. Programs
without a role run beside the launcher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from example_trainer.errors import TrainerError
from example_trainer.processes.child import ChildSpec


class PlacementFailed(TrainerError):
    """Raised if a role cannot be placed: its message says what was wanted, what is there, and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """One program that is to be placed, and the resources of each of its seats."""

    name: str
    cpus: float = 1.0
    gpus: float = 0.0
    seats: int = 1
    """Number of its processes: more than one is a gang."""
    is_reached: bool = False
    """True if programs on other nodes connect to it: it is told its node's address as MASTER_ADDR."""

    @property
    def program_names(self) -> tuple[str, ...]:
        """The name of each process, by rank: `trainer`, `trainer-rank-1`."""
        return (self.name, *(f"{self.name}-rank-{rank}" for rank in range(1, self.seats)))

    def describe(self) -> str:
        each = f"{self.cpus:g} CPU, {self.gpus:g} GPU"
        return f"{self.name} ({self.seats} seats of {each})" if self.seats > 1 else f"{self.name} ({each})"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramState:
    """The state of one process, as the supervisor of its seat sees it."""

    exit_code: int | None = None
    loss: str | None = None
    """The name of a child process that has ended although this one still runs and needs it; None if there is none."""


class Seat(Protocol):
    """A part of a node that one process of a role has got."""

    name: str
    address: str
    """The node's address, at which other nodes reach it."""

    def start(self, spec: ChildSpec) -> None:
        """Start the program; its state is `ProgramState()` until the seat has reported another one."""

    def state(self) -> ProgramState:
        """Return the newest state that is known, without waiting for the node."""

    def stop(self, grace_seconds: float) -> None:
        """End the program with all that it has started, if there is one; a seat that is lost has none."""

    def free_port(self) -> int:
        """Return a port of the node that no other process gets until the next program has been started."""


Places = Mapping[str, Sequence[Seat]]
"""The seats by the name of the role, in the order of ranks."""


class Placement(Protocol):
    """Gives seats to roles. Any thread may call it."""

    def place(self, roles: Sequence[Role]) -> Places:
        """Place all roles or none; raise `PlacementFailed` once the time is over, or after `close`."""

    def release(self, role: str) -> None:
        """Give the seats of a role back; a gang that has lost one seat is placed again as a whole."""

    def lost(self) -> Mapping[str, str]:
        """Return the reason for each lost seat that was not released; raise `ChildFailed` if all are lost."""

    def describe(self) -> Mapping[str, Any]:
        """Return the kind of this placement, and the node of each seat."""

    def close(self) -> None:
        """Release every seat, and end each call of `place` that still waits."""


class LocalPlacement:
    """Gives no seat: every program runs beside the launcher."""

    def place(self, roles: Sequence[Role]) -> Places:
        if roles:
            raise PlacementFailed(f"{roles[0].name}: a local placement has no seats; use --placement ray")
        return {}

    def release(self, role: str) -> None:
        del role

    def lost(self) -> Mapping[str, str]:
        return {}

    def describe(self) -> Mapping[str, Any]:
        return {"kind": "local"}

    def close(self) -> None:
        return None
