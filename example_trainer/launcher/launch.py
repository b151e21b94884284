"""Runs one launch from start to end: base model, programs, training, final evaluation, shutdown, summary."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import psutil

from atropos_api.client import BrokerClient
from atropos_api.common import metric_names
from example_trainer.launcher.base_model import BASE_MODEL, discard_other_base, local_base, require_available
from example_trainer.launcher.data_use import write_data_use
from example_trainer.launcher.endpoints import Endpoints, broker_token, save_own_token, settle_endpoints
from example_trainer.launcher.environment_check import LAUNCH_SECONDS, EnvironmentCheck
from example_trainer.launcher.fleet import Fleet
from example_trainer.launcher.fleet_plan import FleetRecord, limits_of
from example_trainer.launcher.placement.choice import open_placement, passed_variables, roles_of
from example_trainer.launcher.placement.roles import Placement
from example_trainer.launcher.placement.seated_supervisor import SeatedSupervisor
from example_trainer.launcher.plan import Plan, make_plan, resolved
from example_trainer.launcher.programs import BROKER, FINAL_SERVER, TRAINER, VLLM, Programs
from example_trainer.launcher.progress import (
    Feed,
    Snapshot,
    answered_requests,
    make_feed,
    milestones_of,
    never_ready,
    note_engine_start,
    phase_of,
    reached,
)
from example_trainer.launcher.restarts import LONGEST_PAUSE_SECONDS, RestartBudget, Restarts, Resumption
from example_trainer.launcher.run_dir import RunDir, reporting_flag, write_json, write_yaml
from example_trainer.launcher.run_file import RunConfig, RunSettings
from example_trainer.launcher.run_lock import locked
from example_trainer.launcher.run_report import report_line
from example_trainer.launcher.stop_request import Interrupted, StopRequest
from example_trainer.launcher.summary import Summary, summarise, write_rollout_pages
from example_trainer.launcher.supervisor import Supervisor
from example_trainer.launcher.teacher import MODEL_FLAG, TEACHER, own_teacher
from example_trainer.launcher.totals import END, START, processor_use, record_launch
from example_trainer.launcher.views import LastingView, View, make_view
from example_trainer.monitoring.trackers import EVENTS_FILE, MetricsTail
from example_trainer.processes.child import ChildFailed, ChildSpec
from example_trainer.processes.tree import adopting_orphans, python_path

TICK_SECONDS = 0.1
CACHE_LOOKUP_SECONDS = 2.0

TRAINER_LAG_SECONDS = 120.0
"""Time after the environments' end in which a trainer with steps left may train what is queued: no more will come."""


@dataclass(slots=True)
class Stopwatch:
    """Measures for how long a condition has held without interruption and without progress."""

    since: float | None = None
    progress: int = 0

    def seconds(self, holds: bool, progress: int = 0) -> float:
        if progress > self.progress:
            self.since = None
        self.progress = progress  # less than before if the program that counts it was restarted
        self.since = (self.since or time.monotonic()) if holds else None
        return time.monotonic() - self.since if self.since else 0.0


