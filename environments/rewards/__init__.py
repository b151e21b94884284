"""Rewards score completions. They can be used alone, with any trainer, without an environment.

A reward is a callable from samples to scores (`protocol`). `registry` finds one by name and adapts functions with
TRL's signature, `combine` weighs several. `text`, `math` (with `answers`) and `pairwise` are those of this package;
`math_verifier` compares mathematics in child processes (`math_worker`); `gold_check` tries a reward on answers known
to be right, `trial` on an empty one; `failures` describes a reward's errors. They import the broker's `common` alone.
"""

from environments.rewards.combine import (
    CombinedReward,
    CombinedScores,
    RewardManager,
    WeightedReward,
    combine,
)
from environments.rewards.failures import RewardFailed
from environments.rewards.gold_check import (
    GoldItem,
    GoldResult,
    check_gold,
    check_reward,
    low_variance_hint,
    reward_range_warning,
)
from environments.rewards.math import (
    AccuracyReward,
    CosineScaledReward,
    GSM8kReward,
    GSM8kScore,
    MathReward,
    R1ZeroReward,
    R1ZeroScore,
    evaluation_metrics,
)
from environments.rewards.math_verifier import Judgement, MathVerifier, Outcome
from environments.rewards.pairwise import PairwiseReward, bradley_terry, win_rates
from environments.rewards.protocol import Reward, Sample, SampleReward, ScoreRange, score_samples
from environments.rewards.registry import load_reward, make_reward, reward_names
from environments.rewards.text import (
    FormatReward,
    LinearLengthReward,
    PatternReward,
    RepetitionPenalty,
    TargetLengthReward,
)

__all__ = [
    "AccuracyReward",
    "CombinedReward",
    "CombinedScores",
    "CosineScaledReward",
    "FormatReward",
    "GSM8kReward",
    "GSM8kScore",
    "GoldItem",
    "GoldResult",
    "Judgement",
    "LinearLengthReward",
    "MathReward",
    "MathVerifier",
    "Outcome",
    "PairwiseReward",
    "PatternReward",
    "R1ZeroReward",
    "R1ZeroScore",
    "RepetitionPenalty",
    "Reward",
    "RewardFailed",
    "RewardManager",
    "Sample",
    "SampleReward",
    "ScoreRange",
    "TargetLengthReward",
    "WeightedReward",
    "bradley_terry",
    "check_gold",
    "check_reward",
    "combine",
    "evaluation_metrics",
    "load_reward",
    "low_variance_hint",
    "make_reward",
    "reward_names",
    "reward_range_warning",
    "score_samples",
    "win_rates",
]
