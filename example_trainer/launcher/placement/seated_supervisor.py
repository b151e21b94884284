"""A supervisor whose programs run in seats; those without a role run beside the launcher, as under `Supervisor`.

A gang is one program here: it has succeeded once all its processes have, and has failed once one of them fails. A
process that loses another one exits with a refusal, perhaps before the other has exited. The exit code of the other
tells more, so it is awaited. Then all of them are stopped, and started again together. Where a seat is lost, the role
is released and placed again in a thread, so that the launch goes on meanwhile; a role that finds no place in time has
failed once more.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from atropos_api.common.errors import REFUSED
from example_trainer.launcher.placement.roles import Placement, PlacementFailed, Places, Role, Seat
from example_trainer.launcher.supervisor import STOP_GRACE_SECONDS, Supervisor
from example_trainer.processes.child import ChildSpec, LostProcess, SupervisedProgram
from example_trainer.processes.tree import wait_until

_PARALLEL_STOPS = 32
_WAIT_INTERVAL_SECONDS = 0.1
_GANG_ENDS_SECONDS = 25.0
"""Time for the others of a gang to end after a refusal: a trainer process ends within 20 s of its last line."""


@dataclass(kw_only=True, slots=True)
class SeatedProgram(SupervisedProgram):
    """One program in the seats of its role."""

    role: Role
    seats: Sequence[Seat] = ()
    """Its seats; none while it waits for a place."""
    _code: int | None = field(default=None)
    _refused_at: float | None = field(default=None)

    @property
    def exit_code(self) -> int | None:
        return self._code

    def look(self, lost: Mapping[str, str]) -> None:
        """Take over the state of its processes; `lost` has the reasons for the lost seats by name."""
        codes: dict[str, int | None] = {}
        for name, seat in zip(self.role.program_names, self.seats, strict=bool(self.seats)):
            state = seat.state()
            is_lost = seat.name in lost and state.exit_code is None  # an ended process does not need its seat
            loss = f"its seat on {seat.address} ({lost[seat.name]})" if is_lost else state.loss
            if loss is not None:
                self.log_path = self.log_path.with_name(f"{name}.log")
            if loss is not None and self.loss is None:
                self.loss = LostProcess(title=loss, noticed_at=time.monotonic())
            codes[name] = state.exit_code
        failed = sorted((name for name, code in codes.items() if code), key=lambda name: codes[name] == REFUSED)
        if failed and not self._awaits_others(codes):
            self.log_path = self.log_path.with_name(f"{failed[0]}.log")
            self._code = codes[failed[0]]
        elif codes and set(codes.values()) == {0}:
            self._code = 0

    def _awaits_others(self, codes: Mapping[str, int | None]) -> bool:
        """Return True if all that have failed have refused something, and others still run, for a while."""
        if {*codes.values()} - {None, 0} != {REFUSED} or None not in codes.values():
            return False
        self._refused_at = self._refused_at or time.monotonic()
        return time.monotonic() - self._refused_at < _GANG_ENDS_SECONDS


class SeatedSupervisor(Supervisor):
    """Starts, watches and ends the programs of one launcher, in seats and here."""

    def __init__(self, log_dir: Path, placement: Placement, *, variables: Mapping[str, str] | None = None) -> None:
        """`variables` are given to each program in a seat: it inherits its node's, not the launcher's."""
        super().__init__(log_dir)
        self._logs = log_dir
        self._placement = placement
        self._variables = variables or {}
        self._roles: dict[str, Role] = {}
        self._seats: dict[str, Sequence[Seat]] = {}
        self._programs: dict[str, SeatedProgram] = {}
        self._placing: dict[str, Future[Places]] = {}
        self._threads = ThreadPoolExecutor(_PARALLEL_STOPS, thread_name_prefix="seats")

    def place(self, roles: Sequence[Role], on_wait: Callable[[], None]) -> None:
        """Place all roles of the launch, before any program is started; raise `PlacementFailed` if one has no place.

        `on_wait` is called meanwhile, and may end the wait by an error, also while a call to the cluster hangs.
        """
        if not roles:
            return
        placing = self._begin_placing(roles)
        while not placing.done():
            on_wait()
            self._placement.lost()  # raises if there is no cluster any more
            wait([placing], _WAIT_INTERVAL_SECONDS)
        self._seats.update(placing.result())
        self._roles.update((role.name, role) for role in roles)

    def describe_places(self) -> Mapping[str, Any]:
        return self._placement.describe()

    def __getitem__(self, name: str) -> SupervisedProgram:
        return self._programs[name] if name in self._programs else super().__getitem__(name)

    def find(self, name: str) -> SupervisedProgram | None:
        return self._programs.get(name) or super().find(name)

    def __contains__(self, name: str) -> bool:
        return name in self._programs or super().__contains__(name)

    def start(self, spec: ChildSpec, *, restarted: int = 0) -> SupervisedProgram:
        """Start a program here, or in the seats of its role; one without seats is started once they are found."""
        role = self._role_of(spec.name)
        if role is None:
            return super().start(spec, restarted=restarted)
        program = SeatedProgram(
            spec=replace(spec, environment={**self._variables, **spec.environment}),
            log_path=self._logs / f"{spec.name}.log",
            started_at=time.monotonic(),
            restarted=restarted,
            role=role,
        )
        self._programs[spec.name] = program
        if role.name in self._seats:
            self._start_in_seats(program)
        elif role.name not in self._placing:  # an earlier start, which was stopped since, may have asked
            self._placing[role.name] = self._begin_placing([role])
        return program

    def failed(self) -> list[SupervisedProgram]:
        """Return the programs that ended or lost something, including those that found no place."""
        failed = super().failed()
        for name, found in list(self._placing.items()):
            if found.done():
                del self._placing[name]
                self._take_seats(name, found)
        if not self._programs:
            return failed
        lost = self._placement.lost()
        for program in self._programs.values():
            program.look(lost)
        return [*failed, *(program for program in self._programs.values() if program.has_failed or program.loss)]

    def stop(
        self, name: str, *, grace_seconds: float = STOP_GRACE_SECONDS, is_urgent: Callable[[], bool] = lambda: False
    ) -> None:
        program = self._programs.pop(name, None)
        if program is None:
            super().stop(name, grace_seconds=grace_seconds, is_urgent=is_urgent)
            return
        self._stop_all(program.seats, grace_seconds, is_urgent)
        lost = self._placement.lost()
        if any(seat.name in lost for seat in program.seats):  # else the same seats are used again
            self.vacate(name)

    def vacate(self, name: str) -> None:
        """Give the seats of a role back, also those that it is only about to get."""
        if self._seats.pop(name, None) is not None:
            self._placement.release(name)

    def close(self, *, grace_seconds: float = STOP_GRACE_SECONDS) -> None:
        """End the programs in seats, then those here: the broker still gets the last messages of the former."""
        programs = list(self._programs.values())
        self._programs.clear()
        self._stop_all((seat for program in programs for seat in program.seats), grace_seconds)
        super().close(grace_seconds=grace_seconds)
        self._placement.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin_placing(self, roles: Sequence[Role]) -> Future[Places]:
        """Place roles in a thread that Python does not wait for at its end: a head that is gone never answers."""
        placing: Future[Places] = Future()

        def place() -> None:
            try:
                placing.set_result(self._placement.place(roles))
            except BaseException as error:  # noqa: BLE001 - it is raised where the places are awaited
                placing.set_exception(error)

        threading.Thread(target=place, name="placement", daemon=True).start()
        return placing

    def _role_of(self, name: str) -> Role | None:
        """Return the role of a program; that of a server which was not there at the start is like the first one's."""
        stem, _, number = name.rpartition("-")
        if name not in self._roles and stem in self._roles and number.isdecimal():
            self._roles[name] = replace(self._roles[stem], name=name)
        return self._roles.get(name)

    def _stop_all(
        self, seats: Iterable[Seat], grace_seconds: float, is_urgent: Callable[[], bool] = lambda: False
    ) -> None:
        stopping = [self._threads.submit(seat.stop, grace_seconds) for seat in seats]
        wait_until(lambda: is_urgent() or all(stopped.done() for stopped in stopping), math.inf)
        for stopped in filter(Future.done, stopping):
            stopped.result()

    def _take_seats(self, name: str, found: Future[Places]) -> None:
        """Start the program in its seats; give them back if it was stopped meanwhile."""
        program = self._programs.get(name)
        try:
            self._seats.update(found.result())
        except PlacementFailed as error:
            if program is not None:
                program.loss = LostProcess(title=f"its place: {error}", noticed_at=time.monotonic())
            return
        if program is None:
            self.vacate(name)
        else:
            self._start_in_seats(program)

    def _start_in_seats(self, program: SeatedProgram) -> None:
        """Start the program in each seat of its role: the ranks of a gang meet at the first seat."""
        role, seats = program.role, self._seats[program.role.name]
        program.seats = seats
        meeting = f"tcp://{seats[0].address}:{seats[0].free_port()}" if role.seats > 1 else ""
        for rank, (name, seat) in enumerate(zip(role.program_names, seats, strict=True)):
            spec = replace(program.spec, name=name)
            if role.is_reached:
                spec = replace(spec, environment={"MASTER_ADDR": seat.address, **spec.environment})
            if role.seats > 1:
                spec = _as_rank(spec, rank, role.seats, meeting)
            seat.start(spec)


def _as_rank(spec: ChildSpec, rank: int, world_size: int, meeting: str) -> ChildSpec:
    """Return the program of one rank, with the variables that torchrun would set; each rank sees its own GPUs only."""
    variables = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"}
    return replace(
        spec,
        command=(*spec.command, "--init-method", meeting),
        environment={**spec.environment, **variables},
    )
