"""The diagnosis of a run: what it waits for, by rule, in words, and on which edge of the flow.

The flow is environment -> inference -> broker -> trainer -> publish. `diagnose` is a pure function of `Facts`. The
first rule that finds a stall gives the finding; the others that hold become notes. If nothing stalls, the finding
names the slower side. A part that is not there yet in the first minutes of a run is no stall: the run is starting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from atropos_api.broker.facts import SILENT_SECONDS, Facts, ServerFacts
from atropos_api.broker.findings import HARMLESS_UNLESS_WAITED_FOR, Diagnosis, Finding
from atropos_api.broker.starting import calm_while_starting
from atropos_api.wire.reports import OpenRollout, WaitingMember

REQUESTS: Final = "environment-inference"
GROUPS: Final = "inference-broker"
BATCHES: Final = "broker-trainer"
PUBLISHES: Final = "trainer-publish"

IDLE_SECONDS: Final = 5.0
HELD_SECONDS: Final = 5.0
STRAGGLER_TIMES: Final = 3.0
LEAST_STRAGGLER_SECONDS: Final = 2.0
LONG_STEP_TIMES: Final = 3.0
LEAST_LONG_STEP_SECONDS: Final = 5.0
SLOW_SHARE: Final = 0.25

FASTER_PUBLISHES: Final = "--overlap-publish true, a smaller --drain-seconds, or fewer publishes"


Rule = Callable[[Facts], Finding | None]


def diagnose(facts: Facts) -> Diagnosis:
    """Return what the run waits for."""
    if facts.ended and not facts.finished:
        return Diagnosis(finding=_ended(), notes=[])
    found = calm_while_starting(facts, [finding for rule in RULES if (finding := rule(facts)) is not None])
    blocked = [finding for finding in found if finding.severity == "blocked"]
    slow = [finding for finding in found if finding.rule not in HARMLESS_UNLESS_WAITED_FOR]
    first = (blocked or slow or [_flowing(facts)])[0]
    return Diagnosis(finding=first, notes=[finding for finding in found if finding is not first])


def _no_store(facts: Facts) -> Finding | None:
    if facts.store_failure is None:
        return None
    return Finding(
        rule="store",
        edge=GROUPS,
        severity="blocked",
        headline="The broker's store takes no writes",
        detail=facts.store_failure,
        advice="the text names the cause and what to do; nothing that was acknowledged is lost",
    )


def _no_run(facts: Facts) -> Finding | None:
    if facts.run is not None:
        return None
    if facts.finished:
        return Finding(rule="finished", severity="ok", headline="The run is finished", detail="No other run is open.")
    return Finding(
        rule="no-run",
        edge=BATCHES,
        severity="blocked",
        headline="No trainer has begun a run",
        detail=f"Connected environments, which wait for one: {len(facts.connected)}.",
        advice="start a trainer, atropos-grpo or atropos-grpo-run, with this broker's address",
    )


def _held(facts: Facts) -> Finding | None:
    hold = facts.hold
    if hold is None or hold.seconds < HELD_SECONDS:
        return None
    waits = facts.publish_wait_seconds is not None
    who = f"An evaluation ({hold.reason})" if hold.reason else "An evaluation"
    kept = "the policy" if hold.version is None else f"policy version {hold.version}"
    waiting = f" The trainer has waited to publish for {_span(facts.publish_wait_seconds or 0.0)}." if waits else ""
    return Finding(
        rule="hold",
        edge=PUBLISHES,
        severity="blocked" if waits else "slow",
        headline=f"{who} has held {kept} for {_span(hold.seconds)}"
        + ("; the trainer waits to publish" if waits else ""),
        detail=f"The hold ends in {_span(hold.left_seconds)} unless it is renewed.{waiting}",
        advice="make evaluations smaller or rarer (--env.steps_per_eval), or end every hold: DELETE /v1/policy/hold",
        seconds=facts.publish_wait_seconds if waits else hold.seconds,
    )


def _trainer_silent(facts: Facts) -> Finding | None:
    quiet, limit = facts.trainer_quiet_seconds, facts.trainer_silence_limit_seconds
    if quiet is None or quiet <= limit or facts.batch_wait_seconds is not None:
        return None
    return Finding(
        rule="trainer-silent",
        edge=BATCHES,
        severity="blocked",
        headline=f"The trainer has been silent for {_span(quiet)}",
        detail=f"One at work would have called within {_span(limit)}; its process may have ended or hang.",
        advice="look at the trainer's log; start it again with --resume auto",
        seconds=quiet,
    )


def _no_environment(facts: Facts) -> Finding | None:
    if facts.run is None or not facts.waits_for_batch or facts.connected:
        return None
    known = len(facts.environments)
    return Finding(
        rule="no-environment",
        edge=GROUPS,
        severity="blocked",
        headline="No environment is connected",
        detail=f"{known} were, and have left or are silent." if known else "None has registered yet.",
        advice="start an environment server: python my_env.py serve",
        seconds=facts.batch_wait_seconds,
    )


def _servers_down(facts: Facts) -> Finding | None:
    down = {url: one.name for one in facts.connected for url in one.unavailable}
    if not down:
        return None
    return Finding(
        rule="inference-down",
        edge=REQUESTS,
        severity="blocked" if facts.waits_for_batch else "slow",
        headline=f"No inference server answers {', '.join(sorted(set(down.values())))}",
        detail=f"Tried: {', '.join(sorted(down))}.",
        advice="look at the server's log; a server without a policy answers again after the next publish",
        seconds=facts.batch_wait_seconds,
    )


def _tool(facts: Facts) -> Finding | None:
    """Inference has nothing to do although groups are open: those wait for something else."""
    reporting = [one for one in facts.connected if one.open_rollouts]
    waiting = [one for one in reporting if not one.open_requests and one.idle_seconds >= IDLE_SECONDS]
    if not waiting or len(waiting) < len(reporting):
        return None
    count = sum(one.open_rollouts or 0 for one in waiting)
    names = ", ".join(one.name for one in waiting)
    oldest = max((slow for one in waiting for slow in one.slowest), key=lambda one: one.seconds, default=None)
    return Finding(
        rule="tool",
        edge=REQUESTS,
        severity="blocked" if facts.waits_for_batch else "slow",
        headline=f"Inference is idle while {_count(count, 'group')} of {names} "
        f"{'is' if count == 1 else 'are'} open: a tool, a sandbox or a reward holds them up",
        detail=f"No request has been in progress for {_span(min(one.idle_seconds for one in waiting))}."
        + (f" The oldest: {oldest.name}, for {_span(oldest.seconds)}. {_last_event(oldest)}" if oldest else ""),
        advice="look at what the environment awaits between requests; --env.worker_timeout bounds a rollout",
        seconds=min(one.idle_seconds for one in waiting),
    )


def _straggler(facts: Facts) -> Finding | None:
    late = [
        (slow.seconds / one.usual_seconds, one, slow)
        for one in facts.connected
        if one.usual_seconds
        for slow in one.slowest
        if slow.done < slow.wanted and slow.seconds > max(LEAST_STRAGGLER_SECONDS, STRAGGLER_TIMES * one.usual_seconds)
    ]
    if not late:
        return None
    times, one, slow = max(late, key=lambda entry: entry[0])
    return Finding(
        rule="straggler",
        edge=GROUPS,
        severity="blocked" if facts.waits_for_batch else "slow",
        headline=f"A group of {one.name} lacks {slow.wanted - slow.done} of {slow.wanted} rollouts after "
        f"{_span(slow.seconds)}: {slow.name}",
        detail=f"19 of 20 groups take {_span(one.usual_seconds or 0.0)} at most, this one {times:.0f} times that. "
        + _last_event(slow)
        + (f" {len(late) - 1} more are late." if len(late) > 1 else ""),
        advice="close groups without late rollouts (--env.late_members), bound a rollout with --env.worker_timeout, "
        "or its answer with a smaller --env.max_token_length",
        seconds=slow.seconds,
    )


def _dropped(facts: Facts) -> Finding | None:
    dropping = [one for one in facts.connected if one.drops]
    if not dropping or not facts.waits_for_batch:
        return None
    return Finding(
        rule="dropped",
        edge=GROUPS,
        severity="blocked",
        headline=f"{', '.join(one.name for one in dropping)}: groups are collected, but dropped before they are sent",
        detail=" ".join(str(one.drops) for one in dropping),
        advice="the text names the reason and an example; see the table of dropped groups",
        seconds=facts.batch_wait_seconds,
    )


def _group_size(facts: Facts) -> Finding | None:
    paused = [one for one in facts.connected if one.paused_because]
    if not paused:
        return None
    return Finding(
        rule="group-size",
        edge=GROUPS,
        severity="blocked" if facts.waits_for_batch else "slow",
        headline=f"Groups of {', '.join(one.name for one in paused)} fit no batch",
        detail=str(paused[0].paused_because),
        advice="choose a group size that divides the batch size",
        seconds=facts.batch_wait_seconds,
    )


def _minimum(facts: Facts) -> Finding | None:
    if not facts.minimum_of or not facts.waits_for_batch:
        return None
    return Finding(
        rule="minimum",
        edge=GROUPS,
        severity="blocked",
        headline=f"Batch {facts.batch_number} waits for the minimum share of {', '.join(facts.minimum_of)}",
        detail=f"{facts.queued_sequences} sequences are queued, too few of them from there.",
        advice="lower --env.min_batch_allocation, or --min-allocation-wait of the broker",
        seconds=facts.batch_wait_seconds,
    )


def _rollouts(facts: Facts) -> Finding | None:
    """The trainer waits and too little is queued."""
    if not facts.waits_for_batch:
        return None
    open_rollouts = sum(one.open_rollouts or 0 for one in facts.connected)
    doing = f" {_count(open_rollouts, 'group')} {'is' if open_rollouts == 1 else 'are'} being collected."
    silent = [one for one in facts.connected if one.quiet_seconds > SILENT_SECONDS]
    said = f" Silent for over {_span(SILENT_SECONDS)}: {', '.join(one.name for one in silent)}." if silent else ""
    evaluating = [one.name for one in facts.connected if one.evaluating]
    said += f" Evaluating: {', '.join(evaluating)}." if evaluating else ""
    return Finding(
        rule="rollouts",
        edge=GROUPS,
        severity="blocked",
        headline=f"The trainer waits for rollouts: {facts.outstanding} of {facts.batch_size} {facts.unit} are queued",
        detail=f"It has waited for batch {facts.batch_number} for {_span(facts.batch_wait_seconds or 0.0)}."
        + (doing if any(one.open_rollouts is not None for one in facts.connected) else "")
        + said
        + _load_of(facts.servers),
        advice="" if _tool(facts) else _inference_advice(facts.servers),  # then inference is not the bottleneck
        seconds=facts.batch_wait_seconds,
    )


def _load_of(servers: Sequence[ServerFacts]) -> str:
    if not servers:
        return ""
    running, waiting = sum(one.running for one in servers), sum(one.waiting for one in servers)
    known = [(one.kv_free, one.server_id) for one in servers if one.kv_free is not None]
    free, name = min(known, default=(1.0, ""))
    fullest = f", the least of its KV cache is free in {name}: {free:.0%}" if name else ""
    return f" {_count(len(servers), 'server')}: {running} requests run and {waiting} wait inside{fullest}."


def _inference_advice(servers: Sequence[ServerFacts]) -> str:
    """Return the way to more rollouts: servers in which no request waits can run more of them at once."""
    if not servers:
        return "give inference more: more servers, more rollouts at once (--env.max_num_workers), shorter answers"
    if any(one.waiting for one in servers):
        return "requests wait inside the servers: more servers, more memory for their KV cache, or shorter answers"
    return "no request waits inside a server: let more rollouts run at once (--env.max_num_workers)"


def _trainer(facts: Facts) -> Finding | None:
    """The queue is full, and the trainer asks for no batch."""
    full = facts.limit > 0 and facts.outstanding >= facts.limit
    if facts.run is None or not full or facts.batch_wait_seconds is not None:
        return None
    usual, busy = facts.step_seconds, facts.busy_seconds
    long = busy is not None and busy > max(LEAST_LONG_STEP_SECONDS, LONG_STEP_TIMES * (usual or 0.0))
    phase = max(facts.phases, key=lambda name: facts.phases[name], default=None)
    doing = "" if phase is None else f" In progress: {phase}, for {_span(facts.phases[phase])}."
    usually = f" A step usually takes {_span(usual)}." if usual else ""
    return Finding(
        rule="trainer",
        edge=BATCHES,
        severity="blocked" if long else "slow",
        headline="The trainer is the slower side: the queue is at its budget and environments are held"
        + (f"; it took its last batch {_span(busy)} ago" if long and busy is not None else ""),
        detail=f"{facts.outstanding} of {facts.limit} {facts.unit} are queued or in batches.{doing}{usually}",
        advice=FASTER_PUBLISHES
        if phase == "publish"
        else "a larger trainer, a larger token budget, or fewer inference resources: there are enough rollouts",
        seconds=busy,
    )


RULES: Final[Sequence[Rule]] = (
    _no_store,
    _no_run,
    _held,
    _trainer_silent,
    _no_environment,
    _servers_down,
    _group_size,
    _tool,
    _straggler,
    _dropped,
    _minimum,
    _rollouts,
    _trainer,
)


def _ended() -> Finding:
    return Finding(
        rule="ended",
        severity="ok",
        headline="The run has ended before it was finished",
        detail="This is what its directory holds.",
        advice="start its trainer again with --resume auto to go on",
    )


def _flowing(facts: Facts) -> Finding:
    """Return the finding of a run in which nothing stalls: the side that the other waits for most."""
    if facts.fetch_share > max(SLOW_SHARE, facts.sync_share):
        return Finding(
            rule="rollouts-slower",
            edge=GROUPS,
            severity="slow",
            headline=f"Running; rollouts are the slower side: the trainer waits for them {facts.fetch_share:.0%} "
            "of each step",
            advice="more inference servers or more rollouts at once would shorten a step",
        )
    if facts.sync_share > SLOW_SHARE:
        return Finding(
            rule="publish-slower",
            edge=PUBLISHES,
            severity="slow",
            headline=f"Running; the trainer waits for publishing {facts.sync_share:.0%} of each step",
            advice=FASTER_PUBLISHES,
        )
    return Finding(rule="flowing", severity="ok", headline="Running; nothing waits")


def _last_event(slow: OpenRollout) -> str:
    """Return what the group waits for: by rollout, if its environment tells them apart."""
    if slow.waiting:
        return f"Unfinished: {'; '.join(map(_describe_member, slow.waiting))}."
    return f"Last event {_span(slow.last_event_seconds)} ago: {slow.last_event}." if slow.last_event else ""


def _describe_member(one: WaitingMember) -> str:
    event = f"{one.last_event} {_span(one.seconds)} ago" if one.last_event else f"no event for {_span(one.seconds)}"
    return f"rollout {one.member}, {event}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _span(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 180:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
