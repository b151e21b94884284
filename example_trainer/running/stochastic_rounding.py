"""Training of bf16 weights without fp32 masters: each new value is rounded up or down at random, right on average.

Rounding to the nearest bf16 number loses every update below half the spacing of its weight, which at
usual learning rates is most of them. Rounded stochastically an update of a tenth of the spacing
moves the weight one time in ten, so that the sum over steps is that of the exact run in expectation
(Gupta et al. 2015, "Deep Learning with Limited Numerical Precision"). A single run carries the
variance of that: masters in fp32 are better wherever there is memory for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

CHUNK_ELEMENTS = 1 << 24
"""Weights held in fp32 while a step is computed, and their gradients (128 MiB); a larger tensor is held whole."""
PIECE_ELEMENTS = 1 << 22
"""Weights rounded at one time, which takes some four arrays of that size (64 MiB)."""

_LOW_BITS = 16
_SPREAD = (0x9E3779B1, 0x85EBCA77)
"""Odd numbers that carry seed and step into all 32 bits that torch's generator on the CPU takes."""


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 to bf16: up with the probability of the part that bf16 cannot hold; non-finite values stay.

    A bf16 number is the upper half of an fp32 one; noise in the lower half carries over with that probability.
    """
    noise = torch.randint(0, 1 << _LOW_BITS, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    bits = (values.contiguous().view(torch.int32) + noise) & -(1 << _LOW_BITS)
    return torch.where(values.isfinite(), bits.view(torch.float32), values).to(torch.bfloat16)


class StochasticRounding(torch.optim.Optimizer):
    """Steps bf16 parameters as another optimizer steps fp32 ones, and rounds the results stochastically.

    The other optimizer works on fp32 stand-ins that hold values during a step only; its states stay
    in fp32. The noise is a function of `seed` and the number of the step, so a resumed run draws the
    same.
    """

    def __init__(
        self, groups: list[dict[str, Any]], make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer], *, seed: int
    ) -> None:
        self._stand_ins = {
            parameter: nn.Parameter(torch.empty(0, dtype=torch.float32, device=parameter.device))
            for group in groups
            for parameter in group["params"]
        }
        self._inner = make([group | {"params": [self._stand_ins[p] for p in group["params"]]} for group in groups])
        self._seed = seed
        self._steps = 0
        super().__init__(groups, {name: value for name, value in self._inner.defaults.items() if name != "params"})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("a closure cannot be evaluated between rounding and step; compute the gradients before")
        self._steps += 1
        for ours, theirs in zip(self.param_groups, self._inner.param_groups, strict=True):
            theirs["lr"] = ours["lr"]
        generators: dict[torch.device, torch.Generator] = {}
        for chunk in self._chunks():
            self._step_chunk(chunk, generators)

    def _chunks(self) -> Iterator[list[nn.Parameter]]:
        chunk: list[nn.Parameter] = []
        for parameter in self._stand_ins:
            if parameter.grad is None:
                continue
            chunk.append(parameter)
            if sum(each.numel() for each in chunk) >= CHUNK_ELEMENTS:
                yield chunk
                chunk = []
        if chunk:
            yield chunk

    def _step_chunk(self, chunk: list[nn.Parameter], generators: dict[torch.device, torch.Generator]) -> None:
        for parameter in chunk:
            stand_in = self._stand_ins[parameter]
            stand_in.data = parameter.detach().float()
            stand_in.grad = None if parameter.grad is None else parameter.grad.float()
        self._inner.step()
        for parameter in chunk:
            stand_in = self._stand_ins[parameter]
            if parameter.device not in generators:
                generators[parameter.device] = self._generator(parameter.device)
            stand_in.grad = None
            for rows, values in zip(_pieces(parameter), _pieces(stand_in.data), strict=True):
                rows.copy_(round_stochastically(values, generators[parameter.device]))
            stand_in.data = torch.empty(0, dtype=torch.float32, device=parameter.device)

    def _generator(self, device: torch.device) -> torch.Generator:
        mixed = self._seed * _SPREAD[0] + self._steps * _SPREAD[1]
        return torch.Generator(device).manual_seed(mixed & 0xFFFFFFFF)

    def state_dict(self) -> dict[str, Any]:
        """The states of the other optimizer, and the number of the step."""
        return {"inner": self._inner.state_dict(), "rounding_steps": self._steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._inner.load_state_dict(state_dict["inner"])
        self._steps = state_dict["rounding_steps"]


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """Views of a tensor, some rows each; the same rows for tensors of one shape."""
    rows = tensor if tensor.ndim else tensor.view(1)
    pieces: tuple[Tensor, ...] = torch.split(rows, max(1, PIECE_ELEMENTS * len(rows) // max(1, rows.numel())))
    return pieces
