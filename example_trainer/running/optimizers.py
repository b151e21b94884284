"""Optimizers over the master weights, and the learning-rate schedule.

An optimizer whose package is missing is an error with the line that installs it: a quiet fallback would train
another run than the one asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from example_trainer.config import TrainingConfig
from example_trainer.errors import OptimizerUnavailable


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSettings:
    name: Literal["adamw", "adamw_8bit", "adafactor"]
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01


def optimizer_settings(config: TrainingConfig) -> OptimizerSettings:
    return OptimizerSettings(
        name=config.optimizer,
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
    )


def make_optimizer(parameters: Iterable[torch.nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """The named optimizer; its states live on the device of the parameters."""
    trained = list(parameters)
    if settings.name == "adamw_8bit":
        return _adamw_8bit(trained, settings)
    if settings.name == "adafactor":
        return torch.optim.Adafactor(trained, lr=settings.lr, weight_decay=settings.weight_decay)
    return torch.optim.AdamW(
        trained,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )


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


def _adamw_8bit(parameters: list[torch.nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    try:
        import bitsandbytes
    except (ImportError, RuntimeError, OSError) as error:
        raise OptimizerUnavailable(
            f"--optimizer adamw_8bit needs bitsandbytes, which cannot be imported ({error}); "
            "pip install bitsandbytes, or use --optimizer adamw"
        ) from error
    optimizer: Any = bitsandbytes.optim.AdamW8bit(
        parameters, lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
    )
    made: torch.optim.Optimizer = optimizer
    return made
