"""The flow of a run as a watcher sees it: rates on its edges, the diagnosis, and the state of its parts.

The facts are gathered from the broker's state: what it sees itself, and what the parts reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import msgspec

from atropos_api.broker.activity import Totals
from atropos_api.broker.broker import Broker
from atropos_api.broker.diagnosis import diagnose
from atropos_api.broker.facts import SILENT_SECONDS, EnvironmentFacts, Facts, HoldFacts, ServerFacts, StartFacts
from atropos_api.broker.findings import Diagnosis
from atropos_api.broker.runs import is_over, quiet_seconds, silence_limit
from atropos_api.common import metric_names as names
from atropos_api.store.base import EnvironmentRow, RunRow
from atropos_api.wire.reports import EnvironmentActivity, OpenRollout
from atropos_api.wire.servers import InferenceServer, ServerState

FEWEST_DROPS: Final = 8
RECENT_SECONDS: Final = 60.0
MOST_SERVERS: Final = 64


class FlowRates(msgspec.Struct, kw_only=True):
    """Rates on the edges of the flow, per second: over the last half minute, or since a watcher first asked."""

    seconds: float
    requests: float
    """Requests that inference servers answered, as environments report them."""
    groups: float
    sequences: float
    tokens: float
    batches: float
    steps: float
    publishes: float


class FlowStatus(msgspec.Struct, kw_only=True):
    """The flow from environments to published weights: its rates, the fill of the queue, and the diagnosis."""

    rates: FlowRates | None
    outstanding: int
    """The amount queued, or in batches that are not trained yet, in the run's unit."""
    limit: int
    """The `outstanding` from which on environments may start no more groups; 0 without an open run."""
    diagnosis: Diagnosis


class TrainerStatus(msgspec.Struct, kw_only=True):
    """A trainer as it reported itself; legacy trainers report nothing."""

    run_id: str
    quiet_seconds: float
    """Time since its report."""
    step: int
    phases: dict[str, float]
    """Each part of the step that is in progress, with its seconds so far."""
    host: str
    pid: int
    world_size: int


class ServerStatus(msgspec.Struct, kw_only=True):
    """A registered inference server with the load that it reported at its last renewal."""

    server_id: str
    state: ServerState
    policy: str
    url: str
    version: int | None
    running: int
    waiting: int
    kv_free: float | None
    """Share of its KV cache that is free."""
    quiet_seconds: float
    """Time since its last renewal."""
    reason: str | None
    """The reason why it is gone."""


def describe_flow(broker: Broker, *, store_failure: str | None = None) -> FlowStatus:
    facts = gather(broker, store_failure=store_failure)
    rates = broker.state.activity.rates(totals(broker))
    return FlowStatus(
        rates=None if rates is None else FlowRates(seconds=rates.time, **_without_time(rates)),
        outstanding=facts.outstanding,
        limit=facts.limit,
        diagnosis=diagnose(facts),
    )


def describe_trainers(broker: Broker) -> list[TrainerStatus]:
    now = broker.state.clock()
    return [
        TrainerStatus(
            run_id=run_id,
            quiet_seconds=now - report.at,
            step=report.content.step,
            phases={name: seconds + now - report.at for name, seconds in report.content.phases.items()},
            host=report.content.host,
            pid=report.content.pid,
            world_size=report.content.world_size,
        )
        for run_id, report in broker.state.activity.trainers.items()
    ]


def describe_servers(broker: Broker) -> list[ServerStatus]:
    """Return the registered servers, those with the most waiting requests first; at most `MOST_SERVERS`."""
    busiest = sorted(broker.state.servers.select().servers, key=_load, reverse=True)
    return [
        ServerStatus(
            server_id=one.server_id,
            state=one.state,
            policy=one.policy,
            url=one.url,
            version=one.version,
            running=one.running,
            waiting=one.waiting,
            kv_free=one.kv_free,
            quiet_seconds=one.silent_seconds,
            reason=one.reason,
        )
        for one in busiest[:MOST_SERVERS]
    ]


def _load(server: InferenceServer) -> tuple[bool, int, int]:
    return server.state != "gone", server.waiting, server.running


def activity_of(broker: Broker, environment_id: int) -> EnvironmentActivity | None:
    """Return an environment's report as of now, or None if it sent none."""
    report = broker.state.activity.environments.get(environment_id)
    return None if report is None else current(report.content, broker.state.clock() - report.at)


