"""The check before a model is loaded: device, kernels, optimizer and loss that cannot work on this machine.

Each of them is refused in one line within seconds, where its first use would come after the model and the server. It is
apart from `train_step`, which also repeats recorded steps.
"""

from __future__ import annotations

import torch

from example_trainer.config import TrainingConfig
from example_trainer.modeling.kernels import refuse_kernels
from example_trainer.modeling.loading import resolve_device
from example_trainer.modeling.optimizers import make_optimizer, optimizer_settings
from example_trainer.objective.objective import load_own_loss


def refuse_unusable(config: TrainingConfig) -> None:
    """Raise a `TrainerError` for a choice by name that is missing here, or that fails on a small tensor."""
    device = resolve_device(config.device)
    refuse_kernels(config.kernels, device)
    holds_masters = torch.device("cpu") if config.master_weights == "host" else device
    make_optimizer([torch.nn.Parameter(torch.ones(4, 4, device=holds_masters))], optimizer_settings(config))
    if config.has_own_loss:
        load_own_loss(config.loss_type)
