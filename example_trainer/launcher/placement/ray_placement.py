"""A placement on a Ray cluster: each role is a placement group, and each seat an actor on its node.

Actors have names and are not detached: they end with the launcher. Ray restarts nothing; a role that has lost a seat
gives its group back and gets another one, since Ray would wait for a dead node's bundles for ever. This is the only
module that imports ray.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from atropos_api.common.cliconfig import ConfigError
from example_trainer.launcher.placement.roles import PlacementFailed, Places, ProgramState, Role, Seat
from example_trainer.launcher.placement.seat import SeatHost
from example_trainer.launcher.placement.settings import PlacementSettings
from example_trainer.launcher.run_dir import RunDir
from example_trainer.processes.child import ChildFailed, ChildSpec
from example_trainer.processes.tree import is_alive, open_process

LOOK_INTERVAL_SECONDS = 0.25
PLACE_INTERVAL_SECONDS = 0.1
CONNECT_SECONDS = 5.0
ARRIVE_SECONDS = 60.0
"""Time for an actor to start on its node: it imports this package."""
CALL_SECONDS = 10.0
"""Time for a call of an actor beyond what the call itself waits for."""
RAYLET_INTERVAL_SECONDS = 0.5
HEAD_INTERVAL_SECONDS = 2.0
HEAD_SILENCES = 3
CLOSE_SECONDS = 10.0
SEAT_ENVIRONMENT = {"env_vars": {"RAY_worker_niceness": "0"}}
"""Ray starts actors at niceness 15; a seat's programs would inherit it, although they are the node's main work."""


def connect(settings: PlacementSettings, run: RunDir) -> RayPlacement:
    """Join the cluster of the named head; raise `ConfigError` if there is none at that address."""
    _require_answer(settings)
    try:
        ray.init(
            address=settings.address,
            # Each launch has its own: runs of equal names, and the launches of one run, have actors of equal names.
            namespace=f"{run.fleet_id}-{run.attempt}",
            log_to_driver=False,
            configure_logging=False,
        )
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"--placement-address {settings.address}: {first}; start the launcher on a node of this cluster "
            "(`ray start`), with the same versions of Python and Ray"
        ) from error
    # Else what Ray says about its nodes is written to standard output, between the lines of `--json`.
    ray._private.worker._worker_logs_enabled = False  # noqa: SLF001 - there is no other switch
    return RayPlacement(settings, run)


class _SeatActor(SeatHost):
    """A seat as an actor: Ray calls its methods one after the other on the main thread of its process."""

    def __init__(self, log_dir: Path, *, hides_gpus: bool, directory: Path) -> None:
        super().__init__(log_dir, hides_gpus=hides_gpus, directory=directory)
        threading.Thread(target=_end_with, args=(os.getppid(),), name="raylet-watch", daemon=True).start()

    def arrive(self, run_dir: Path) -> tuple[str, bool]:
        """Return the node's address, and if it sees the run directory."""
        return get_node_ip_address(), self.sees(run_dir)


class RaySeat(Seat):
    """The launcher's side of a seat."""

    def __init__(self, name: str, address: str, actor: Any) -> None:
        self.name = name
        self.address = address
        self.lost: str | None = None
        """The reason why the actor is gone, as Ray says it."""
        self._actor = actor
        self._state = ProgramState()
        self._asked: Any = None
        self._asked_at = 0.0

    def start(self, spec: ChildSpec) -> None:
        self._state, self._asked = ProgramState(), None
        try:
            ray.get(self._actor.start.remote(spec), timeout=CALL_SECONDS)
        except RayError as error:
            self.lost = _cause(error)

    def state(self) -> ProgramState:
        now = time.monotonic()
        if self._asked is None and now - self._asked_at >= LOOK_INTERVAL_SECONDS and self.lost is None:
            self._asked, self._asked_at = self._actor.state.remote(), now
        if self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
            answer, self._asked = self._asked, None
            with self._noting_loss():
                self._state = ray.get(answer)
        return self._state

    def stop(self, grace_seconds: float) -> None:
        self._call("stop", grace_seconds, limit_seconds=grace_seconds + CALL_SECONDS)

    def free_port(self) -> int:
        port = self._call("free_port", self.address, limit_seconds=CALL_SECONDS)
        return 0 if port is None else int(port)

    def end(self) -> None:
        """Have the seat remove what its programs left, and end its actor."""
        if self.lost is None:
            self._call("close", limit_seconds=CALL_SECONDS)
        with contextlib.suppress(RayError):
            ray.kill(self._actor, no_restart=True)

    def _call(self, method: str, *arguments: Any, limit_seconds: float) -> Any:
        """Return the answer of the actor; None if there is none; then the loss is noted."""
        with self._noting_loss():
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=limit_seconds)
        return None

    @contextlib.contextmanager
    def _noting_loss(self) -> Iterator[None]:
        try:
            yield
        except ActorDiedError as error:
            self.lost = _cause(error)
        except (RayActorError, GetTimeoutError):
            return  # it cannot be reached at present; if its node is dead, Ray reports that later


