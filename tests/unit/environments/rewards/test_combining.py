"""Rewards are found by name, combined and checked, with advice for mistakes."""

import math
import subprocess
import sys
from importlib.metadata import EntryPoint

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from environments.rewards import (
    CombinedReward,
    FormatReward,
    GoldItem,
    GSM8kReward,
    PairwiseReward,
    RepetitionPenalty,
    RewardManager,
    ScoreRange,
    WeightedReward,
    bradley_terry,
    check_reward,
    combine,
    low_variance_hint,
    make_reward,
    reward_names,
    reward_range_warning,
    score_samples,
    win_rates,
)
from environments.rewards.protocol import RewardUnknown, RewardUnusable


def constant(value):
    return lambda samples: [value] * len(samples)


def length(samples):
    return np.array([len(sample["completion"]) for sample in samples], dtype=np.float32)


async def slow_length(samples):
    await anyio.lowlevel.checkpoint()
    return tuple(len(sample["completion"]) for sample in samples)


def run(reward, samples):
    return anyio.run(score_samples, reward, samples)


@pytest.mark.parametrize("reward", [length, slow_length])
@pytest.mark.parametrize("container", [list, tuple, lambda samples: np.array(samples, dtype=object)])
def test_callbacks_may_be_async_and_take_and_return_arrays_or_lists(reward, container):
    scores = run(reward, container([{"completion": "abc"}, {"completion": ""}]))
    assert scores == [3.0, 0.0]
    assert all(type(score) is float for score in scores)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([1.0], "1 scores for 2"),
        ([1.0, math.nan], "sample 1 with nan"),
        (3.0, "one number a sample"),
        (["a", "b"], "one"),
    ],
)
def test_a_result_without_a_score_for_each_sample_is_refused(returned, words):
    def broken(_samples):
        return returned

    with pytest.raises(RewardUnusable, match=f"broken .*{words}"):
        run(broken, [{}, {}])


def test_a_combination_honours_weights_and_keeps_each_component():
    parts = [WeightedReward("a", constant(2.0), 0.5), WeightedReward("b", constant(4.0), -0.25)]
    scores = anyio.run(CombinedReward(parts).score, [{}, {}])
    assert scores.totals == [0.0, 0.0]
    assert scores.components == {"a": [2.0, 2.0], "b": [4.0, 4.0]}
    assert scores.metrics() == {"reward/mean": 0.0, "reward/std": 0.0, "reward/a": 2.0, "reward/b": 4.0}
    parts = [WeightedReward("a", constant(2.0), 3.0), WeightedReward("b", constant(4.0))]
    assert run(CombinedReward(parts, "weights"), [{}]) == [2.5]


def test_normalising_by_range_brings_every_part_to_the_unit_interval():
    parts = [
        WeightedReward("gsm8k", GSM8kReward(correct_score=4.0), 1.0),
        WeightedReward("again", RepetitionPenalty(1), 1.0),
    ]
    combined = CombinedReward(parts, "range")
    assert run(combined, [{"completion": "#### 4", "answer": "4"}]) == [1.0]
    assert combined.range == ScoreRange(0.0, 1.0)
    assert CombinedReward(parts).range == ScoreRange(-1.0, 4.0)
    assert CombinedReward([WeightedReward("c", constant(1.0))]).range is None
    with pytest.raises(RewardUnusable, match="normalization=weights"):
        CombinedReward([WeightedReward("c", constant(1.0))], "range")


@pytest.mark.parametrize(
    "make",
    [
        lambda: CombinedReward([]),
        lambda: CombinedReward([WeightedReward("a", constant(1.0)), WeightedReward("a", constant(1.0))]),
        lambda: CombinedReward([WeightedReward("a", constant(1.0))], "sum"),
        lambda: CombinedReward([WeightedReward("a", constant(1.0), 0.0)], "weights"),
        lambda: combine([{"name": "gsm8k", "wieght": 2}]),
    ],
)
def test_a_combination_that_means_nothing_is_refused(make):
    with pytest.raises(RewardUnusable):
        make()


def test_a_configuration_names_rewards_weights_and_parameters(verifier):
    combined = combine(
        ["accuracy", {"name": "format", "weight": 0.5, "params": {"tags": ["answer"]}, "label": "tagged"}],
        verifier=verifier,
    )
    sample = {"completion": "<answer>4</answer>", "answer": "4"}
    scores = anyio.run(combined.score, [sample])
    assert scores.totals == [1.5]
    assert scores.components == {"accuracy": [1.0], "tagged": [1.0]}
    assert combined.parts[0].reward.verifier is verifier


