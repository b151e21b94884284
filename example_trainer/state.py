"""The state of a training run: what a checkpoint stores of it, and the live progress of the loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

RandomState = dict[str, Any]

ObjectiveState = dict[str, Any]
"""What the objective carries from batch to batch: tensors and numbers, as `Objective.state` gives them."""


class Stateful(Protocol):
    """An optimizer, or what stands for one whose state was gathered from several ranks."""

    def state_dict(self) -> dict[str, Any]:
        """The state, as `torch.save` takes it."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerState:
    """The small part of a checkpoint; batch n is step n."""

    step: int
    updates: int
    """Optimizer steps taken; fewer than steps when some had nothing to learn."""
    policy_version: int | None
    """The version that these very weights were published under; null if they were not."""
    highest_version: int
    run_id: str
    run_name: str
    seed: int
    steps_by_version: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the step, as far as they were known before its publish: a crash may come before they are logged."""
    health: dict[str, Any] = field(default_factory=dict)
    """What the signs of trouble remembered before that step."""
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        """The last batch that this checkpoint covers."""
        return self.step


def random_state() -> RandomState:
    """The state of torch's generators now; a checkpoint written in the background must not look at them later."""
    import torch

    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def restore_random(state: RandomState, *, rank: int = 0) -> None:
    """Go on from `random_state`, or from what of several is this rank's."""
    import torch

    own = dict(enumerate(state.get("ranks", ()))).get(rank, state)
    torch.set_rng_state(own["cpu"])
    if torch.cuda.is_available() and own["cuda"]:
        torch.cuda.set_rng_state_all(own["cuda"])


@dataclass(kw_only=True, slots=True)
class Progress:
    """What the run has done so far; all a checkpoint must remember besides weights and optimizer."""

    step: int = 0
    version: int = 0
    """Of the last publish."""
    published_step: int | None = None
    """The step whose weights were published last."""
    weights_step: int = 0
    """The step that changed the weights last."""
    committed: int = 0
    checkpointed: int | None = None
    steps_by_version: dict[int, int] = field(default_factory=dict)
    """The step that each published version was made by."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last step, as far as they are known before its publish."""
    health: dict[str, Any] = field(default_factory=dict)
    """What the signs of trouble remember of the steps before that one."""
