"""The inference servers that a launcher starts, and their number, which changes while the run goes on.

The launcher reports on its servers to the broker each second and learns how many are wanted. It starts servers, or has
the newest ones drained: such a server takes no new request, ends those that it has, and exits; only then are its port
and its memory free. A server that drains is never started again by the launcher, but the last one is replaced: a run
without a server would wait for one. A server that was added and fails before it has ever answered lowers the wanted
number instead of ending the run, and so does one that no restart can fix while others serve.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from atropos_api.common.errors import AtroposError
from atropos_api.wire import FleetLease, FleetReport, InferenceServer, ServerSet
from example_trainer.launcher.fleet_plan import FleetLimits, FleetRecord, server_id
from example_trainer.launcher.plan import Plan
from example_trainer.launcher.programs import server_name
from example_trainer.launcher.restarts import Failure, Restarts
from example_trainer.launcher.run_dir import RunDir, reporting_flag, write_yaml
from example_trainer.launcher.run_file import RunSettings
from example_trainer.launcher.supervisor import Supervisor, describe_end
from example_trainer.processes.child import ChildSpec, SupervisedProgram
from example_trainer.processes.ports import free_port

logger = logging.getLogger(__name__)

REPORT_SECONDS: Final = 1.0
LOADED: Final = frozenset({"joining", "serving", "draining"})
"""States in which a registered server has loaded its model."""
NOT_DRAINING: Final = frozenset({"starting", "joining", "serving"})  # states of a server that was not told to drain

NODES_FLAG: Final = "--num-inference-nodes"


class FleetClient(Protocol):
    """The calls to the broker that a fleet makes."""

    def renew_fleet(self, fleet_id: str, report: FleetReport) -> FleetLease: ...

    def remove_fleet(self, fleet_id: str, *, launcher_id: str) -> None: ...

    def get_servers(self, policy: str | None = None) -> ServerSet: ...

    def drain_server(self, server_id: str) -> InferenceServer: ...

    def remove_server(self, server_id: str) -> None: ...

    def close(self) -> None: ...


@dataclass(kw_only=True, slots=True)
class _Server:
    """One server of the fleet; it is among the supervisor's programs unless it waits for a restart."""

    index: int
    server_id: str
    answered: bool
    """True once it has loaded its model, and for the servers without which the run cannot go on."""
    drains: bool = False
    port: ExitStack = field(default_factory=ExitStack)
    """Keeps the port of a server that was added from other programs."""

    @property
    def name(self) -> str:
        return server_name(self.index)