def test_an_unknown_name_is_answered_with_the_nearest_known_one():
    with pytest.raises(RewardUnknown, match="did you mean accuracy"):
        make_reward("acuracy")
    with pytest.raises(
        RewardUnknown, match=r"cannot be loaded: environments.rewards has no 'Nothing'; it has .*combine"
    ):
        make_reward("environments.rewards:Nothing")
    with pytest.raises(
        RewardUnusable, match=r"unknown key 'wieght', did you mean weight\? \(keys: name, weight, params"
    ):
        combine([{"name": "gsm8k", "wieght": 2}])
    with pytest.raises(RewardUnusable, match="it takes"):
        make_reward("gsm8k", {"correct": 1})


def test_installed_packages_offer_rewards_by_entry_point_but_cannot_take_ours(monkeypatch):
    ours = EntryPoint("gsm8k", f"{__name__}:length", "atropos.rewards")
    theirs = EntryPoint("theirs", "statistics:mean", "atropos.rewards")
    monkeypatch.setattr(
        "importlib.metadata.entry_points", lambda *, group: [theirs, ours] * (group == "atropos.rewards")
    )
    assert "theirs" in reward_names()
    assert make_reward("theirs")([1, 3]) == 2
    assert isinstance(make_reward("gsm8k"), GSM8kReward)
    with pytest.raises(RewardUnusable, match="takes no params"):
        make_reward("statistics:mean", {"weight": 1})


def test_win_rates_and_strengths_follow_the_preferences():
    wins = [[0, 3, 4], [1, 0, 3], [0, 1, 0]]
    assert win_rates(wins) == pytest.approx([7 / 8, 4 / 8, 1 / 8])
    strengths = bradley_terry(wins)
    assert strengths == sorted(strengths, reverse=True)
    assert sum(strengths) == pytest.approx(0, abs=1e-9)
    assert win_rates([[0.0]]) == [0.5]
    assert bradley_terry([[0.0]]) == [0.0]
    assert bradley_terry([]) == []
    with pytest.raises(RewardUnusable, match="wins"):
        bradley_terry([[0, 1]])


def test_bradley_terry_recovers_the_odds_of_many_games():
    odds = 3.0
    strengths = bradley_terry([[0, 30000], [10000, 0]])
    assert math.exp(strengths[0] - strengths[1]) == pytest.approx(odds, rel=1e-3)


def test_pairs_are_compared_within_their_prompt_alone():
    asked = []

    async def longer(left, right):
        asked.append({left["prompt"], right["prompt"]})
        return float(len(left["completion"]) > len(right["completion"]))

    samples = [{"prompt": p, "completion": c} for p, c in [("x", "aa"), ("y", "a"), ("x", "a"), ("y", "aaa")]]
    assert run(PairwiseReward(longer), samples) == [1.0, 0.0, 0.0, 1.0]
    assert asked == [{"x"}, {"y"}]
    with pytest.raises(RewardUnusable, match="between 0 and 1"):
        run(PairwiseReward(lambda left, right: 2.0), samples)


def test_a_judge_is_asked_about_all_pairs_at_once():
    waiting, at_once = 0, 0

    async def judge(_left, _right):
        nonlocal waiting, at_once
        waiting += 1
        at_once = max(at_once, waiting)
        await anyio.sleep(0.01)
        waiting -= 1
        return 0.5

    assert run(PairwiseReward(judge), [{"prompt": "p", "completion": c} for c in "abcd"]) == [0.5] * 4
    assert at_once == 6


def test_a_judge_that_fails_on_one_pair_is_not_asked_about_the_others_any_more():
    answered = []

    async def judge(left, right):
        if (left["completion"], right["completion"]) == ("a", "b"):
            raise ValueError("too long")
        await anyio.sleep(0.05)
        answered.append(right)
        return 0.5

    async def score():
        with pytest.raises(ValueError, match="too long"):
            await PairwiseReward(judge)([{"prompt": p, "completion": c} for p in "xy" for c in "abc"])
        await anyio.sleep(0.2)

    anyio.run(score)
    assert answered == []


def test_asking_both_ways_round_takes_away_a_preference_for_a_place():
    def first_wins(_left, _right):
        return 1.0

    samples = [{"completion": "a"}, {"completion": "b"}]
    assert run(PairwiseReward(first_wins), samples) == [1.0, 0.0]
    assert run(PairwiseReward(first_wins, both_orders=True), samples) == [0.5, 0.5]


