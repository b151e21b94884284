"""A sequence of a batch on its way to being trained, with all that is known of each of its trained tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from example_trainer.learning.supplied import FloatArray, IntArray, Teacher


@dataclass(slots=True, eq=False)
class Candidate:
    """A sequence that may be trained, before advantages are final."""

    tokens: IntArray
    targets: IntArray
    rollout_logprobs: FloatArray
    temperature: float
    advantages: FloatArray | None
    """Per trained token, when the environment supplies them."""
    reference_logprobs: FloatArray | None
    teacher: Teacher | None
    truncated_sampling: bool
    versions: IntArray
    version_bounds: IntArray
    group: int
    advantage: float = 0.0

    def cut(self, length: int) -> None:
        """Leave nothing beyond the first `length` tokens."""
        inside = slice(int(np.searchsorted(self.targets, length)))
        self.tokens, self.targets = self.tokens[:length], self.targets[inside]
        self.rollout_logprobs = self.rollout_logprobs[inside]
        self.versions, self.version_bounds = self.versions[inside], self.version_bounds[inside]
        if self.advantages is not None:
            self.advantages = self.advantages[inside]
        if self.reference_logprobs is not None:
            self.reference_logprobs = self.reference_logprobs[inside]
        if self.teacher is not None:
            self.teacher = (self.teacher[0][inside], self.teacher[1][inside])
