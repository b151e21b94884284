"""A loss of the user's own, named by where it is imported from.

    # my_pkg/my_module.py
    def my_loss(inputs: LossInputs, settings: LossSettings) -> Tensor:
        ratios = (inputs.logprobs - inputs.rollout_logprobs).exp()
        return -ratios * inputs.advantages

`--loss-type my_pkg.my_module:my_loss` takes it in place of the surrogate. It gives `[N]` fp32 values with gradient, one
a trained token; averaging, the reference's divergence, entropy and masks are the trainer's.
"""

from __future__ import annotations

import importlib

import torch

from example_trainer.errors import UnusableLoss
from example_trainer.objective.losses import LossInputs, LossSettings, OwnLoss


def load_own_loss(name: str) -> OwnLoss:
    """Import `package.module:function` and try it on three tokens; raises `UnusableLoss` when that does not work."""
    module_name, _, function_name = name.partition(":")
    try:
        loss: OwnLoss = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise UnusableLoss(f"--loss-type {name} cannot be imported: {error}; check the path, and PYTHONPATH") from error
    _try(name, loss)
    return loss


def _try(name: str, loss: OwnLoss) -> None:
    logprobs, other = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True), torch.tensor([-1.1, -1.9, -0.5])
    inputs = LossInputs(
        logprobs=logprobs,
        entropies=torch.ones(3, requires_grad=True),
        rollout_logprobs=other,
        proximal_logprobs=other,
        reference_logprobs=other,
        advantages=torch.tensor([1.0, -1.0, 0.5]),
        sequences=torch.tensor([0, 0, 1]),
    )
    try:
        values = loss(inputs, LossSettings(loss_type=name))
    except Exception as error:
        raise UnusableLoss(
            f"--loss-type {name} fails on three tokens: {error!r}; the signature is that of own_loss's example"
        ) from error
    if not isinstance(values, torch.Tensor) or values.shape != logprobs.shape or not values.requires_grad:
        found = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
        raise UnusableLoss(
            f"--loss-type {name} gave {found} for 3 tokens; it has to give a tensor of 3 losses, with gradient"
        )