def test_a_manager_sums_up_between_steps_and_gives_each_advice_once(caplog):
    manager = RewardManager(
        CombinedReward([WeightedReward("length", length), WeightedReward("one", constant(1.0), 0.0)])
    )

    def step(*texts):
        for text in texts:
            anyio.run(manager.score, [{"completion": text}])
        return manager.metrics()

    assert step("ab", "abcd") == {"reward/mean": 3.0, "reward/std": 1.0, "reward/length": 3.0, "reward/one": 1.0}
    assert step() == {}
    assert caplog.messages == []
    step("a" * 40, "a" * 40)
    step("a" * 40, "a" * 40)
    assert [text.split()[0:4] for text in caplog.messages] == [
        ["2", "of", "2", "scores"],
        ["the", "variance", "of", "2"],
    ]


def test_a_manager_takes_a_plain_function(caplog):
    manager = RewardManager(length)
    assert anyio.run(manager.score, [{"completion": "abc"}]) == [3.0]
    assert manager.metrics() == {"reward/mean": 3.0, "reward/std": 0.0, "reward/length": 3.0}


def test_a_manager_whose_metrics_are_never_asked_for_keeps_the_newest_scores(monkeypatch):
    # The function `combine` of the package hides the module.
    monkeypatch.setattr(sys.modules["environments.rewards.combine"], "KEPT_SCORES", 4)
    manager = RewardManager(
        CombinedReward([WeightedReward("length", length), WeightedReward("one", constant(1.0), 0.0)])
    )
    for size in range(1, 11):
        anyio.run(manager.score, [{"completion": "a" * size}, {"completion": "a" * size}])
    found = manager.metrics()
    assert {name: found[name] for name in ("reward/mean", "reward/length", "reward/one")} == {
        "reward/mean": 9.5,
        "reward/length": 9.5,
        "reward/one": 1.0,
    }
    assert manager.metrics() == {}


def test_scores_far_from_zero_are_warned_about_with_the_worst_of_them():
    assert reward_range_warning([5.0, -5.0]) is None
    assert "the furthest is -40" in reward_range_warning([1.0, 6.0, -40.0])


def test_flat_rewards_are_hinted_at_by_the_share_of_what_their_range_allows():
    assert "pairwise" in low_variance_hint([0.4, 0.6])
    assert low_variance_hint([0.1, 1.0]) is None, "half of the range from 0 to 1, also if no range is declared"
    assert low_variance_hint([0.4, 0.6], score_range=ScoreRange(0.3, 0.7)) is not None
    assert low_variance_hint([-2.0, 2.0]) is None
    assert low_variance_hint([-2.0, 2.0], score_range=ScoreRange(-math.inf, math.inf)) is None
    assert low_variance_hint([-0.5, 0.5]) is not None
    assert low_variance_hint([1.0]) is None


def test_rewards_that_are_0_or_1_by_design_are_not_hinted_at_unless_all_are_equal(caplog):
    stated = ScoreRange(0, 1)
    assert [low_variance_hint(scores, score_range=stated) for scores in ([0.0, 1.0], [0.0] * 31 + [1.0])] == [None] * 2
    assert low_variance_hint([0.0] * 31 + [1.0]) is None
    assert "is 0, below" in low_variance_hint([1.0] * 8)
    manager = RewardManager(lambda samples: [float(sample["completion"] == "right") for sample in samples])
    for texts in (["right", "wrong"], ["wrong"] * 4, ["wrong"] * 4):
        anyio.run(manager.score, [{"completion": text} for text in texts])
        manager.metrics()
    assert len(caplog.messages) == 1, "logged once"


def test_a_reward_is_checked_on_gold_and_on_wrong_answers():
    items = [
        GoldItem({"answer": "4"}, "#### 4", ("#### 5", ""), name="good"),
        GoldItem({"answer": "4"}, "so 4", name="unmarked"),
        GoldItem({"answer": "4"}, "#### 4", ("#### 4.0",)),
        GoldItem({"answer": "many"}, "#### 4"),
    ]
    results = anyio.run(check_reward, GSM8kReward(), items)
    assert [result.name for result in results] == ["good", "unmarked", "item 3", "item 4"]
    assert [result.passed for result in results] == [True, False, False, False]
    assert results[1].problems == ("the right answer 'so 4' earns 0, not 1",)
    assert results[2].problems == ("the wrong answer '#### 4.0' earns 1 like a right one",)
    assert "GoldUnparsable" in results[3].problems[0]
    with pytest.raises(RewardUnusable, match="best"):
        anyio.run(check_reward, length, items)


def test_rewards_are_importable_fast_and_without_environments_or_heavy_libraries():
    probe = (
        "import sys, environments.rewards\n"
        "heavy = {'torch', 'numpy', 'sympy', 'math_verify', 'transformers', 'environments.sdk'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_format_reward_is_one_of_the_protocol():
    assert run(FormatReward(), []) == []
