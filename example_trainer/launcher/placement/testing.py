"""A placement for tests: its seats only record which programs are started, and a test sets their state and losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from example_trainer.launcher.placement.roles import PlacementFailed, Places, ProgramState, Role, Seat
from example_trainer.processes.child import ChildSpec


class FakeSeat(Seat):
    """A seat whose program is only recorded."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.started: list[ChildSpec] = []
        self.stops = 0
        self.now = ProgramState()

    def start(self, spec: ChildSpec) -> None:
        self.started.append(spec)
        self.now = ProgramState()

    def state(self) -> ProgramState:
        return self.now

    def stop(self, grace_seconds: float) -> None:
        del grace_seconds
        self.stops += 1

    def free_port(self) -> int:
        return 29_500


class FakePlacement:
    """Gives as many seats as it has, each on a node of its own."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.places: dict[str, Sequence[FakeSeat]] = {}
        self.losses: dict[str, str] = {}
        self.is_closed = False
        self._given = 0

    def place(self, roles: Sequence[Role]) -> Places:
        wanted = sum(role.seats for role in roles)
        if wanted > self.free:
            raise PlacementFailed(f"wanted {wanted}, free {self.free}")
        self.free -= wanted
        given = {role.name: [self._seat(name) for name in role.program_names] for role in roles}
        self.places.update(given)
        return given

    def release(self, role: str) -> None:
        released = self.places.pop(role, ())
        self.free += sum(seat.name not in self.losses for seat in released)  # a lost node does not come back
        for seat in released:
            self.losses.pop(seat.name, None)

    def lost(self) -> Mapping[str, str]:
        return dict(self.losses)

    def describe(self) -> Mapping[str, Any]:
        return {"kind": "fake"}

    def close(self) -> None:
        self.is_closed = True

    def _seat(self, name: str) -> FakeSeat:
        self._given += 1
        return FakeSeat(f"{name}.{self._given}", f"10.0.0.{self._given}")
