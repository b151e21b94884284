"""The broker's contract as types and its two encodings, JSON and binary columns.

In reading order: `groups` and `messages` (the types), `group_json`, `group_json_small` and `json_arrays` (JSON,
checked without decoding numbers), `columns`, `columns_check` and `columns_groups` (columns). It may import `errors`
and `common`.
"""

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
