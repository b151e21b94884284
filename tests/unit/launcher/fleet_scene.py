"""A fleet of a run directory, over real programs that sleep and the broker's own registry."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from atropos_api.broker.fleets import Fleets
from atropos_api.broker.inference_servers import InferenceServers
from atropos_api.client import BrokerUnreachable
from atropos_api.wire import FleetLease, FleetReport, InferenceServer, ServerReport, ServerSet
from example_trainer.launcher.endpoints import settle_endpoints
from example_trainer.launcher.fleet import REPORT_SECONDS, Fleet
from example_trainer.launcher.fleet_plan import FleetRecord, limits_of
from example_trainer.launcher.plan import Plan, make_plan
from example_trainer.launcher.restarts import RestartBudget, Restarts
from example_trainer.launcher.run_dir import RunDir, plan_run_dir
from example_trainer.launcher.run_file import RunSettings, read_settings
from example_trainer.launcher.supervisor import Supervisor
from example_trainer.processes.child import ChildSpec
from example_trainer.processes.tree import wait_until

FLAGS = ("--registered-servers", "--weight-bridge-mode", "lora_only", "--env.server", __file__)
WAITS = "import time; time.sleep(600)"
FAILS = "raise SystemExit('ValueError: no memory')"


class Broker:
    """The broker's own registry and fleets, without HTTP; `reachable` is false while nothing answers."""

    def __init__(self, clock) -> None:
        self.servers = InferenceServers(clock, lease_seconds=1000.0, first_epoch=1)
        self.fleets = Fleets(clock)
        self.reachable = True

    def renew_fleet(self, fleet_id: str, report: FleetReport) -> FleetLease:
        self._check()
        return self.fleets.renew(fleet_id, report)

    def remove_fleet(self, fleet_id: str, *, launcher_id: str) -> None:
        self._check()
        self.fleets.remove(fleet_id, launcher_id)

    def get_servers(self, policy: str | None = None) -> ServerSet:
        self._check()
        return self.servers.select(policy)

    def drain_server(self, server_id: str) -> InferenceServer:
        self._check()
        return self.servers.drain(server_id)

    def remove_server(self, server_id: str) -> None:
        self._check()
        self.servers.remove(server_id)

    def close(self) -> None: ...

    def _check(self) -> None:
        if not self.reachable:
            raise BrokerUnreachable("nothing answers")


class Scene:
    """A fleet of a run directory, with sleeping programs in place of its servers."""

    def __init__(self, tmp_path: Path, supervisor: Supervisor, *flags: str, most: int | None = None) -> None:
        self.now = 0.0
        self.broker = Broker(lambda: self.now)
        self.run_dir, self.supervisor, self.flags = tmp_path / "run", supervisor, flags
        self.restarts = Restarts(supervisor, RestartBudget(restarts=3, window_seconds=100.0), clock=lambda: self.now)
        self.code, self.most = WAITS, most
        self.launch()

    def launch(self, *more: str) -> None:
        """Start the launcher's part, as `Launch` does."""
        self.settings, self.run, self.plan = planned(self.run_dir, *FLAGS, *self.flags, *more)
        self.run.create()
        limits = limits_of(self.settings, os.environ)
        limits = replace(limits, most=self.most or limits.most)
        resumes = self.settings.trainer.resume is not None
        self.fleet = Fleet(
            self._with_programs(self.plan),
            limits,
            FleetRecord.read(self.run, limits, resumes=resumes),
            settings=self.settings,
            run=self.run,
            supervisor=self.supervisor,
            broker=self.broker,
            clock=lambda: self.now,
        )
        for spec in self.fleet.first_plan().children:
            if spec.name in self.fleet.names:
                self.supervisor.start(spec)

    def _with_programs(self, plan: Plan) -> Plan:
        program = (sys.executable, "-c")
        children = tuple(replace(spec, command=(*program, WAITS)) for spec in plan.children)
        assert plan.add_server is not None
        add = plan.add_server

        def added(index, port):
            spec, files = add(index, port)
            return replace(spec, command=(*program, self.code)), files

        return replace(plan, children=children, add_server=added)

    def poll(self, *, ready: bool = True) -> list[str]:
        self.now += REPORT_SECONDS
        return self.fleet.poll(self.restarts, ready=ready)

    def scale(self, wanted: int) -> list[str]:
        """Ask for a number, and return what the launcher did about it."""
        self.broker.fleets.scale(self.run.fleet_id, wanted)
        return [*self.poll(), *self.poll()]

    def server_id(self, name: str) -> str:
        return f"{self.run.fleet_id}.{name}"

    def register(self, *names: str, ready: bool = True) -> None:
        for name in names:
            boot_id = self.boot_id(name)
            report = ServerReport(
                lease_id=f"lease-{name}-{boot_id}", boot_id=boot_id, mode="adapters", port=9, ready=ready
            )
            self.broker.servers.renew(self.server_id(name), report, "127.0.0.1")

    def prove(self, *names: str) -> None:
        """Have servers serve, as after a publish."""
        self.broker.servers.prove("default", [f"lease-{name}-{self.boot_id(name)}" for name in names])

    def boot_id(self, name: str) -> str:
        """Return what tells a server's process from the one before it."""
        return str(self.supervisor[name].started_at)

    def state_of(self, name: str) -> str:
        return {row.server_id: row.state for row in self.broker.get_servers().servers}[self.server_id(name)]

    def note_failures(self) -> list[str]:
        """Give up or plan to restart what has failed, as `Launch` does."""
        failures = self.restarts.judge_failures((), apart=self.fleet.unsettled)
        given_up = {found.name: line for found in failures if (line := self.fleet.give_up(found, self.restarts))}
        return [*given_up.values(), *self.restarts.plan([found for found in failures if found.name not in given_up])]

    def due(self) -> list[tuple[ChildSpec, int]]:
        """Return what is started again after the next pause."""
        self.now += 10.0
        return self.restarts.due()

    def leave(self, name: str) -> None:
        """End a server's program with exit code 0, as after its last request."""
        end(self.supervisor, name)

    @property
    def running(self) -> set[str]:
        return {child.name for child in self.supervisor if child.exit_code is None}

    @property
    def seen(self):
        return self.broker.fleets.describe(self.run.fleet_id)


def planned(run_dir: Path, *argv: str) -> tuple[RunSettings, RunDir, Plan]:
    settings = read_settings(["--model-name", "some/model", "--run-dir", str(run_dir), *argv])
    run = plan_run_dir(settings.trainer.run_dir, name="x", log_dir=None, resume=settings.trainer.resume is not None)
    return settings, run, make_plan(settings, run, settle_endpoints(settings), model="some/model")


def end(supervisor: Supervisor, name: str) -> None:
    """Replace a program by one that exits with code 0."""
    spec = supervisor[name].spec
    supervisor.stop(name, grace_seconds=0)
    child = supervisor.start(replace(spec, command=(sys.executable, "-c", "")))
    assert wait_until(lambda: child.exit_code is not None, 20)


def kill(scene: Scene, name: str) -> None:
    """Kill a server's program, and have the launcher note its first failure."""
    os.kill(scene.supervisor[name].process.pid, signal.SIGKILL)
    assert wait_until(lambda: scene.supervisor[name].exit_code is not None, 20)
    (line,) = scene.note_failures()
    assert "restart 1 of 3" in line


def start_due(scene: Scene) -> None:
    ((spec, restarted),) = scene.due()
    scene.supervisor.start(spec, restarted=restarted)
