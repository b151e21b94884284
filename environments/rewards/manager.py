"""The rewards of a run: scores batches, sums up what was scored between trainer steps, and says what trains badly.

manager = RewardManager(combine(["gsm8k", {"name": "repetition", "weight": 0.2}]))
scores = await manager.score(samples)
metrics = manager.metrics()
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from environments.rewards.advice import low_variance_hint, reward_range_warning
from environments.rewards.combine import CombinedReward, CombinedScores, Part
from environments.rewards.protocol import Reward, range_of, reward_name

logger = logging.getLogger(__name__)


class RewardManager:
    """Scores with `reward` and remembers every score until `metrics` is asked for them."""

    def __init__(self, reward: Reward) -> None:
        if not isinstance(reward, CombinedReward):
            reward = CombinedReward([Part(reward_name(reward), reward)])
        self.reward = reward
        self._totals: list[float] = []
        self._components: dict[str, list[float]] = {}
        self._advised: set[str] = set()

    async def score(self, samples: Sequence[Any]) -> list[float]:
        """The scores to train on, in the order of the samples."""
        scores = await self.reward.score(samples)
        self._totals += scores.totals
        for name, values in scores.components.items():
            self._components.setdefault(name, []).extend(values)
        return scores.totals

    def metrics(self) -> dict[str, float]:
        """The metrics of all scores since the last call, none when there were none; begins anew."""
        totals, components = self._totals, self._components
        self._totals, self._components = [], {}
        if not totals:
            return {}
        self._advise(totals)
        return CombinedScores(totals, components).metrics()

    def _advise(self, totals: Sequence[float]) -> None:
        """Each kind of advice is logged once: it is about the reward, not about a step."""
        advice = {
            "range": reward_range_warning(totals),
            "variance": low_variance_hint(totals, score_range=range_of(self.reward)),
        }
        for kind, text in advice.items():
            if text is not None and kind not in self._advised:
                self._advised.add(kind)
                logger.warning("%s", text)
