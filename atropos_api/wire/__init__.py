"""The broker's contract as types, for whoever speaks it: the broker itself, environments, trainers."""

from atropos_api.wire.groups import WIRE_KEYS, Batch, Group, Span
from atropos_api.wire.messages import (
    CommitRequest,
    DropReport,
    EnvironmentInfo,
    EnvironmentRequest,
    FinishRequest,
    Hold,
    HoldRequest,
    Pacing,
    PolicyState,
    PolicyUpdate,
    Problem,
    RunInfo,
    RunRequest,
    Submission,
    SubmitAnswer,
)

__all__ = [
    "WIRE_KEYS",
    "Batch",
    "CommitRequest",
    "DropReport",
    "EnvironmentInfo",
    "EnvironmentRequest",
    "FinishRequest",
    "Group",
    "Hold",
    "HoldRequest",
    "Pacing",
    "PolicyState",
    "PolicyUpdate",
    "Problem",
    "RunInfo",
    "RunRequest",
    "Span",
    "Submission",
    "SubmitAnswer",
]