@dataclass(slots=True)
class _Placed:
    group: PlacementGroup
    seats: list[RaySeat]


class RayPlacement:
    """Placement groups and actors of one launch."""

    def __init__(self, settings: PlacementSettings, run: RunDir) -> None:
        self._settings = settings
        self._run = run
        self._lock = threading.Lock()
        self._placed: dict[str, _Placed] = {}
        self._closed = threading.Event()
        self._idle = threading.Condition()
        self._calls_of_place = 0
        self._numbers = itertools.count(1)
        self._actor_class = ray.remote(_SeatActor)
        self._head_asked_at = 0.0
        self._head_silences = 0

    def place(self, roles: Sequence[Role]) -> Places:
        """Reserve all groups, those with GPUs first, and start an actor in each bundle; a failure releases all."""
        with self._counted():
            placed = self._place(roles)
            with self._lock:
                self._placed.update(placed)
        return {name: each.seats for name, each in placed.items()}

    def _place(self, roles: Sequence[Role]) -> dict[str, _Placed]:
        ordered = sorted(roles, key=lambda role: -role.gpus * role.seats)
        placed: dict[str, _Placed] = {}
        try:
            for role in ordered:
                bundle = {"CPU": role.cpus, "GPU": role.gpus}
                bundles = [{name: amount for name, amount in bundle.items() if amount}] * role.seats
                placed[role.name] = _Placed(placement_group(bundles, strategy="PACK"), [])
            self._await_groups(ordered, placed)
            for role in ordered:
                placed[role.name].seats = self._start_actors(role, placed[role.name].group)
        except BaseException:
            for each in placed.values():
                _remove(each)
            raise
        return placed

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Make `close` wait for a running call of `place`, which would else start a cluster of its own after it."""
        with self._idle:
            if self._closed.is_set():
                raise PlacementFailed("the launch has ended")
            self._calls_of_place += 1
        try:
            yield
        finally:
            with self._idle:
                self._calls_of_place -= 1
                self._idle.notify_all()

    def release(self, role: str) -> None:
        with self._lock:
            placed = self._placed.pop(role, None)
        if placed is not None:
            _remove(placed)

    def lost(self) -> Mapping[str, str]:
        self._check_head()
        with self._lock:
            seats = [seat for placed in self._placed.values() for seat in placed.seats]
        return {seat.name: seat.lost for seat in seats if seat.lost is not None}

    def describe(self) -> Mapping[str, Any]:
        with self._lock:
            seats = {seat.name: seat.address for placed in self._placed.values() for seat in placed.seats}
        return {"kind": "ray", "address": self._settings.address, "seats": seats}

    def close(self) -> None:
        """Release everything within `CLOSE_SECONDS`, because a dead head would not answer any of these calls."""
        if self._closed.is_set():
            return
        self._closed.set()
        ending = threading.Thread(target=self._release_all, name="placement-close", daemon=True)
        ending.start()
        ending.join(CLOSE_SECONDS)

    def _release_all(self) -> None:
        with self._idle:
            self._idle.wait_for(lambda: not self._calls_of_place)
        # Threads that Python does not wait for at its end: a call to a head that is gone takes a minute.
        threads = [threading.Thread(target=self.release, args=(role,), daemon=True) for role in list(self._placed)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ray.shutdown()

    def _await_groups(self, roles: Sequence[Role], placed: Mapping[str, _Placed]) -> None:
        deadline = time.monotonic() + self._settings.timeout
        waiting = list(roles)
        while waiting := [role for role in waiting if not _is_ready(placed[role.name].group)]:
            if time.monotonic() > deadline:
                raise PlacementFailed(self._shortfall(roles, waiting))
            if self._closed.wait(PLACE_INTERVAL_SECONDS):
                raise PlacementFailed(f"{waiting[0].name}: the launch has ended")

    def _start_actors(self, role: Role, group: PlacementGroup) -> list[RaySeat]:
        actors = []
        for rank, name in enumerate(role.program_names):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
            seat_name = f"{name}.{next(self._numbers)}"  # Ray frees the name of a dead actor late
            made = self._actor_class.options(
                name=seat_name,
                num_cpus=role.cpus,
                num_gpus=role.gpus,
                max_restarts=0,
                scheduling_strategy=strategy,
                runtime_env=SEAT_ENVIRONMENT,
            ).remote(self._run.logs, hides_gpus=not role.gpus, directory=Path.cwd())
            actors.append((seat_name, made, made.arrive.remote(self._run.logs)))
        seats = []
        for seat_name, actor, arrived in actors:
            address, sees = self._await_actor(seat_name, arrived)
            if not sees:
                raise PlacementFailed(
                    f"the node {address} does not see {self._run.logs}; put --run-dir on a file system that every node "
                    "shares"
                )
            seats.append(RaySeat(seat_name, address, actor))
        return seats

    def _await_actor(self, seat_name: str, arrived: Any) -> tuple[str, bool]:
        """Return the answer of an actor's `arrive`."""
        deadline = time.monotonic() + ARRIVE_SECONDS
        while not ray.wait([arrived], timeout=PLACE_INTERVAL_SECONDS)[0]:
            if self._closed.is_set():
                raise PlacementFailed(f"{seat_name}: the launch has ended")
            if time.monotonic() > deadline:
                raise PlacementFailed(f"{seat_name} did not start on its node within {ARRIVE_SECONDS:g} s")
        try:
            address, sees = ray.get(arrived)
        except RayError as error:
            raise PlacementFailed(f"{seat_name} did not start on its node: {_cause(error)}") from error
        return str(address), bool(sees)

    def _shortfall(self, roles: Sequence[Role], waiting: Sequence[Role]) -> str:
        """Return a table of the resources that are wanted, registered and free, and the nodes."""
        wanted = {"CPU": sum(r.cpus * r.seats for r in roles), "GPU": sum(r.gpus * r.seats for r in roles)}
        rows = {"wanted": wanted, "registered": ray.cluster_resources(), "free": ray.available_resources()}
        nodes = [node for node in ray.nodes() if node["Alive"]]
        listed = (f"{node['NodeManagerAddress']} ({_amounts(node['Resources'])})" for node in nodes)
        missing = ", ".join(role.describe() for role in waiting)
        lines = [f"{name:<12}{row.get('CPU', 0):>6g}{row.get('GPU', 0):>6g}" for name, row in rows.items()]
        return "\n".join(
            [
                f"no place for {missing} within {self._settings.timeout:g} s; add nodes, or ask for less (placement:)",
                f"{'':<12}{'CPU':>6}{'GPU':>6}",
                *lines,
                f"nodes: {', '.join(listed)}",
            ]
        )

    def _check_head(self) -> None:
        """Raise `ChildFailed` if the head is gone: a minute later Ray itself would end the launcher silently."""
        now = time.monotonic()
        if now - self._head_asked_at < HEAD_INTERVAL_SECONDS:
            return
        self._head_asked_at = now
        self._head_silences = 0 if _answers(self._settings.head) else self._head_silences + 1
        if self._head_silences >= HEAD_SILENCES:
            raise ChildFailed(f"the Ray head at {self._settings.address} does not answer any more", exit_code=1)


