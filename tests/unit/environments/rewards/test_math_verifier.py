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


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\frac{1}{2}", "0.5"),
        ("1/2", r"\boxed{\dfrac{1}{2}}"),
        ("0.5", r"50\%"),
        ("1,234", "1234"),
        ("-3", "−3"),
        ("5", "x=5"),
        (r"2\sqrt{2}", r"\sqrt{8}"),
        ("x^2-1", "(x-1)(x+1)"),
        (r"\{1,2\}", r"\{2,1\}"),
        ("72", "The answer is 72."),
        ("72", "The answer is 72"),
        ("5", "5 people"),
        ("5", r"\text{5 weeks}"),
        ("5", "$5.00 dollars"),
        ("5 books", "5"),
        ("5", r"5~\text{km}"),
        (r"\sqrt{2}", "√2"),
        (r"\frac{52!}{13!39!}", r"\binom{52}{13}"),
        (r"\frac{2^{2005}+1}{3 \cdot 2^{2006}}", r"\frac16+\frac{1}{3 \cdot 2^{2006}}"),
        ("Evelyn", r"\text{Evelyn}"),
        ("4.5e33", r"4.5 \times 10^{33}"),
        ("1e-3", "0.001"),
        ("1.45e-5", "0.0000145"),
        (r"\frac{1}{300}", "0.003333"),
        ("0", "0.0"),
        ("$69$,$84$", "69, 84"),
        ("27.0", "27"),
        ("10000", r"10\,000"),
        ("50", r"\$50"),
        ("90", "90°"),
        ("72", "72."),
        ("5", "**5**"),
        ("5", "= 5"),
        ("5", r"\approx 5"),
        (r"\frac{10}{3}", r"\frac{10}{3} \approx 3.33"),
        ("11", "x = 5 + 6 = 11"),
        ("1", r"100\%"),
        ("5%", "5"),
        ("12_3", "12_{3}"),
        ("5000000", "5 million"),
        ("5000000", "The answer is 5 million people."),
        ("-2500000", "minus $2.5$ million"),
        ("500000", r"0.5 \text{ million}"),
        ("5000000", r"\text{5 million}"),
        ("5 million", "5,000 thousand"),
        ("1200000000", "1{,}200 million"),
        ("1200000000", r"1\,200 \text{ million}"),
        ("-5", "negative 5"),
        ("-5", "-$5$"),
        ("-5", "x = minus 5"),
        (r"-\frac{3}{4}", r"minus \frac{3}{4}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"$\begin{bmatrix}1\\2\end{bmatrix}$"),
        ("500000", "5 hundred thousand"),
        ("-150000", r"minus 1.5 \text{ hundred thousand}"),
        (r"\$32,\!348", "32348"),
        ("11111111100", r"11,\! 111,\! 111,\! 100"),
        ("20000", "20 000"),
        ("1234567", r"1\;234\;567"),
        ("1234.5", "1\u202f234.5"),
        ("3.5", "3 1/2"),
        ("-3.5", "-3½"),
        ("3/4", "3/4 cups"),
        ("-5", "–5"),
        (r"\frac13", r"0.\overline{3}"),
        ("A^T", r"A^{\top}"),
        ("xe^T", r"x\exp(T)"),
        ("(1,2)^T", r"(1,2)^{\top}"),
        ("2^T", "(2)^T"),
        (r"100\left(1.05\right)^T", r"100 \cdot 1.05^T"),
        ("1-0.5^T", "1-(0.5)^T"),
        (r"1-\left(\frac{1}{2}\right)^T", r"1-\frac{1}{2^T}"),
        (r"\frac{1000}{(1.1)^T}", r"\frac{1000}{1.1^T}"),
        ("500(1+0.06/12)^{T}", "500(1.005)^T"),
        (r"(\sqrt{2})^T", r"\sqrt{2}^T"),
        (r"\frac{2}{3}^T", "(2/3)^T"),
        (r"\frac{T^2}{2}", r"\int_0^T t\,dt"),
        (r"\sum_{t=1}^T x_t", r"\sum_{t=1}^{T} x_t"),
        (r"\frac{9}{22}", r"0.4\overline{09}"),
        (r"\frac{\pi}{2}", "pi/2"),
        (r"\ln 2", "ln(2)"),
        (r"\emptyset", r"\varnothing"),
        (r"(3,\infty)", "(3,∞)"),
        ("12", "12 km/h"),
        ("12", "12 cm^2"),
        ("C", "C."),
        ("C", "**C**"),
        ("true", r"\text{True}"),
        ("A beats B", "A beats B."),
        ("June 20", r"\text{June 20}"),
        (r"3\text{ p.m.}", r"3 \text{ PM}"),
        ("at least 5", "at least 5"),
        ("6", "x = 2(3) = 6"),
        (r"1000(1+5\%)^T", r"1000 \cdot 1.05^T"),
        (r"1.05^{10}", r"(1 + 5\%)^{10}"),
        (r"x(1-20\%)^2", "0.64x"),
        ("0.64x", r"(1-20\%)(1-20\%)x"),
        (r"\frac{16x}{25}", r"x(1-20\%)^2"),
        (r"10-15\%", r"(10-15\%)"),
        (r"12.5\%", r"12\frac{1}{2}\%"),
        (r"\frac13", "33 1/3%"),
        ("10", "(5)(2)"),
        ("3", r"\log_2(8)"),
        ("32", "2⁵"),
        ("0.0015", "1.5·10⁻³"),
        ("12", "12 m²"),
        ("0.05", r"5\text{ percent}"),
        (r"\frac{1}{2}", r"P(\text{even}) = \frac{1}{2}"),
        ("5", r"\text{Area} = 5\text{ cm}^2"),
        ("5", r"5 \text{ kg}\cdot\text{m}^2/\text{s}^2"),
        (r"5\text{ feet }6\text{ inches}", r"5\text{ feet } 6 \text{ inches}"),
        (r"\frac{P_{\text{in}}}{P_{\text{out}}}", r"P_{\text{in}}/P_{\text{out}}"),
        ("2e^{-x}", r"2\mathrm{e}^{-x}"),
        ("3+4i", r"3+4\mathrm{i}"),
        ("3+4i", "3+4 i"),
        ("3+4i", r"\text{3+4i}"),
        (r"\frac{3+4i}{5}", r"\frac{3}{5}+\frac{4}{5}i"),
        (r"\frac{3}{5}+\frac{4}{5}i", "0.6+0.8i"),
        (r"4:30\text{ p.m.}", "4:30 PM"),
        (r"6\!:\!00\text{ p.m.}", r"\text{6:00 PM}"),
        (r"3\text{ p.m.}", "3 PM"),
        ("4:30 p.m.", "4:30"),
        ("12", "12 in."),
        ("k_B T", r"k_{\mathrm{B}} T"),
    ],
)
def test_other_ways_of_writing_the_same_are_correct(verifier, gold, answer):
    assert verifier.judge(gold, answer).outcome is Outcome.CORRECT


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("5", "6"),
        ("5", "6 people"),
        ("5", "5 million"),
        ("5", r"5 \text{ million}"),
        ("5", "minus 5"),
        ("5", "minus $5$"),
        ("-5", "non-minus 5"),
        ("5000000", "5 millionths"),
        ("5", "5 x squared"),
        ("5", "5abc"),
        ("5", r"\{5,6\}"),
        ("6", "1,2,3,4,5,6"),
        ("1/2", "2/1"),
        ("1e-8", "3e-8"),
        (r"\frac{52!}{13!39!}", r"\frac{52!}{13!38!}"),
        (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
        (r"P=\frac{3^{60}}{2^{90}}", r"P=\frac{3^{50}}{2^{90}}"),
        (r"\left(1,\frac{100!}{50!50!}\right)", r"\left(1,\frac{100!}{49!50!}\right)"),
        ("7.4e-12", "0.0"),
        ("0.00000001", "0.00000003"),
        ("4.5e33", r"4.5 \times e \times 33"),
        ("5", "6, 5"),
        ("5", r"6 \vee 5"),
        ("5", "$6 \\vee 5$"),
        ("5", "6 | 5"),
        ("5", "6 & 5"),
        ("5", r"6 \to 5"),
        ("5", "6? 5"),
        ("5", "6 = 5"),
        ("5", "x = 6 = 5"),
        ("x=5", "x = 6 = 5"),
        ("5", "1=2=3=4=5"),
        ("11", "5 + 7 = 11"),
        ("12_3", "12_5"),
        ("500", "5 hundred thousand"),
        ("0", "20 000"),
        ("600", "2 300"),
        ("1", "3 1/3"),
        ("0.3", r"0.\overline{3}"),
        ("2^T", "2"),
        ("1.05^{T}", "1.05"),
        ("(2)^T", "2"),
        ("(1/2)^T", "1/2"),
        ("12", "12 m^2"),
        ("5", "2(3)"),
        (r"1000(1+5\%)^T", r"1000(1+4\%)^T"),
        (r"1.05^{10}", r"(1 - 5\%)^{10}"),
        (r"33\frac{1}{3}\%", r"66\frac{1}{3}\%"),
        (r"12\frac{1}{2}\%", r"0.5\%"),
        ("7/2", r"3\left(\frac{1}{2}\right)"),
        ("10", "10³"),
        ("5", r"5\text{ percent}"),
        ("5", r"5\text{ dollars and }50\text{ cents}"),
        (r"5\text{ feet }6\text{ inches}", "5"),
        (r"1\text{ hour and }30\text{ minutes}", r"2\text{ hours and }15\text{ minutes}"),
        ("5", r"5 \text{ for } x > 0, 6 \text{ otherwise}"),
        ("2", r"5\text{ when }x=2"),
        ("2", r"2\mathrm{e}^{-x}"),
        (r"v_{\text{max}}", r"v_{\text{min}}"),
        (r"\frac{P_{\text{in}}}{P_{\text{out}}}", r"\frac{P_{\text{out}}}{P_{\text{in}}}"),
        (r"10^{\text{th}}", r"10^{\text{rd}}"),
    ],
)
def test_other_values_and_lists_of_guesses_are_wrong(verifier, gold, answer):
    assert verifier.judge(gold, answer).outcome is Outcome.WRONG


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("6", "The number of divisors of 12 is $6$"),
        ("5", "The square root of 25 is $5$."),
        ("63", "The answer is $63$, not 62"),
        ("63", "The sum of the multiples of 3 below 20 is $63$."),
        (r"\frac{3}{4}", r"The probability that it is at least 2 is $\frac{3}{4}$"),
        (r"\frac{3}{4}", r"P(\text{at least } 2) = \frac{3}{4}"),
        ("100", r"100\text{ multiples of 5}"),
        ("5", "half of 10 = 5"),
        ("ax-by", "xa-yb"),
        ("AB-CD", "AB - DC"),
        ("6", "2(1)(3)"),
        ("24", "2(3)(4)"),
        (r"2\text{ hours }30\text{ minutes}", r"2\text{ hours and }30\text{ minutes}"),
        (r"5\text{ cm}, 6\text{ cm}", r"5 \text{ cm and } 6 \text{ cm}"),
        ("5", "5 kg m²"),
    ],
)
def test_words_beside_another_number_and_forms_of_a_product_make_no_right_answer_wrong(verifier, gold, answer):
    assert verifier.judge(gold, answer).outcome is Outcome.CORRECT


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("ACB", "ABC"),
        (r"\text{HTH}", "THH"),
        ("A beats B", "B beats A"),
        (r"\text{June 20}", r"\text{July 20}"),
        (r"3\text{ p.m.}", r"3\text{ a.m.}"),
        (r"4:30\text{ p.m.}", r"2:15\text{ p.m.}"),
        (r"35\text{ pm}", r"3.5\text{ pm}"),
        ("3:05", "6:10"),
        ("5", "5i"),
        ("5", r"5\text{ or more}"),
        ("5", "at least $5$"),
        ("5", "multiples of 5"),
        ("5", r"5\text{ dozen}"),
        ("5", "5 sixths"),
        ("0", r"\text{all real numbers except } 0"),
        ("ad-bc", "ad bc"),
    ],
)
def test_the_words_of_an_answer_count_as_well_as_its_numbers(verifier, gold, answer):
    assert verifier.judge(gold, answer).outcome is Outcome.WRONG


