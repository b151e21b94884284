"""What can go wrong while scoring. None of these is ever a score: the rollout is reported, not trained on."""

from __future__ import annotations

from atropos_api.common.errors import AtroposError


class RewardUnknown(AtroposError):
    """No reward has the name that was asked for, or it cannot be loaded."""


class RewardUnusable(AtroposError):
    """A reward, its settings or what it returned cannot be used."""


class SampleIncomplete(AtroposError):
    """A sample lacks what the reward reads from it."""


class GoldUnparsable(AtroposError):
    """The reference answer is no mathematics that can be compared; the item is at fault, not the model."""


class MathVerifyUnavailable(AtroposError):
    """The child process that compares answers cannot be started."""
