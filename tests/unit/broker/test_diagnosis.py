"""The diagnosis names what a run waits for: each rule on a planted stall, and none of them in a healthy run."""

import pytest

from atropos_api.broker.diagnosis import diagnose
from atropos_api.broker.facts import EnvironmentFacts, Facts, HoldFacts, ServerFacts, StartFacts
from atropos_api.broker.flow import gather
from atropos_api.broker.starting import START_SECONDS
from atropos_api.wire.reports import EnvironmentActivity, OpenRollout, ServerUse, WaitingMember

HEALTHY = {
    "run": "r", "limit": 24, "outstanding": 8, "batch_size": 8, "trainer_quiet_seconds": 1.0, "step_seconds": 2.0,
    "environments": [EnvironmentFacts(name="gsm8k", open_rollouts=4, open_requests=9, usual_seconds=6.0)],
}  # fmt: skip
WAITING = {"batch_wait_seconds": 8.0, "batch_number": 5, "outstanding": 3}
LATE = OpenRollout(name="Natalia sold", seconds=90.0, done=7, wanted=8, last_event="request", last_event_seconds=88.0)


def finding(**facts):
    return diagnose(Facts(**HEALTHY | facts)).finding


def environment(**values):
    return [EnvironmentFacts(**{"name": "gsm8k", "open_rollouts": 4, "open_requests": 9, **values})]


def test_a_healthy_run_has_no_finding_but_that_it_runs():
    found = diagnose(Facts(**HEALTHY))
    assert (found.finding.rule, found.finding.edge, found.finding.severity) == ("flowing", None, "ok")
    assert found.notes == []


def test_an_empty_queue_and_a_waiting_trainer_are_rollouts():
    found = finding(**WAITING)
    assert (found.rule, found.edge, found.severity) == ("rollouts", "inference-broker", "blocked")
    assert "3 of 8 sequences are queued" in found.headline
    assert "batch 5" in found.detail


def test_a_queue_at_its_budget_is_the_trainer_and_a_long_step_is_a_stall():
    slow = finding(outstanding=24, busy_seconds=1.0)
    assert (slow.rule, slow.edge, slow.severity) == ("trainer", "broker-trainer", "slow")
    stuck = finding(outstanding=24, busy_seconds=7.0, phases={"publish": 6.5, "train": 0.5})
    assert stuck.severity == "blocked"
    assert "In progress: publish, for 6.5 s" in stuck.detail
    assert "fewer publishes" in stuck.advice, "a larger trainer would publish no sooner"
    assert "larger trainer" in finding(outstanding=24, busy_seconds=7.0, phases={"train": 6.5}).advice


def test_idle_inference_with_open_rollouts_is_a_tool_or_a_sandbox():
    idle = environment(open_rollouts=12, open_requests=0, idle_seconds=14.0, slowest=[LATE])
    found = finding(**WAITING, environments=idle)
    assert (found.rule, found.edge, found.severity) == ("tool", "environment-inference", "blocked")
    assert "12 groups of gsm8k are open" in found.headline
    notes = diagnose(Facts(**HEALTHY | WAITING | {"environments": idle})).notes
    assert [note.advice for note in notes if note.rule == "rollouts"] == [""], "more inference would not help"
    assert "Natalia sold" in found.detail


def test_one_busy_environment_makes_inference_not_idle():
    busy = [
        *environment(open_requests=0, idle_seconds=14.0),
        EnvironmentFacts(name="b", open_rollouts=1, open_requests=1),
    ]
    assert finding(**WAITING, environments=busy).rule == "rollouts"


@pytest.mark.parametrize(("waits", "severity"), [(8.0, "blocked"), (None, "slow")])
def test_a_long_hold_is_the_evaluation_and_blocks_if_the_trainer_waits_for_it(waits, severity):
    hold = HoldFacts(seconds=40.0, left_seconds=20.0, version=7, reason="eval of gsm8k")
    found = finding(hold=hold, publish_wait_seconds=waits)
    assert (found.rule, found.edge, found.severity) == ("hold", "trainer-publish", severity)
    assert "An evaluation (eval of gsm8k) has held policy version 7 for 40 s" in found.headline
    assert finding(hold=HoldFacts(seconds=1.0, left_seconds=9.0, version=7, reason="")).rule == "flowing"