@pytest.mark.parametrize(
    "answer",
    [
        r"\neq 5",
        r"$\neq 5$",
        "≠5",
        r"\not= 5",
        "!= 5",
        "< 5",
        r"\geq 5",
        r"x \neq 5",
        r"\notin 5",
        "not 5",
        "It isn't 5.",
    ],
)
def test_what_denies_the_gold_is_not_the_gold(verifier, answer):
    assert verifier.judge("5", answer).outcome is Outcome.WRONG


@pytest.mark.parametrize(
    ("gold", "answer"), [("5", "5%"), ("5", "500%"), ("1", r"1\%"), ("0.5", r"0.5\%"), ("5%", "500%")]
)
def test_a_percentage_is_no_other_number(verifier, gold, answer):
    """5% and 500% cannot both be 5; which one is depends on the question, so neither is rewarded."""
    assert verifier.judge(gold, answer).outcome is Outcome.WRONG


def test_sides_that_are_not_even_near_each_other_are_not_an_answer(verifier):
    assert verifier.judge("5", r"5 \approx 7").outcome is Outcome.NO_ANSWER


def test_an_unreadable_gold_is_told_apart_from_a_wrong_and_from_a_missing_answer(verifier):
    outcomes = [verifier.judge(*pair).outcome for pair in [("", "5"), ("5", ""), ("5", "6")]]
    assert outcomes == [Outcome.GOLD_UNPARSABLE, Outcome.NO_ANSWER, Outcome.WRONG]


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
