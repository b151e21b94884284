"""The broker's contract as types, for whoever speaks it: the broker itself, environments, trainers."""

from atropos_api.wire.groups import WIRE_KEYS, Batch, Group, Span
from atropos_api.wire.messages import (
    CommitRequest,
    EnvironmentInfo,
    EnvironmentRequest,
    Pacing,
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
    "EnvironmentInfo",
    "EnvironmentRequest",
    "Group",
    "Pacing",
    "PolicyUpdate",
    "Problem",
    "RunInfo",
    "RunRequest",
    "Span",
    "Submission",
    "SubmitAnswer",
]
