"""`DistributedLayout`: how the GPUs of a run are divided into trainer processes and inference servers.

It is plain arithmetic on the four numbers of a run file's `placement:` section, so that `--dry-run` shows it before
anything starts. Each GPU has one worker that trains and samples: the workers together are the trainer's processes, and
in another division they are the replicas of the inference server. This module loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from example_trainer.errors import TrainerError


class BadLayout(TrainerError):
    """The sizes of a layout do not divide its GPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DistributedLayout:
    """A number of equal nodes, and the tensor parallelism of trainer (actor) and server (rollout) on their GPUs."""

    n_nodes: int = 1
    n_gpus_per_node: int = 1
    actor_tp_size: int = 1
    """Number of trainer processes that divide each layer."""
    rollout_tp_size: int = 1
    """Number of GPUs of one inference server."""

    def __post_init__(self) -> None:
        """Raise `BadLayout` unless all numbers are positive and tensor-parallel groups divide nodes evenly."""
        for name, value in asdict(self).items():
            if type(value) is not int or value < 1:
                raise BadLayout(f"{name} {value!r} must be a whole number of at least 1")
        for name in ("actor_tp_size", "rollout_tp_size"):
            self._check_group(name, getattr(self, name))

    @classmethod
    def from_section(cls, section: Mapping[str, Any]) -> DistributedLayout:
        """Return the layout of a `placement:` section; raise `BadLayout` for an unknown key."""
        unknown = [key for key in section if key not in cls.__dataclass_fields__]
        if unknown:
            raise BadLayout(f"unknown key {unknown[0]!r}; the keys are {', '.join(cls.__dataclass_fields__)}")
        return cls(**section)

    @property
    def world_size(self) -> int:
        """Number of workers: one a GPU."""
        return self.n_nodes * self.n_gpus_per_node

    @property
    def actor_dp_size(self) -> int:
        """Number of trainer processes, or groups of them, that train different rows."""
        return self.world_size // self.actor_tp_size

    @property
    def rollout_replicas(self) -> int:
        """Number of inference servers."""
        return self.world_size // self.rollout_tp_size

    @property
    def worker_names(self) -> tuple[str, ...]:
        """The workers' names by rank: `worker-1-0` is on the second node's first GPU."""
        return tuple(f"worker-{node}-{gpu}" for node in range(self.n_nodes) for gpu in range(self.n_gpus_per_node))

    def describe(self) -> str:
        """Return one line for people."""
        return (
            f"layout: {self.n_nodes} node{'s' * (self.n_nodes > 1)} of {self.n_gpus_per_node} "
            f"GPU{'s' * (self.n_gpus_per_node > 1)}: world size {self.world_size}, actor data parallel "
            f"{self.actor_dp_size} x tensor parallel {self.actor_tp_size}, {self.rollout_replicas} rollout "
            f"replica{'s' * (self.rollout_replicas > 1)} x tensor parallel {self.rollout_tp_size}"
        )

    def _check_group(self, name: str, size: int) -> None:
        if self.world_size % size:
            raise BadLayout(f"{name} {size} does not divide the {self.world_size} GPUs of {self.n_nodes} node(s)")
        if self.n_gpus_per_node % size and size % self.n_gpus_per_node:
            raise BadLayout(
                f"{name} {size} would put a group on parts of nodes with {self.n_gpus_per_node} GPUs each; use a "
                "divisor or a multiple of that"
            )