@dataclass(kw_only=True, slots=True)
class Launch:
    """One launch: it takes the settings, runs the programs and returns the summary."""

    settings: RunSettings
    run: RunDir
    programs: Programs = field(default_factory=Programs)
    notes: list[str] = field(default_factory=list)
    """Sentences to print at the end of the run."""
    pages: list[str] = field(default_factory=list)
    """One line for each page of rollouts and for the report; filled once the run has ended."""
    started_at: float = field(default_factory=lambda: psutil.Process().create_time())

    def go(self) -> Summary:
        """Run everything; raise `ChildFailed` or `Interrupted` if the run does not reach its end."""
        with contextlib.ExitStack() as ports:
            return self._go(settle_endpoints(self.settings, ports))

    def _go(self, endpoints: Endpoints) -> Summary:
        model = require_available(self.settings.trainer.model_name, "--model-name")
        own = own_teacher(self.settings)
        teacher = None if own is None else require_available(own.model_name, MODEL_FLAG)
        if self.settings.trainer.ref_model is not None:
            require_available(self.settings.trainer.ref_model, "--ref-model")
        run = self.run.reserve()
        with locked({"--run-dir": run.root, "--save-path": self.settings.trainer.save_path}):
            self.run = run.create()
            try:
                with (
                    adopting_orphans(),
                    contextlib.closing(open_placement(self.settings, self.run)) as placement,
                    StopRequest.listening() as stop,  # after the placement, because Ray installs handlers of its own
                ):
                    return self._run(endpoints, model, teacher, placement, stop)
            finally:
                # Once all programs have ended, so that their CPU time is known. An error of a full disk is ignored,
                # because it would replace the error that ended the launch.
                with contextlib.suppress(OSError):
                    record_launch(self.run.root, self._usage())

    def _usage(self) -> dict[str, float]:
        """Return start, end and processor use of this launch, by what is known now."""
        return {START: self.started_at, END: time.time(), **processor_use()}

    def _run(
        self, endpoints: Endpoints, model: str, teacher: str | None, placement: Placement, stop: StopRequest
    ) -> Summary:
        variables = passed_variables(self.settings.placement, os.environ)
        planned = partial(make_plan, self.settings, self.run, endpoints, programs=self.programs)
        with (
            SeatedSupervisor(self.run.logs, placement, variables=variables) as supervisor,
            EnvironmentCheck(
                self.settings,
                planned(model=model, teacher_model=teacher),
                scratch=supervisor.scratch,
                starts_here=not self.settings.placement.is_ray,
            ) as check,
        ):

            def go_on() -> None:
                stop.raise_if_requested()
                check.refuse_unusable()

            view = LastingView(make_view(self.settings.trainer.view))
            snapshot = self._snapshot()
            try:
                self._place(supervisor, snapshot, view, go_on)
                make = partial(self._make_if_local, supervisor=supervisor, snapshot=snapshot, view=view, go_on=go_on)
                model = make(model, "base model")
                teacher = None if teacher is None else make(teacher, "teacher's model")
                check.refuse_unusable(limit_seconds=LAUNCH_SECONDS)
                self.notes += check.remarks(self.run.logs)
                plan = planned(model=model, teacher_model=teacher)
                self._record(plan, supervisor)
                if self.settings.trainer.load_in_4bit:
                    discard_other_base(self.run.root, model, self.settings.trainer.dtype)
                return self._train(plan, supervisor, snapshot, view, stop)
            except (Interrupted, ChildFailed, OSError):  # OSError: a full disk, which may not be that of the run
                self._stop_trainer(supervisor, snapshot, view, stop)
                raise
            finally:
                view.close()

    def _stop_trainer(self, supervisor: SeatedSupervisor, snapshot: Snapshot, view: View, stop: StopRequest) -> None:
        """End the trainer before its servers: a publish would wait for them, and its last checkpoint comes after it."""
        if TRAINER not in supervisor or supervisor[TRAINER].exit_code is not None:
            return
        snapshot.phase = "stopping: the trainer writes a checkpoint (a second signal ends it at once)"
        view.update(snapshot, ())
        grace_seconds = self.settings.trainer.stop_grace
        supervisor.stop(TRAINER, grace_seconds=grace_seconds, is_urgent=lambda: stop.is_urgent)

    def _place(self, supervisor: SeatedSupervisor, snapshot: Snapshot, view: View, go_on: Callable[[], None]) -> None:
        """Have every role placed before anything starts, so that a run that does not fit leaves nothing behind."""

        def wait() -> None:
            go_on()
            snapshot.phase = "waiting for places"
            view.update(snapshot, ())

        supervisor.place(roles_of(self.settings), wait)

    def _snapshot(self) -> Snapshot:
        config = self.settings.trainer
        return Snapshot(
            name=config.name, run_dir=self.run.root, total_steps=config.training_steps, started_at=self.started_at
        )

    def _make_if_local(
        self,
        name: str,
        what: str,
        *,
        supervisor: Supervisor,
        snapshot: Snapshot,
        view: View,
        go_on: Callable[[], None],
    ) -> str:
        """Return the model's name, or its path after running the program that finds or makes a tiny model."""
        base = local_base(name)
        if base is None:
            return name
        snapshot.milestones[what] = None
        begun = time.monotonic()

        def tick() -> None:
            go_on()
            making = time.monotonic() - begun > CACHE_LOOKUP_SECONDS
            snapshot.phase = f"making the {what} (about a minute, once)" if making else f"looking for the {what}"
            view.update(snapshot, ())

        child = supervisor.start(base.spec)
        supervisor.wait_for_end(child, tick)
        report = dict(line.split(" ", 1) for line in child.last_lines() if " " in line)
        supervisor.forget(BASE_MODEL)
        snapshot.reach(what)
        self.notes.append(f"{what}: {report['path']}, sha256 {report.get('sha256', 'unknown')}")
        return report["path"]

    def _train(self, plan: Plan, supervisor: Supervisor, snapshot: Snapshot, view: View, stop: StopRequest) -> Summary:
        snapshot.milestones |= dict.fromkeys(milestones_of(plan))
        snapshot.page_url = f"{plan.endpoints.broker_url}/"
        snapshot.token_file = save_own_token(self.settings, self.run.token_file)
        snapshot.phase = "starting"
        # Opened before the children start, so that a resumed run shows the new steps only.
        tail = MetricsTail(self.run.metrics, from_end=True)
        events = MetricsTail(self.run.root / EVENTS_FILE, from_end=True)
        fleet = self._make_fleet(plan, supervisor)
        plan = fleet.first_plan()
        restarts = self._make_restarts(supervisor)
        for spec in plan.children:
            supervisor.start(_with_server_count(spec, fleet))
        resumes = self.settings.trainer.resume is not None
        feed = make_feed(plan, snapshot, tail, events, broker_token(self.settings), resumes=resumes)
        with contextlib.closing(feed), contextlib.closing(fleet):
            self._watch(plan, supervisor, fleet, restarts, feed, view, stop)
            write_data_use(self.run.root, feed.read_status())
        snapshot.phase = "stopping"
        view.update(snapshot, ())
        return self._conclude(fleet.names, supervisor, snapshot, stop)

    def _make_restarts(self, supervisor: Supervisor) -> Restarts:
        config = self.settings.trainer
        outage_seconds = _longest_wait_seconds(self.settings) + LONGEST_PAUSE_SECONDS
        budget = RestartBudget(
            restarts=config.max_restarts, window_seconds=config.restart_window, outage_seconds=outage_seconds
        )
        return Restarts(supervisor, budget, resumption=Resumption(config, self.run.root))

    def _make_fleet(self, plan: Plan, supervisor: Supervisor) -> Fleet:
        limits = limits_of(self.settings, os.environ)
        # The launcher's loop waits for each answer, and asks again a second later.
        token = broker_token(self.settings)
        return Fleet(
            plan,
            limits,
            FleetRecord.read(self.run, limits, resumes=self.settings.trainer.resume is not None),
            settings=self.settings,
            run=self.run,
            supervisor=supervisor,
            broker=BrokerClient(plan.endpoints.broker_url, token=token, timeout_seconds=0.5, retry_seconds=0.0),
        )

    def _watch(
        self,
        plan: Plan,
        supervisor: Supervisor,
        fleet: Fleet,
        restarts: Restarts,
        feed: Feed,
        view: View,
        stop: StopRequest,
    ) -> None:
        """Watch the programs until the trainer and then the environments have ended.

        A final evaluation may take as long as it needs while an inference server answers it within `wait_timeout`.
        """
        snapshot, config, limit = feed.snapshot, self.settings.trainer, self.settings.trainer.wait_timeout
        waiting = {TRAINER, *plan.environments}
        trainer_alone, environments_alone = Stopwatch(), Stopwatch()
        while waiting:
            stop.raise_if_requested()
            rows = feed.poll()  # before failures are judged: what a program has written shows that it was ready
            unready = never_ready(plan, snapshot)
            failures = restarts.judge_failures(unready, apart=fleet.unsettled)
            given_up = {found.name: line for found in failures if (line := fleet.give_up(found, restarts)) is not None}
            restarted = restarts.plan([found for found in failures if found.name not in given_up])
            for line in (*given_up.values(), *restarted):
                self.notes.append(line)
                snapshot.phase = line
                view.update(snapshot, ())
            for line in fleet.poll(restarts, ready=snapshot.milestones.get(VLLM) is not None):
                snapshot.phase = line
                view.update(snapshot, ())
            for spec, number in restarts.due():
                supervisor.start(_with_server_count(spec, fleet), restarted=number)
            still = restarts.unfinished(waiting)
            if plan.final_server is not None and TRAINER in waiting - still and still:
                supervisor.start(_with_version(plan.final_server, snapshot))
            waiting = still
            snapshot.phase = phase_of(snapshot, waiting)
            view.update(snapshot, [*rows, *feed.poll()])
            note_engine_start(snapshot, supervisor)
            lag_seconds, lag = _lag_of_trainer(snapshot, config)
            if trainer_alone.seconds(waiting == {TRAINER} and bool(plan.environments)) > lag_seconds:
                raise ChildFailed(f"the environments have ended, but the trainer {lag}", exit_code=1)
            if environments_alone.seconds(TRAINER not in waiting, answered_requests(snapshot)) > limit:
                names = ", ".join(sorted(waiting))
                self.notes.append(f"{names}: stopped after --wait-timeout {limit:g} s without an answer of a server")
                break
            time.sleep(TICK_SECONDS)

    def _conclude(
        self, servers: Sequence[str], supervisor: Supervisor, snapshot: Snapshot, stop: StopRequest
    ) -> Summary:
        """Stop what still runs, draw the picture meanwhile, and summarise; a missing picture fails no good run."""
        command = (sys.executable, "-m", "example_trainer.launcher.summary", str(self.run.root))
        plot = ChildSpec(name="plot", command=command, environment={"PYTHONPATH": python_path()}, ends_by_itself=True)
        drawing = supervisor.start(plot)
        # An environment that still runs is stopped first, because it would fail without its server and its broker.
        environments = [each.name for each in self.settings.environments if each.name in supervisor]
        running = [name for name in environments if supervisor[name].exit_code is None]
        for name in (*running, *servers, TEACHER, FINAL_SERVER, BROKER):
            if name in supervisor:
                supervisor.stop(name)
        try:
            supervisor.wait_for_end(drawing, stop.raise_if_requested)
        except ChildFailed as error:
            self.notes.append(f"reward.png could not be drawn: {error}")
        timeline = {**reached(snapshot), **snapshot.marks, **self._usage()}
        write_json(self.run.timeline, timeline)
        summary = summarise(self.run.root, timeline=timeline, cost_per_hour=self.settings.trainer.cost_per_hour)
        summary.write(self.run.root)
        self.pages = [*write_rollout_pages(self.run.root), report_line(self.run.root)]
        return summary

    def _record(self, plan: Plan, supervisor: SeatedSupervisor) -> None:
        with reporting_flag(self.run.configs, "--run-dir"):
            for path, content in plan.files.items():
                write_yaml(path, content)
        places = {"placement": supervisor.describe_places()} if self.settings.placement.is_ray else {}
        self.run.write_record({**resolved(self.settings, plan), **places})