def test_a_group_that_lacks_members_for_three_times_the_usual_is_named():
    found = finding(**WAITING, environments=environment(usual_seconds=6.0, slowest=[LATE]))
    assert (found.rule, found.edge, found.severity) == ("straggler", "inference-broker", "blocked")
    assert "A group of gsm8k lacks 1 of 8 rollouts after 90 s: Natalia sold" in found.headline
    assert "15 times" in found.detail
    assert "Last event 88 s ago: request" in found.detail


def test_a_straggler_s_unfinished_rollouts_are_named_with_what_each_did_last():
    waiting = [
        WaitingMember(member=6, last_event="tool python: running", seconds=88.0),
        WaitingMember(member=2, seconds=90.0),
    ]
    late = OpenRollout(name="Natalia sold", seconds=90.0, done=6, wanted=8, last_event="answer", waiting=waiting)
    found = finding(**WAITING, environments=environment(usual_seconds=6.0, slowest=[late]))
    told = "Unfinished: rollout 6, tool python: running 88 s ago; rollout 2, no event for 90 s."
    assert told in found.detail


def test_waiting_for_rollouts_tells_the_load_of_the_servers_and_advises_by_it():
    full = [ServerFacts(server_id="a", running=64, waiting=40, kv_free=0.02), ServerFacts(server_id="b", kv_free=0.9)]
    found = finding(**WAITING, servers=full)
    told = "2 servers: 64 requests run and 40 wait inside, the least of its KV cache is free in a: 2%."
    assert told in found.detail
    assert "more servers" in found.advice
    room = finding(**WAITING, servers=[ServerFacts(server_id="a", running=3, kv_free=0.9)])
    assert "--env.max_num_workers" in room.advice
    assert "more servers" not in room.advice


@pytest.mark.parametrize("changes", [{"seconds": 17.0}, {"done": 8}])
def test_a_group_that_is_late_but_not_by_much_or_whole_is_not_a_straggler(changes):
    late = OpenRollout(**{"name": "n", "seconds": 90.0, "done": 7, "wanted": 8} | changes)
    assert finding(**WAITING, environments=environment(usual_seconds=6.0, slowest=[late])).rule == "rollouts"


def test_a_straggler_that_the_trainer_does_not_wait_for_is_a_note():
    found = diagnose(Facts(**HEALTHY | {"environments": environment(usual_seconds=6.0, slowest=[LATE])}))
    assert found.finding.rule == "flowing"
    assert [(note.rule, note.severity) for note in found.notes] == [("straggler", "slow")]


@pytest.mark.parametrize(
    ("facts", "rule", "words"),
    [
        ({"store_failure": "disk full"}, "store", "takes no writes"),
        ({"run": None}, "no-run", "No trainer has begun a run"),
        ({"run": None, "finished": True}, "finished", "finished"),
        ({"trainer_quiet_seconds": 99.0}, "trainer-silent", "silent for 99 s"),
        ({**WAITING, "environments": []}, "no-environment", "No environment is connected"),
        ({**WAITING, "environments": environment(connected=False)}, "no-environment", "connected"),
        ({**WAITING, "environments": environment(unavailable=["http://a:1"])}, "inference-down", "gsm8k"),
        ({**WAITING, "environments": environment(paused_because="3s fill no 8")}, "group-size", "fit no batch"),
        ({**WAITING, "environments": environment(drops="all scores are 0")}, "dropped", "dropped before"),
        ({**WAITING, "minimum_of": ["math"]}, "minimum", "minimum share of math"),
        ({"fetch_share": 0.6}, "rollouts-slower", "60%"),
        ({"sync_share": 0.5}, "publish-slower", "50%"),
    ],
)
def test_other_stalls_are_named_too(facts, rule, words):
    found = finding(**facts)
    assert found.rule == rule
    assert words in found.headline


