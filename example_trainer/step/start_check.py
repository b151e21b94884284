"""The check before a model is loaded: device, kernels, optimizer and loss that cannot work on this machine.

Each of them is refused in one line within seconds; at its first use, model and server would have been loaded. This is a
module of its own because `train_step` also repeats recorded steps.
"""

from __future__ import annotations

import torch

from example_trainer.config import TrainingConfig
from example_trainer.modeling.kernels import refuse_kernels
from example_trainer.modeling.loading import policy_options, resolve_device, stored_config
from example_trainer.modeling.lora import inject
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
    if config.trains_adapter:
        _try_adapter(config)


def _try_adapter(config: TrainingConfig) -> None:
    """Put the adapter into a model of the same form without values; raise if it lacks the modules or layers."""
    from transformers import AutoModelForCausalLM

    options = policy_options(config)
    assert options.adapter is not None
    # The random state is that of the run: a draw here would change its first adapter.
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        inject(AutoModelForCausalLM.from_config(stored_config(options)), options.adapter)
