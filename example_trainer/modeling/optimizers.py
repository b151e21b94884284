"""Training of bf16 weights without fp32 masters: each new value is rounded up or down at random, right on average.

Rounding to the nearest bf16 number loses every update below half the spacing of its weight, which at
usual learning rates is most of them. Rounded stochastically an update of a tenth of the spacing
moves the weight one time in ten, so that the sum over steps is that of the exact run in expectation
(Gupta et al. 2015, "Deep Learning with Limited Numerical Precision"). A single run carries the
variance of that: masters in fp32 are better wherever there is memory for them.

Optimizers over the master weights, and the learning-rate schedule.

An optimizer whose package is missing, or has no kernel for this device, is an error with the line that
installs it: a quiet fallback would train another run than the one asked for. Masters in bf16
(`--master-weights none`) are stepped with stochastic rounding, whichever optimizer it is. Weight
decay leaves out norms and biases, as Hugging Face's `Trainer` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from example_trainer.config import TrainingConfig
from example_trainer.errors import OptimizerUnavailable

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


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSettings:
    """Of `adafactor` only rate and decay are its own: it keeps no first moment, and decays the second by its rule."""

    name: Literal["adamw", "adamw_8bit", "adafactor"]
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    seed: int = 0
    """Of stochastic rounding."""


def optimizer_settings(config: TrainingConfig) -> OptimizerSettings:
    return OptimizerSettings(
        name=config.optimizer,
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        seed=config.seed,
    )


def make_optimizer(parameters: Iterable[torch.nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """The named optimizer; its states live on the device of the parameters.

    Raises `OptimizerUnavailable` where its package cannot be imported or cannot step on that device.
    """
    trained = list(parameters)
    groups = _decay_groups(trained, settings.weight_decay)
    make = partial(_MAKERS[settings.name], settings=settings)
    if any(parameter.dtype == torch.bfloat16 for parameter in trained):
        return StochasticRounding(groups, make, seed=settings.seed)
    return make(groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRate:
    """The rate of each optimizer step: linear from 0 over the warmup, then as the schedule says.

    `linear` and `cosine` would reach 0 one step after the last of `total_steps`, so every step moves the weights.
    """

    peak: float
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    total_steps: int = 0

    def at(self, update: int) -> float:
        """The rate of optimizer step `update`; the first is 1."""
        if update < self.warmup_steps:
            return self.peak * update / self.warmup_steps
        return self.peak * self._remaining(update)

    def _remaining(self, update: int) -> float:
        first = max(1, self.warmup_steps)
        progress = min(1.0, (update - first) / max(1, self.total_steps + 1 - first))
        if self.schedule == "linear":
            return 1.0 - progress
        return 0.5 * (1.0 + math.cos(math.pi * progress)) if self.schedule == "cosine" else 1.0


def learning_rate(config: TrainingConfig) -> LearningRate:
    return LearningRate(
        peak=config.lr,
        warmup_steps=config.warmup_steps,
        schedule=config.lr_schedule,
        total_steps=config.training_steps * config.epochs_per_batch * config.mini_batches,
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def _decay_groups(parameters: list[torch.nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, norms and biases (everything of one dimension) do not."""
    groups = [
        {"params": [each for each in parameters if each.ndim >= 2], "weight_decay": weight_decay},
        {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adamw(groups: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)


def _adafactor(groups: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """With an absolute rate, as Hugging Face's `Trainer` sets it up.

    Torch's form and the paper's have rates relative to each tensor's own size, which leave an
    adapter's zero matrices where they are.
    """
    from transformers.optimization import Adafactor

    made: torch.optim.Optimizer = Adafactor(groups, lr=settings.lr, scale_parameter=False, relative_step=False)
    return made


def _adamw_8bit(groups: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    try:
        import bitsandbytes
    except (ImportError, RuntimeError, OSError) as error:
        raise OptimizerUnavailable(
            f"--optimizer adamw_8bit needs bitsandbytes, which cannot be imported ({error}); "
            "pip install bitsandbytes, or use --optimizer adamw"
        ) from error
    make = partial(bitsandbytes.optim.AdamW8bit, lr=settings.lr, betas=settings.betas, eps=settings.eps)
    device = groups[0]["params"][0].device
    try:
        _step_once(make, device)
    except Exception as error:
        raise OptimizerUnavailable(
            f"--optimizer adamw_8bit: bitsandbytes {bitsandbytes.__version__} cannot step on {device} ({error}); "
            "pip install 'bitsandbytes>=0.48', or use --optimizer adamw"
        ) from error
    made: torch.optim.Optimizer = make(groups)
    return made


def _step_once(make: Any, device: torch.device) -> None:
    """A step over a block that is large enough for 8-bit states: a missing kernel shows here, not after a batch."""
    probe = torch.nn.Parameter(torch.zeros(4096, device=device))
    probe.grad = torch.ones_like(probe)
    make([probe]).step()


_MAKERS = {"adamw": _adamw, "adamw_8bit": _adamw_8bit, "adafactor": _adafactor}