class Fleet:
    """The inference servers of one launcher."""

    def __init__(
        self,
        plan: Plan,
        limits: FleetLimits,
        record: FleetRecord,
        *,
        settings: RunSettings,
        run: RunDir,
        supervisor: Supervisor,
        broker: FleetClient,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._limits = limits
        self._record = record
        self._settings = settings
        self._run = run
        self._supervisor = supervisor
        self._broker = broker
        self._clock = clock
        self._launcher_id = secrets.token_hex(8)
        self._report_at = clock()
        self._note = ""
        self._states: Mapping[str, str] = {}
        self._servers: dict[int, _Server] = {}
        for index in range(min(len(plan.servers), max(1, record.wanted))):
            self._servers[index] = self._make(index, answered=True)

    @property
    def names(self) -> list[str]:
        return [server.name for server in self._servers.values()]

    @property
    def unsettled(self) -> set[str]:
        """Names of the servers whose end is not a failure of the run: they drain, or were added and never answered."""
        return {server.name for server in self._servers.values() if server.drains or not server.answered}

    def first_plan(self) -> Plan:
        """Return the plan with the servers that start at once: fewer than planned if a resumed run had fewer."""
        left_out = self._plan.servers[len(self._servers) :]
        if not left_out:
            return self._plan
        endpoints = self._plan.endpoints
        return replace(
            self._plan,
            children=tuple(spec for spec in self._plan.children if spec.name not in left_out),
            servers=self._plan.servers[: len(self._servers)],
            endpoints=replace(endpoints, vllm_ports=endpoints.vllm_ports[: len(self._servers)]),
        )

    def for_trainer(self, command: tuple[str, ...]) -> tuple[str, ...]:
        """Return the trainer's command, with which it waits at its start for no more servers than are wanted now."""
        if NODES_FLAG in command:
            at = command.index(NODES_FLAG)
            command = (*command[:at], *command[at + 2 :])
        if self._limits.fixed or self._record.wanted >= self._limits.planned:
            return command
        at = command.index("--config")
        return (*command[:at], NODES_FLAG, str(max(1, self._record.wanted)), *command[at:])

    def poll(self, restarts: Restarts, *, ready: bool) -> list[str]:
        """Note servers that have ended and, once a second, ask the broker and move towards the wanted number.

        Returns a line for each thing that has happened. Nothing is started or drained before the run's first servers
        are `ready`.
        """
        lines: list[str] = []
        try:
            lines += self._note_ends(restarts)
            if self._clock() >= self._report_at:
                self._report_at = self._clock() + REPORT_SECONDS
                lines += self._ask(restarts, ready=ready)
        except AtroposError as error:  # no broker, an older one, another launcher of this directory, or a full disk
            logger.debug("the fleet is as it was: %s", error)
        return lines

    def give_up(self, failure: Failure, restarts: Restarts) -> str | None:
        """Go on without a server that no restart can fix; return None if it is no server, or the last that serves."""
        server = next((server for server in self._staying() if server.name == failure.name), None)
        if server is None or self._limits.fixed or failure.final_cause is None:
            return None
        child, why = failure.child, failure.final_cause
        with suppress(AtroposError):
            self._read_states()  # the last poll's states are up to a second old; others may serve since then
        if not any(other is not server and self._serves(other) for other in self._staying()):
            return None
        how = f"it {describe_end(child)}{f' ({why})' if why else ''}"
        try:
            self._want_one_fewer()
        except AtroposError:  # a full disk: the next launch of the run would not know the lower number
            return None
        self._forget(server, restarts)
        self._note = (
            f"{server.name} is given up, and the run goes on with the other servers: {how}; see {child.log_path}"
        )
        return self._note

    def _serves(self, server: _Server) -> bool:
        child = self._child(server)
        return child is not None and child.exit_code is None and self._states.get(server.server_id) == "serving"

    def close(self) -> None:
        """Tell the broker that the launcher ends; servers are ended by the supervisor."""
        with suppress(AtroposError):
            self._broker.remove_fleet(self._run.fleet_id, launcher_id=self._launcher_id)
        self._broker.close()
        for server in self._servers.values():
            server.port.close()

    def _ask(self, restarts: Restarts, *, ready: bool) -> Iterator[str]:
        lease = self._broker.renew_fleet(self._run.fleet_id, self._report())
        if lease.request > self._record.request:
            self._note = ""
            self._aim_at(lease.wanted, request=lease.request)
            self._report_at = self._clock()  # `atropos scale` waits for the report that names the request
            yield f"{lease.wanted} inference servers are wanted"
        if self._limits.fixed:
            return
        complete = self._read_states()
        yield from self._note_states(self._states)
        for server in self._no_longer_draining():
            yield from self._release(server, restarts, complete=complete)
        if ready:
            yield from self._add_missing()
            for server in self._surplus():
                yield from self._release(server, restarts, complete=complete)

    def _read_states(self) -> bool:
        """Read the servers' states at the broker; return True if no server may be missing among them."""
        found = self._broker.get_servers(self._settings.trainer.policy)
        self._states = {server.server_id: server.state for server in found.servers}
        return found.complete

    def _report(self) -> FleetReport:
        return FleetReport(
            launcher_id=self._launcher_id,
            policy=self._settings.trainer.policy,
            wanted=self._record.wanted,
            running=self._limits.planned if self._limits.fixed else len(self._staying()),
            least=self._limits.least,
            most=self._limits.most,
            request=self._record.request,
            limit=self._limits.limit,
            fixed=self._limits.fixed,
            note=self._note[:1000],
        )

    def _aim_at(self, wanted: int, *, request: int | None = None) -> None:
        record = replace(self._record, wanted=wanted, request=self._record.request if request is None else request)
        with reporting_flag(self._run.root, "--run-dir"):
            record.write(self._run)
        self._record = record

    @property
    def _replacement(self) -> str:
        """The end of a line about a server that leaves; it says so if that was the last one, which is replaced."""
        return "" if self._staying() else "; it was the last one, and another takes its place"

    def _want_one_fewer(self) -> None:
        self._aim_at(max(self._limits.least, self._record.wanted - 1))

    def _staying(self) -> list[_Server]:
        return [server for server in self._servers.values() if not server.drains]

    def _note_states(self, states: Mapping[str, str]) -> Iterator[str]:
        """Note which servers have loaded, and which were told to drain by another program."""
        for server in self._servers.values():
            state = states.get(server.server_id)
            server.answered = server.answered or state in LOADED
            if state == "draining" and not server.drains:
                self._want_one_fewer()
                server.drains = True
                yield f"{server.name} drains{self._replacement}"

    def _note_ends(self, restarts: Restarts) -> Iterator[str]:
        """Forget the servers that have drained, and those that were added and did not start."""
        if self._limits.fixed:  # none of these is told to drain, so each end is a failure
            return
        for server in list(self._servers.values()):
            child = self._child(server)
            if child is None or not (child.exit_code is not None or child.is_broken(time.monotonic())):
                continue
            code, how = child.exit_code, describe_end(child).splitlines()[0]  # for a full cluster a table follows
            if server.answered and not server.drains and code != 0:  # a failure of the run
                continue
            if not server.drains:
                self._want_one_fewer()
            self._forget(server, restarts)
            if server.drains:
                yield f"{server.name} has left{'' if code == 0 else f': it {how}'}"
            elif code == 0:
                yield f"{server.name} has left{self._replacement}"
            else:
                log = f"; see {child.log_path}" if child.log_path.exists() else ""
                self._note = f"{server.name} did not start: it {how}{log}"
                yield self._note

    def _add_missing(self) -> Iterator[str]:
        """Start the servers that are missing; where there is no room for more, one waits until another has left."""
        while len(self._staying()) < self._record.wanted and len(self._servers) < self._limits.most:
            index = next(index for index in range(len(self._servers) + 1) if index not in self._servers)
            server = self._make(index, answered=not self._staying())
            try:
                spec = self._plan_server(server)
            except AtroposError as error:  # no GPU for it, no free port, no place for its settings
                server.port.close()
                before, self._note = self._note, str(error)
                self._aim_at(max(self._limits.least, len(self._staying())))
                if self._note != before:  # it is tried again each second while there is no server
                    yield f"no server can be added: {error}"
                return
            self._servers[index] = server
            self._supervisor.start(spec)
            yield f"{server.name} starts"

    def _plan_server(self, server: _Server) -> ChildSpec:
        """Return the program of a server; one that the run's settings ask for keeps its port."""
        planned = self._plan.child(server.name)
        if planned is not None:
            return planned
        assert self._plan.add_server is not None
        spec, files = self._plan.add_server(server.index, self._free_port(server))
        with reporting_flag(self._run.configs, "--run-dir"):
            for path, content in files.items():
                write_yaml(path, content)
        return spec

    def _free_port(self, server: _Server) -> int:
        """Return a free port of this machine; on another one the server takes one by itself."""
        return 0 if self._settings.placement.is_ray else free_port(held=server.port)

    def _surplus(self) -> list[_Server]:
        """Return the servers that are too many, the newest first."""
        return sorted(self._staying(), key=lambda server: server.index)[self._record.wanted :][::-1]

    def _no_longer_draining(self) -> Iterator[_Server]:
        """Yield the servers that have stopped draining: the process that was told to drain has failed and its successor
        has a new lease, or the broker was killed before the server had its answer.
        """
        for server in [server for server in self._servers.values() if server.drains]:
            if self._child(server) is None or self._states.get(server.server_id) in NOT_DRAINING:
                yield server

    def _release(self, server: _Server, restarts: Restarts, *, complete: bool) -> Iterator[str]:
        """Have a server drain; stop one that cannot have got a request yet, and do not start one again."""
        state = self._states.get(server.server_id)
        if self._child(server) is None:
            self._forget(server, restarts)
            yield f"{server.name} is not started again"
        elif state in LOADED:
            self._broker.drain_server(server.server_id)
            if not server.drains:
                server.drains = True
                yield f"{server.name} drains"
        elif state == "starting" or complete:  # it does not serve yet, or the broker's complete set lacks it
            self._forget(server, restarts)
            yield f"{server.name} is stopped before it has served"

    def _make(self, index: int, *, answered: bool) -> _Server:
        return _Server(index=index, server_id=server_id(self._settings, self._run, index), answered=answered)

    def _child(self, server: _Server) -> SupervisedProgram | None:
        return self._supervisor.find(server.name)

    def _forget(self, server: _Server, restarts: Restarts) -> None:
        """End what is left of a server, also at the broker, and free its port; the next of its name is a new one."""
        restarts.cancel(server.name)
        if server.name in self._supervisor:
            self._supervisor.stop(server.name)
        self._supervisor.vacate(server.name)
        with suppress(AtroposError):  # a killed server holds its lease, and would be taken for the next of its name
            self._broker.remove_server(server.server_id)
        server.port.close()
        del self._servers[server.index]