def _longest_wait_seconds(settings: RunSettings) -> float:
    """Return the longest time that a program waits for another one, by the settings of trainer and environments."""
    flags, usual = settings.flags["env"].values, RunConfig.model_fields["wait_timeout"].default
    waits = [settings.trainer.wait_timeout]
    for entry in settings.environments:
        with contextlib.suppress(TypeError, ValueError):  # the environment refuses what is not a number
            waits.append(float({"wait_timeout": usual, **entry.env, **flags}["wait_timeout"]))
    return max(waits)


def _lag_of_trainer(snapshot: Snapshot, config: RunConfig) -> tuple[float, str]:
    """Return for how long the trainer may go on without environments, and what it does if it goes on for longer.

    After its last step it waits for no batch: it writes a checkpoint, and W&B sends what it has.
    """
    if snapshot.step < config.training_steps:
        return TRAINER_LAG_SECONDS, "still waits for batches"
    return config.wait_timeout, f"has not ended within {config.wait_timeout:g} s after its last step"


def _with_server_count(spec: ChildSpec, fleet: Fleet) -> ChildSpec:
    """Return a program's current command: the trainer's says how many servers to await."""
    return replace(spec, command=fleet.for_trainer(spec.command)) if spec.name == TRAINER else spec


def _with_version(server: ChildSpec, snapshot: Snapshot) -> ChildSpec:
    """Add to `server`'s command the policy version of the checkpoint it serves, as the trainer last reported it."""
    version = snapshot.rows[-1].get(metric_names.POLICY_VERSION) if snapshot.rows else None
    version_flag = () if version is None else ("--policy-version", str(int(version)))
    return replace(server, command=(*server.command, *version_flag))
