"""The state of a training run: the part that a checkpoint stores, the live progress of the loop, and its phases."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

RandomState = dict[str, Any]

ObjectiveState = dict[str, Any]
"""State that the objective keeps from batch to batch: the tensors and numbers that `Objective.state` returns."""


class Stateful(Protocol):
    """An optimizer, or an object with its interface whose state was gathered from several ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in a form that `torch.save` accepts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerState:
    """The content of a checkpoint's `trainer_state.json`; batch n is step n."""

    step: int
    updates: int
    """Number of optimizer steps taken; smaller than `step` if some batches had nothing to learn from."""
    policy_version: int | None
    """The version that exactly these weights were published under; null if they were not published."""
    highest_version: int
    run_id: str
    run_name: str
    seed: int
    weights_step: int | None = None
    """The step that changed the weights last, from which ages are counted; null: `step`."""
    steps_by_version: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the step that were known before its publish; kept because a crash may come before they are logged."""
    health: dict[str, Any] = field(default_factory=dict)
    """State of the health monitor before that step."""
    loss_scale: dict[str, float] | None = None
    """State of the loss scale of float16; null for other dtypes."""
    config: dict[str, Any] = field(default_factory=dict)
    base: str | None = None
    """Fingerprint of the model that the run trains from; null if its files have none."""
    method: Literal["grpo", "sft"] = "grpo"
    """The training that wrote it: of `atropos-grpo`, or of `atropos-sft`."""

    @property
    def batch(self) -> int:
        """The last batch that this checkpoint covers."""
        return self.step


def random_state() -> RandomState:
    """Return the current state of torch's generators; a checkpoint written in the background must not read it later."""
    import torch

    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def restore_random(state: RandomState, *, rank: int = 0) -> None:
    """Restore torch's generators from `random_state`; from the states of several ranks, take this rank's.

    If it has the states of more GPUs than there are here, the first are taken.
    """
    import torch

    own = dict(enumerate(state.get("ranks", ()))).get(rank, state)
    torch.set_rng_state(own["cpu"])
    if torch.cuda.is_available() and own["cuda"]:
        torch.cuda.set_rng_state_all(own["cuda"][: torch.cuda.device_count()])


@dataclass(kw_only=True, slots=True)
class Progress:
    """The progress of the run: everything that a checkpoint must remember besides weights and optimizer."""

    step: int = 0
    version: int = 0
    """Policy version of the last publish."""
    published_step: int | None = None
    """The step whose weights were published last."""
    weights_step: int = 0
    """The step that changed the weights last."""
    committed: int = 0
    checkpointed: int | None = None
    steps_by_version: dict[int, int] = field(default_factory=dict)
    """The step that made each published version."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last step that are known before its publish."""
    health: dict[str, Any] = field(default_factory=dict)
    """State of the health monitor before that step."""
    base: str | None = None
    """Fingerprint of the model that the run trains from."""


class Phases:
    """The parts of a step that are in progress, each with the time at which it began; another thread may read them.

    With `--overlap-publish` a publish runs in parallel with training.
    """

    def __init__(self) -> None:
        self.step = 0
        """The step in progress."""
        self._began: dict[str, float] = {}

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Count the time of the block as this part."""
        self._began[name] = time.monotonic()
        try:
            yield
        finally:
            self._began.pop(name, None)

    def seconds(self) -> dict[str, float]:
        """Return the time of each part so far."""
        now = time.monotonic()
        return {name: max(0.0, now - began) for name, began in dict(self._began).items()}
