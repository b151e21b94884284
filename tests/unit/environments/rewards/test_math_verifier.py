"""Mathematics is compared in children that are reused, limited in time and replaced, while the event loop is free."""

import asyncio
import gc
import os
import resource
import subprocess
import sys
import time

import pytest

from environments.rewards import MathVerifier, Outcome
from environments.rewards.protocol import MathVerifyUnavailable

HANGS = "9^{9^{9^9}}"
SLEEPER = """
import json, sys, time
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    question = json.loads(line)
    if question["gold"] == "sleep":
        time.sleep(60)
    print(json.dumps({"gold": True}), flush=True)
    if question["answer"] == "sleep":
        time.sleep(60)
    if question["answer"] == "die":
        sys.exit(7)
    print(json.dumps({"verdict": "correct"}), flush=True)
"""


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_expression_that_makes_sympy_hang_is_given_up_and_its_child_replaced_while_the_loop_runs_on(verifier):
    verifier.judge("1", "1")
    (before,) = verifier.child_pids

    async def judge_beside_a_clock():
        ticks = 0
        judging = asyncio.ensure_future(verifier.judge_all([("2", HANGS), ("2", "2")]))
        while not judging.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return ticks, await judging

    ticks, (hung, fine) = asyncio.run(judge_beside_a_clock())
    assert (hung.outcome, fine.outcome) == (Outcome.UNDECIDED, Outcome.CORRECT)
    # The limit of CPU time ends it; that of wall time is four times as long.
    assert "the CPU time limit was reached" in hung.reason
    assert ticks > 30
    assert verifier.child_pids != [before]
    assert not is_running(before)


def test_a_child_may_hold_two_gibibytes_and_no_more(verifier):
    """sympy's numbers could fill a machine's memory within the time limit."""
    verifier.judge("1", "1")
    (pid,) = verifier.child_pids
    assert resource.prlimit(pid, resource.RLIMIT_AS) == (2 << 30, 2 << 30)
    assert resource.prlimit(pid, resource.RLIMIT_CORE) == (0, 0)


def test_children_are_used_again(verifier):
    verifier.judge("1", "1")
    before = verifier.child_pids
    asyncio.run(verifier.judge_all([(str(number), "1") for number in range(20)]))
    assert verifier.child_pids == before


@pytest.fixture
def sleeper():
    command = (sys.executable, "-c", SLEEPER)
    with MathVerifier(workers=1, time_limit_seconds=0.1, child_command=command) as verifier:
        yield verifier


def test_a_child_that_sleeps_is_killed_by_the_clock(sleeper):
    assert sleeper.judge("1", "1").correct
    (before,) = sleeper.child_pids
    started = time.monotonic()
    assert sleeper.judge("1", "sleep").outcome is Outcome.UNDECIDED
    assert time.monotonic() - started < 5
    assert sleeper.judge("1", "1").correct
    assert sleeper.replaced == 1
    assert not is_running(before)


def test_giving_up_waiting_leaves_the_children_usable(sleeper):
    async def give_up():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sleeper.judge_all([("1", "sleep"), *((str(n), "sleep") for n in range(50))]), 0.05)
        return await sleeper.judge_all([("1", "1")])

    started = time.monotonic()
    assert asyncio.run(give_up())[0].correct
    # The 50 that had not begun were given up as well; each would have taken 0.4 s.
    assert time.monotonic() - started < 5


def test_a_gold_that_hangs_is_the_golds_fault(sleeper):
    assert sleeper.judge("sleep", "1").outcome is Outcome.GOLD_UNPARSABLE


def test_a_child_that_dies_is_replaced_and_asked_once_more(sleeper):
    judgement = sleeper.judge("1", "die")
    assert (judgement.outcome, judgement.reason) == (Outcome.UNDECIDED, "the process exited with code 7")
    assert sleeper.judge("1", "1").correct
    assert sleeper.replaced == 2


def test_only_decided_answers_are_remembered_and_no_more_than_asked():
    command = (sys.executable, "-c", SLEEPER)
    with MathVerifier(workers=1, time_limit_seconds=0.1, cache_size=2, child_command=command) as verifier:
        for answer in ("a", "b", "c", "sleep"):
            verifier.judge("1", answer)
        assert list(verifier._cache) == [("1", "b"), ("1", "c")]
        replaced = verifier.replaced
        assert verifier.judge("1", "c").correct
        # Another question would replace the sleeping child; a remembered answer asks none.
        assert verifier.replaced == replaced


def test_closing_and_forgetting_a_verifier_leave_no_process():
    command = (sys.executable, "-c", SLEEPER)
    closed, forgotten = (MathVerifier(workers=1, child_command=command) for _ in range(2))
    closed.judge("1", "1")
    forgotten.judge("1", "1")
    pids = closed.child_pids + forgotten.child_pids
    closed.close()
    del forgotten
    gc.collect()
    assert len(pids) == 2
    assert not any(map(is_running, pids))


def test_children_end_with_a_killed_parent():
    script = (
        "import os, signal\n"
        "from environments.rewards import MathVerifier\n"
        "v = MathVerifier(workers=1); v.judge('1', '1'); print(v.child_pids[0], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    pid = int(done.stdout)
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(pid)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("/no/such/program",), "cannot be started"),
        ((sys.executable, "-c", "import sys; sys.exit(3)"), "exited with code 3"),
        ((sys.executable, "-c", 'print(\'{"ready": false, "reason": "no math_verify"}\')'), "pip install"),
    ],
)
def test_a_child_that_cannot_start_is_an_error_and_never_a_score(command, words):
    with MathVerifier(workers=1, child_command=command) as verifier, pytest.raises(MathVerifyUnavailable, match=words):
        verifier.judge("1", "1")
