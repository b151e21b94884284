"""Dynamic loss scaling: float16 gradients are computed from a loss times a scale, and divided by it afterwards.

A float16 number below 6e-8 is 0 and one above 65,504 is infinite; bf16 and fp32 have neither limit in practice. With a
mean over a thousand tokens, many gradients are below 6e-8. A large scale moves them into float16's range, and the
division takes place in the fp32 gradients of the masters, where nothing is lost (Micikevicius et al. 2018, "Mixed
Precision Training"). A scale that is too large shows as a gradient that is not finite: that optimizer step is left out
and the next one has half the scale.

Numbers and rules are those of `torch.amp.GradScaler`. That class decides for each process by its own gradients; here
the decision is the caller's, who has the global norm over all ranks anyway, so that all ranks decide the same. Every
scale is a power of two, so that scaling rounds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL = 2000
"""Number of optimizer steps in a row without an overflow after which the scale is doubled."""

_GROWTH, _BACKOFF = 2.0, 0.5


@dataclass(slots=True)
class LossScale:
    """The scale of the loss, and the number of optimizer steps since it last changed."""

    scale: float = INITIAL_SCALE
    steps: int = 0
    growth_interval: int = GROWTH_INTERVAL

    @classmethod
    def of(cls, dtype: torch.dtype) -> LossScale | None:
        """Return the scale for forwards in `dtype`; None if its range needs none."""
        return cls() if dtype == torch.float16 else None

    def unscale(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divide the gradients by the scale, once they are in fp32 and summed over all micro-batches and ranks."""
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(1.0 / self.scale)

    def stepped(self) -> None:
        """Count an optimizer step with finite gradients; double the scale after `growth_interval` in a row."""
        self.steps += 1
        if self.steps >= self.growth_interval:
            self.scale, self.steps = self.scale * _GROWTH, 0

    def overflowed(self) -> bool:
        """Halve the scale; return True if it was above 1, so that it may have been the cause of the overflow."""
        was_above_one = self.scale > 1.0
        self.scale, self.steps = self.scale * _BACKOFF, 0
        return was_above_one

    def state(self) -> dict[str, float]:
        """Return the state that a checkpoint holds."""
        return {"scale": self.scale, "steps": float(self.steps)}

    def load_state(self, state: dict[str, float]) -> None:
        self.scale, self.steps = state["scale"], int(state["steps"])
