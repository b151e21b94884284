"""The reference policy that the divergence is measured from, without a second model in memory.

It is the policy at the run's start, kept as a copy of the trained weights; under adapters the base with the adapter
off, at no cost; or another checkpoint of the same architecture. A swap takes the policy as it is now. Reference
logprobs are scored before a batch's first update, by the same forward as the policy's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from example_trainer.errors import ModelNotFound
from example_trainer.objective.packing import Row

if TYPE_CHECKING:
    from example_trainer.data import Targets
    from example_trainer.model import Policy

Score = Callable[[Sequence[Row], "Targets"], Tensor]
"""`[N]` logprobs of rows under the weights in place, NaN outside them."""


class Reference:
    """Frozen weights to score under; None while the base alone, with adapters off, is the reference."""

    def __init__(self, policy: Policy, *, model_name: str | None = None, update_interval: int = 0) -> None:
        self._policy = policy
        self._interval = update_interval
        self.swapped = False
        """Whether the weights are no longer those that a new run would begin with."""
        self.weights: dict[str, Tensor] | None = None
        if model_name is not None:
            self.weights = _load_weights(policy, model_name)
        elif not policy.has_adapter:
            self.weights = policy.snapshot()

    def logprobs(self, rows: Sequence[Row], targets: Targets, score: Score) -> Tensor:
        """`[N]` reference logprobs: those the environment gave, and for rows that lack them, scored ones."""
        given = targets.reference_logprobs
        if given is None:
            given = torch.full((len(targets),), torch.nan, device=targets.labels.device)
        missing = [row for row in rows if bool(given[row.first_target].isnan())]
        # Also where nothing is missing here: with several ranks a forward takes part in those of the others.
        with self._in_place(), torch.no_grad():
            scored = score(missing, targets)
        return torch.where(given.isnan(), scored, given)

    def after_step(self, step: int) -> None:
        """Take the policy as the new reference where an interval of batches says so."""
        if self._interval and step % self._interval == 0:
            self.swap()

    def swap(self) -> None:
        """From now on the policy as it is now is the reference."""
        self.weights = self._policy.snapshot()
        self.swapped = True

    def restore(self, weights: dict[str, Tensor]) -> None:
        """Take the weights of a reference that an earlier part of the run had swapped in."""
        self.weights = {name: _held(self._policy, name, weight) for name, weight in weights.items()}
        self.swapped = True

    def _in_place(self) -> AbstractContextManager[None]:
        if self.weights is None:
            return self._policy.without_adapter()
        return self._policy.with_weights(self.weights)


def _held(policy: Policy, name: str, weight: Tensor) -> Tensor:
    """What this process keeps of a whole weight: its slice where the policy is spread over ranks."""
    if not policy.is_sharded:
        return weight.to(policy.device)
    from example_trainer.learning.sharding import shard_like

    return shard_like(weight, policy.masters[name])


def _load_weights(policy: Policy, model_name: str) -> dict[str, Tensor]:
    """The trained weights of another checkpoint, by the policy's own names and in its served dtype."""
    from example_trainer.model import PolicyOptions, Sharding, load_policy

    if model_name.startswith((".", "/", "~")) and not Path(model_name).expanduser().is_dir():
        raise ModelNotFound(
            f"--ref-model {model_name}: no such directory; name a checkpoint of the policy's architecture"
        )
    dtype = str(policy.dtype).removeprefix("torch.")
    sharding = Sharding() if policy.is_sharded else None
    options = PolicyOptions(
        model_name=model_name, dtype=dtype, device=str(policy.device), master_weights="none", sharding=sharding
    )
    other = load_policy(options).snapshot()
    for name, master in policy.masters.items():
        if name not in other or other[name].shape != master.shape:
            raise ModelNotFound(
                f"--ref-model {model_name} has no {name} of shape {tuple(master.shape)}; the reference needs the "
                "policy's architecture"
            )
    return {name: other[name] for name in policy.masters}
