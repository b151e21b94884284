"""Optimizers over the master weights, and the learning-rate schedule.

An optimizer whose package is missing, or has no kernel for this device, is an error with the line that
installs it: a quiet fallback would train another run than the one asked for. Masters in bf16
(`--master-weights none`) are stepped with stochastic rounding, whichever optimizer it is. Weight
decay leaves out norms and biases, as Hugging Face's `Trainer` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from example_trainer.config import TrainingConfig
from example_trainer.errors import OptimizerUnavailable
from example_trainer.running.stochastic_rounding import StochasticRounding


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
