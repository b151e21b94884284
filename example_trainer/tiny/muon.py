"""Muon in fp32: momentum, orthogonalised by Newton-Schulz iteration.

PyTorch's own Muon runs the iteration in bfloat16, which CPUs without bfloat16 instructions emulate: there it takes four
times as long as the rest of a training step of this model. In fp32 it costs next to nothing anywhere.
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
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Take one step; there is no closure to re-evaluate."""
        for group in self.param_groups:
            for parameters in _of_equal_shape(p for p in group["params"] if p.grad is not None):
                updates = orthogonalise(torch.stack([self._direction(p, group["momentum"]) for p in parameters]))
                scale = 0.2 * max(parameters[0].shape) ** 0.5
                for parameter, update in zip(parameters, updates, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update, alpha=-group["lr"] * scale)

    def _direction(self, parameter: torch.nn.Parameter, momentum: float) -> torch.Tensor:
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        if "average" not in state:
            state["average"] = torch.zeros_like(parameter)
        state["average"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(state["average"], momentum)


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """Return, for each matrix of a stack, the nearest one with singular values of about one."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _of_equal_shape(parameters: Iterable[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Return the parameters by shape: one call for each shape saves calls, which take most of the time at this size."""
    by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        by_shape.setdefault(parameter.shape, []).append(parameter)
    return list(by_shape.values())
