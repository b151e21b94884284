"""Shapes of the answers that handlers write without a type of their own: for the description, and for tests.

A field that may be `UNSET` is left out where there is nothing to say.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from atropos_api.broker.counters import Counters
from atropos_api.broker.legacy_status import StatusEnv
from atropos_api.store.base import RunRow
from atropos_api.wire.groups import Group


class Welcome(Struct, kw_only=True):
    message: str


class TrainerRegistered(Struct, kw_only=True):
    uuid: int


class EnvironmentRegistered(Struct, kw_only=True):
    """Only `success` comes with the other fields; any other status is what to wait for."""

    status: str
    env_id: int | UnsetType = UNSET
    wandb_name: str | UnsetType = UNSET
    checkpoint_dir: str | UnsetType = UNSET
    starting_step: int | UnsetType = UNSET
    checkpoint_interval: int | UnsetType = UNSET
    num_steps: int | UnsetType = UNSET


class EnvironmentLeft(Struct, kw_only=True):
    status: Literal["success", "failure"]
    error: str | UnsetType = UNSET


class GroupTaken(Struct, kw_only=True):
    status: Literal["received", "buffered"]
    buffer_size: int | UnsetType = UNSET
    """Sequences of the environment that wait like this group."""


class GroupsTaken(Struct, kw_only=True):
    status: Literal["received"]
    groups_processed: int
    buffered: int | UnsetType = UNSET
    last_buffer_size: int | UnsetType = UNSET


class NextBatch(Struct, kw_only=True):
    """`batch` is null while none can be formed, and `[]` with a status and a message before a trainer registered."""

    batch: list[Group] | None
    status: str | UnsetType = UNSET
    message: str | UnsetType = UNSET


class StepAndQueue(Struct, kw_only=True):
    current_step: int
    queue_size: int


class TrainerFacts(Struct, kw_only=True):
    batch_size: int
    max_token_len: int
    policy_name: str | UnsetType = UNSET


class WandbFacts(Struct, kw_only=True):
    group: str | None
    project: str | None


class NoExample(Struct, kw_only=True):
    """The answer before any group came: an empty list under each key."""

    tokens: list[Any]
    masks: list[Any]
    scores: list[Any]
    advantages: list[Any]
    ref_logprobs: list[Any]
    generation_params: list[Any]
    inference_logprobs: list[Any]
    messages: list[Any]
    images: list[Any]


class Health(Struct, kw_only=True):
    status: str
    detail: str | UnsetType = UNSET


class HeldPolicy(Struct, kw_only=True):
    seconds: float
    version: int | None
    reason: str


class RunStatus(RunRow, kw_only=True):
    """The open run, or else the one that finished last."""

    holds: tuple[HeldPolicy, ...]  # type: ignore[assignment] # without the ids, which are all it takes to end a hold
    current_step: int
    next_batch: int


class QueueStatus(Struct, kw_only=True):
    groups: int
    sequences: int
    bytes: int
    oldest_age_seconds: float | None
    unpackable_sizes: list[int]
    unpackable_groups: int


class BatchesStatus(Struct, kw_only=True):
    uncommitted: dict[str, int]
    """Sequences by number of the batch."""
    outstanding_sequences: int


class LatestDrop(Struct, kw_only=True):
    explanation: str
    time: float


class EnvironmentStatus(Struct, kw_only=True):
    environment_id: int
    name: str
    group_size: int
    weight: float
    connected: bool
    quiet_seconds: float
    queued_sequences: int
    dropped_groups: dict[str, int]
    latest_drop: LatestDrop | None


class StoreStatus(Struct, kw_only=True):
    bytes: int


class Status(Struct, kw_only=True):
    """All that is shown of a broker: run, policy, queue, environments, counters."""

    time: float
    run: RunStatus | None
    queue: QueueStatus
    batches: BatchesStatus
    environments: list[EnvironmentStatus]
    left_over_groups: dict[str, int]
    store: StoreStatus
    dropped_groups: dict[str, int]
    counters: Counters


__all__ = [
    "EnvironmentLeft",
    "EnvironmentRegistered",
    "GroupTaken",
    "GroupsTaken",
    "Health",
    "NextBatch",
    "NoExample",
    "Status",
    "StatusEnv",
    "StepAndQueue",
    "TrainerFacts",
    "TrainerRegistered",
    "WandbFacts",
    "Welcome",
]