def gather(broker: Broker, *, store_failure: str | None = None) -> Facts:
    state = broker.state
    run = state.runs.open
    environments = [_environment(broker, row) for row in state.environments]
    if run is None or is_over(run):
        finished = run is not None or state.runs.last_finished is not None
        start = StartFacts(seconds=state.clock() - state.activity.process_began_at)
        return Facts(
            store_failure=store_failure, finished=finished, ended=state.ended, environments=environments, start=start
        )
    now, activity = state.clock(), state.activity
    outstanding, limit = broker.pacer.budget(run)
    wait = activity.batch_wait
    # The trainer does not wait for a batch that it has, or that it fetches while it still trains the one before.
    waits = run.handed_batch < wait.number <= broker.trained_steps(run) - run.starting_step + 1
    report = activity.trainers.get(run.run_id)
    age = now - report.at if report is not None else 0.0
    shares = _shares(broker.metrics.latest(run.run_id))
    return Facts(
        run=run.name,
        store_failure=store_failure,
        ended=state.ended,
        start=_start(broker, run, now),
        queued_sequences=state.queue.sequences,
        outstanding=outstanding,
        limit=limit,
        unit=run.unit,
        batch_size=run.batch_size,
        batch_number=wait.number,
        batch_wait_seconds=wait.seconds(now) if waits else None,
        publish_wait_seconds=activity.publish_wait.seconds(now),
        hold=_hold(broker, run, now),
        minimum_of=broker.batches.minima_missing(run) if broker.batches.retry_at is not None else (),
        trainer_quiet_seconds=min(quiet_seconds(run, now), age if report is not None else float("inf")),
        trainer_silence_limit_seconds=SILENT_SECONDS if report is not None else silence_limit(run),
        busy_seconds=_busy_seconds(broker, run, now),
        phases={} if report is None else {name: value + age for name, value in report.content.phases.items()},
        step_seconds=shares.get(names.TIME_STEP),
        fetch_share=shares.get(names.TIME_FETCH, 0.0),
        sync_share=shares.get(names.TIME_SYNC_WAIT, 0.0),
        environments=environments,
        servers=_servers(broker, run),
    )


def totals(broker: Broker) -> Totals:
    """Return the counts whose differences give the rates of the flow."""
    state, counters = broker.state, broker.state.counters
    run = state.runs.open or state.runs.last_finished
    return Totals(
        time=state.clock(),
        requests=state.activity.requests(),
        groups=counters.groups_received_total,
        sequences=counters.sequences_received_total,
        tokens=counters.tokens_received_total,
        batches=counters.batches_handed_total,
        steps=0 if run is None else broker.trained_steps(run),
        publishes=state.runs.policy_count,
    )


def current(report: EnvironmentActivity, age: float) -> EnvironmentActivity:
    """Return a report with its durations as of now, `age` seconds after it came."""
    slowest = [_aged(one, age) for one in report.slowest]
    idle = 0.0 if report.open_requests else report.idle_seconds + age
    return msgspec.structs.replace(report, slowest=slowest, idle_seconds=idle)


def _aged(one: OpenRollout, age: float) -> OpenRollout:
    return msgspec.structs.replace(
        one,
        seconds=one.seconds + age,
        last_event_seconds=one.last_event_seconds + age if one.last_event else 0.0,
        waiting=[msgspec.structs.replace(member, seconds=member.seconds + age) for member in one.waiting],
    )


def _environment(broker: Broker, row: EnvironmentRow) -> EnvironmentFacts:
    state = broker.state
    now = state.clock()
    quiet = now - row.seen_at
    run = state.runs.open
    latest = state.drops.latest_of(row.environment_id)
    dropping = latest is not None and now - latest.time < RECENT_SECONDS
    many = sum(state.drops.of(row.environment_id).values()) >= FEWEST_DROPS
    known = EnvironmentFacts(
        name=row.display_name,
        connected=row.connected and quiet <= state.settings.environment_timeout,
        quiet_seconds=quiet,
        paused_because=broker.sizes.reason_to_pause(run, row) if run is not None else None,
        drops=latest.explanation if latest is not None and dropping and many else None,
    )
    found = state.activity.environments.get(row.environment_id)
    if found is None:
        return known
    report = current(found.content, now - found.at)
    available = any(server.available for server in report.servers)
    return replace(
        known,
        open_rollouts=report.open_rollouts,
        open_requests=report.open_requests,
        idle_seconds=report.idle_seconds,
        usual_seconds=report.usual_seconds,
        slowest=report.slowest,
        unavailable=() if available else [server.url for server in report.servers],
        evaluating=report.evaluating,
    )


def _servers(broker: Broker, run: RunRow) -> list[ServerFacts]:
    return [
        ServerFacts(server_id=one.server_id, running=one.running, waiting=one.waiting, kv_free=one.kv_free)
        for one in broker.state.servers.select(run.policy, answering=True).servers
    ]


def _without_time(rates: Totals) -> dict[str, float]:
    values = rates._asdict()
    del values["time"]
    return values


def _start(broker: Broker, run: RunRow, now: float) -> StartFacts | None:
    activity = broker.state.activity
    if activity.collected_run == run.run_id:
        return None
    began_at = max(min(run.began_at, now), activity.process_began_at)
    return StartFacts(seconds=now - began_at, published=activity.published_run == run.run_id)


def _busy_seconds(broker: Broker, run: RunRow, now: float) -> float | None:
    """Return the time since this run's last batch was handed out; None if there was none in this process."""
    handed_at = broker.recent.handed_at
    return None if handed_at is None or handed_at < run.began_at else now - handed_at


def _hold(broker: Broker, run: RunRow, now: float) -> HoldFacts | None:
    alive = broker.holds.alive(run)
    if not alive:
        return None
    longest = max(alive, key=lambda row: row.until)
    since = min(row.since for row in alive)
    return HoldFacts(
        seconds=now - since, left_seconds=longest.until - now, version=longest.version, reason=longest.reason
    )


def _shares(latest: Mapping[str, float]) -> dict[str, float]:
    """Return the time of the last step, and the shares of it that were waits for the batch and for publishing."""
    step = latest.get(names.TIME_STEP, 0.0)
    if step <= 0:
        return {}
    waits = {name: latest[name] / step for name in (names.TIME_FETCH, names.TIME_SYNC_WAIT) if name in latest}
    return {names.TIME_STEP: step, **waits}
