"""The reference policy, from which the KL term is measured; it needs no second model in memory.

The estimators of the KL divergence are in `kl_divergence`.

It is the policy at the run's start, kept as a copy of the trained weights; with adapters the base with the adapter off,
at no cost; or another checkpoint of the same architecture. A swap makes the current policy the reference. Reference
logprobs are computed before a batch's first update, by the same forward as the policy's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atropos_api.common.files import expand_home
from example_trainer.errors import ModelNotFound
from example_trainer.modeling.micro_batches import Row

if TYPE_CHECKING:
    from example_trainer.modeling.policy import Policy
    from example_trainer.objective.losses import Targets

COMPUTED_WITH = (
    "head_dim",
    "hidden_act",
    "layer_types",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "sliding_window",
)
"""Settings of a model that no weight's shape shows: its weights mean something else under other values."""

Score = Callable[[Sequence[Row], "Targets"], Tensor]
"""A function that returns `[N]` logprobs of rows under the current weights, NaN outside these rows."""


class Reference:
    """The reference policy: frozen weights, or None as long as the base with adapters off is the reference."""

    def __init__(self, policy: Policy, *, model_name: str | None = None, update_interval: int = 0) -> None:
        self._policy = policy
        self._interval = update_interval
        self.swapped = False
        """True if the weights are no longer those that a new run would begin with."""
        self.weights: dict[str, Tensor] | None = None
        if model_name is not None:
            self.weights = _load_weights(policy, model_name)
        elif not policy.has_adapter:
            self.weights = policy.snapshot()

    def logprobs(self, rows: Sequence[Row], targets: Targets, score: Score) -> Tensor:
        """Return `[N]` reference logprobs: those from the environment, and computed ones for rows without them."""
        supplied = targets.reference_logprobs
        if supplied is None:
            supplied = torch.full((len(targets),), torch.nan, device=targets.labels.device)
        missing = [row for row in rows if bool(supplied[row.first_target].isnan())]
        # Called even if nothing is missing here: with sharded weights the other ranks' forwards need this rank.
        with self._in_place(), torch.no_grad():
            scored = score(missing, targets)
        return torch.where(supplied.isnan(), scored, supplied)

    def after_step(self, step: int) -> None:
        """Make the policy the new reference if the update interval ends at this step."""
        if self._interval and step % self._interval == 0:
            self.swap()

    def swap(self) -> None:
        """Make a copy of the current policy the reference from now on."""
        self.weights = self._policy.snapshot()
        self.swapped = True

    def restore(self, weights: dict[str, Tensor]) -> None:
        """Load the weights of a reference that was swapped in before the resume."""
        self.weights = {name: _held(self._policy, name, weight) for name, weight in weights.items()}
        self.swapped = True

    def _in_place(self) -> AbstractContextManager[None]:
        if self.weights is None:
            return self._policy.without_adapter()
        return self._policy.with_weights(self.weights)


def _held(policy: Policy, name: str, weight: Tensor) -> Tensor:
    """Return the part of a whole weight that this process keeps: its shard if the policy is sharded."""
    if not policy.is_sharded:
        return weight.to(policy.device)
    from example_trainer.modeling.shards import shard_like

    return shard_like(weight, policy.masters[name])


def _load_weights(policy: Policy, model_name: str) -> dict[str, Tensor]:
    """Return the trained weights of another checkpoint, by the policy's own names and in its served dtype."""
    from example_trainer.model import load_policy
    from example_trainer.modeling.loading import PolicyOptions

    if model_name.startswith((".", "/", "~")) and not expand_home(model_name).is_dir():
        raise ModelNotFound(
            f"--ref-model {model_name}: no such directory; name a checkpoint of the policy's architecture"
        )
    dtype = str(policy.dtype).removeprefix("torch.")
    options = PolicyOptions(
        model_name=str(expand_home(model_name)) if model_name.startswith("~") else model_name,
        flag="--ref-model",
        dtype=dtype,
        device=str(policy.device),
        master_weights="fp32" if policy.dtype == torch.float16 else "none",  # float16 is refused without masters
        sharding=policy.sharding,
    )
    model = load_policy(options)
    other = model.snapshot()
    if difference := _difference(policy, model, other):
        raise ModelNotFound(f"--ref-model {model_name} has {difference}; the reference needs the policy's architecture")
    differing = _differing_frozen(policy, model)
    if differing is not None:
        raise ModelNotFound(
            f"--ref-model {model_name}: its {differing} is not the policy's, which --train-layer-indices freezes; the "
            "reference would be a mixture of both. Train all layers, or name a model with the same frozen ones"
        )
    return {name: other[name] for name in policy.masters}


def _difference(policy: Policy, other: Policy, weights: Mapping[str, Tensor]) -> str | None:
    """Return words for what the policy's module cannot compute of `other`, which has these weights; None if nothing."""
    for name, master in policy.masters.items():
        if name not in weights or weights[name].shape != master.shape:
            return f"no {name} of shape {tuple(master.shape)}"
    if left := weights.keys() - set(policy.parameter_names.values()):
        return f"{min(left)}, which the policy lacks"
    own, theirs = (each.hf_config.get_text_config() for each in (policy, other))
    for setting in COMPUTED_WITH:
        here, there = getattr(own, setting, None), getattr(theirs, setting, None)
        if here != there:
            return f"{setting} {there}, the policy {here}"
    return None


def _differing_frozen(policy: Policy, other: Policy) -> str | None:
    """Return the first weight that the policy freezes and `other` has with other values; None if there is none."""
    for parameter_name, name in policy.parameter_names.items():
        if name not in policy.masters:
            own, theirs = (each.whole_weight(parameter_name, policy.dtype, keep=True) for each in (policy, other))
            if own is None or theirs is None or not torch.equal(own, theirs):
                return name
    return None