def _end_with(pid: int) -> None:
    """End this process once the node's raylet has: Ray's own check counts a raylet that was not reaped as alive."""
    raylet = open_process(pid)
    while raylet is not None and is_alive(raylet):
        time.sleep(RAYLET_INTERVAL_SECONDS)
    os._exit(1)


def _require_answer(settings: PlacementSettings) -> None:
    if not _answers(settings.head, CONNECT_SECONDS):
        raise ConfigError(
            f"--placement-address {settings.address}: nothing answers there; `ray start --head` prints the address"
        )


def _answers(address: tuple[str, int], limit_seconds: float = 1.0) -> bool:
    try:
        socket.create_connection(address, timeout=limit_seconds).close()
    except OSError:
        return False
    return True


def _is_ready(group: PlacementGroup) -> bool:
    return bool(placement_group_table(group).get("state") == "CREATED")


def _remove(placed: _Placed) -> None:
    for seat in placed.seats:
        seat.end()
    with contextlib.suppress(RayError):
        remove_placement_group(placed.group)


def _amounts(resources: Mapping[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPU, {resources.get('GPU', 0):g} GPU"


def _cause(error: BaseException) -> str:
    """Return the part of Ray's message that names the cause."""
    found = re.search(r"(?:The actor|It) \w+ (?:dead )?because (.+?)\.(?:\s|$)", str(error))
    return found[1] if found else " ".join(str(error).split())[:200]