def test_the_first_stall_is_the_finding_and_the_others_are_notes():
    late = environment(usual_seconds=6.0, slowest=[LATE])
    hold = HoldFacts(seconds=40.0, left_seconds=20.0, version=7, reason="")
    found = diagnose(Facts(**HEALTHY | WAITING | {"environments": late, "hold": hold}))
    assert found.finding.rule == "straggler"
    assert {note.rule for note in found.notes} == {"hold", "rollouts"}


DOWN = {"environments": environment(unavailable=["http://a:1"], open_requests=0, idle_seconds=14.0)}


@pytest.mark.parametrize(
    ("facts", "awaited"),
    [
        (DOWN, "the inference server"),
        (DOWN | WAITING, "the inference server"),
        ({"run": None}, "the trainer"),
        ({"run": None, **DOWN}, "the trainer and the inference server"),
        ({"trainer_quiet_seconds": 99.0}, "the trainer"),
        ({**WAITING, "environments": []}, "an environment"),
        (WAITING, "the first rollouts"),
    ],
)
def test_a_part_that_is_not_there_yet_is_a_start_and_after_minutes_a_stall(facts, awaited):
    found = diagnose(Facts(**HEALTHY | facts | {"start": StartFacts(seconds=26.0)}))
    assert (found.finding.rule, found.finding.severity, found.finding.edge) == ("starting", "ok", None)
    assert found.finding.headline == f"Starting: waiting for {awaited}"
    assert found.notes == [], "what follows from the missing part is not told besides"
    assert finding(**facts, start=StartFacts(seconds=START_SECONDS)).severity != "ok"


@pytest.mark.parametrize(
    ("facts", "rule"),
    [
        ({"store_failure": "disk full"}, "store"),
        ({**WAITING, "environments": environment(drops="all scores are 0")}, "dropped"),
        ({**WAITING, "environments": environment(paused_because="3s fill no 8")}, "group-size"),
        ({**WAITING, "environments": environment(open_requests=0, idle_seconds=14.0)}, "tool"),
    ],
)
def test_what_no_start_has_by_itself_is_a_stall_at_once(facts, rule):
    found = finding(**facts, start=StartFacts(seconds=26.0))
    assert (found.rule, found.severity) == (rule, "blocked")


def test_after_the_first_publish_a_server_that_is_gone_is_a_stall_and_a_missing_environment_is_none_yet():
    start = StartFacts(seconds=26.0, published=True)
    assert finding(**WAITING | DOWN, start=start).rule == "inference-down"
    assert finding(**WAITING, environments=[], start=start).rule == "starting"


def test_a_broker_tells_a_start_until_the_first_group_of_the_run_and_again_after_it_was_started_again(broker):
    def rule():
        return diagnose(gather(broker.inner)).finding.rule

    assert rule() == "starting", "no trainer has begun a run yet"
    broker.begin()
    env = broker.register()
    loading = ServerUse(url="http://a:1", available=False, open_requests=0, requests=0)
    activity = EnvironmentActivity(open_rollouts=0, open_requests=0, servers=[loading])
    broker.inner.reports.take_environment(env, activity)
    assert rule() == "starting"
    broker.send(env, 1)
    assert rule() == "inference-down", "it has worked before"
    assert broker.batch(1) is None
    broker.send(env, 2)
    assert broker.batch(1) is not None
    broker.restart()
    broker.inner.reports.take_environment(env, activity)
    assert rule() == "starting", "its servers start again as well"
    broker.now += START_SECONDS
    broker.inner.reports.take_environment(env, activity)
    assert rule() != "starting"


def test_a_new_run_s_trainer_has_not_been_busy_since_the_last_batch_of_the_run_before(broker):
    broker.begin()
    broker.send(broker.register(), 1, 2)
    assert broker.batch(1) is not None
    broker.now += 7200.0
    assert gather(broker.inner).busy_seconds == 7200.0
    broker.begin(name="next")
    assert gather(broker.inner).busy_seconds is None
