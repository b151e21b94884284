"""Generated mathematics: equal values are correct in any notation, others wrong, and nonsense is harmless."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from environments.rewards import MathVerifier, Outcome

relaxed = settings(max_examples=20, suppress_health_check=list(HealthCheck))
fractions = st.fractions(-500, 500, max_denominator=20)


@pytest.fixture(scope="module")
def verifier():
    with MathVerifier(workers=1, time_limit_seconds=1.0) as shared:
        yield shared


def written(value):
    sign, top, bottom = "-" * (value < 0), abs(value.numerator), value.denominator
    forms = [
        rf"{sign}\frac{{{top}}}{{{bottom}}}",
        rf"\boxed{{{sign}\dfrac{{{top}}}{{{bottom}}}}}",
        f"${sign}{top}/{bottom}$",
    ]
    if bottom == 1:
        forms += [f"{sign}{top}", f"{sign.replace('-', '−')}{top}", f"{sign}{top}.0", f"x = {sign}{top}"]
    return forms


@relaxed
@given(value=fractions, other=fractions)
def test_equal_values_are_correct_and_others_wrong(verifier, value, other):
    judged = asyncio.run(verifier.judge_all([(written(value)[0], form) for form in written(value)]))
    assert {judgement.outcome for judgement in judged} == {Outcome.CORRECT}
    expected = Outcome.CORRECT if value == other else Outcome.WRONG
    assert verifier.judge(written(value)[0], written(other)[-1]).outcome is expected


@relaxed
@given(
    text=st.lists(
        st.sampled_from(["\\boxed{", "}", "{", "$", "\\frac", "^", "9", "(", "\\", "x", "!", "%", "\n", "é"])
        | st.text(max_size=3),
        max_size=12,
    ).map("".join)
)
def test_rubbish_gets_some_outcome_and_never_counts_as_another_value(verifier, text):
    assert verifier.judge("123456.75", text).outcome in {Outcome.WRONG, Outcome.NO_ANSWER, Outcome.UNDECIDED}
