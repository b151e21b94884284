"""Muon in fp32: momentum, orthogonalised by Newton-Schulz iteration.

PyTorch's own runs the iteration in bfloat16, which CPUs without bfloat16 instructions emulate: there it takes four times
as long as the rest of a training step of this model. In fp32 it costs next to nothing anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum for 2-D parameters; its step is scaled to the size that AdamW's would have."""

    def __init__(
        self, params: Iterable[torch.nn.Parameter], *, lr: float, momentum: float = 0.9, weight_decay: float = 0.01
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take one step; there is no closure to re-evaluate."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                average = state.setdefault("average", torch.zeros_like(parameter))
                average.lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalise(parameter.grad.lerp(average, group["momentum"]))
                scale = 0.2 * max(parameter.shape) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * scale)


def orthogonalise(matrix: torch.Tensor) -> torch.Tensor:
    """The nearest matrix with singular values of about one."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
