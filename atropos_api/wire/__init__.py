"""The broker's contract as types and its two encodings, JSON and binary columns.

In reading order: `groups`, `messages`, `servers`, `fleets` and `reports` (the types), `group_json`, `group_json_small`
and `json_arrays` (JSON, checked without decoding numbers), `columns`, `columns_check` and `columns_groups` (columns).
It may import `errors` and `common`.
"""

from atropos_api.wire.fleets import Fleet, FleetLease, FleetReport, FleetSet, ScaleRequest
from atropos_api.wire.groups import WIRE_KEYS, Batch, Group, Span
from atropos_api.wire.messages import (
    CommitRequest,
    DropReport,
    EnvironmentInfo,
    EnvironmentRequest,
    FinishRequest,
    Hold,
    HoldRequest,
    ItemLease,
    ItemRequest,
    Pacing,
    PolicyState,
    PolicyUpdate,
    Problem,
    RunInfo,
    RunRequest,
    Submission,
    SubmitAnswer,
)
from atropos_api.wire.servers import InferenceServer, ServerLease, ServerReport, ServerSet

__all__ = [
    "WIRE_KEYS",
    "Batch",
    "CommitRequest",
    "DropReport",
    "EnvironmentInfo",
    "EnvironmentRequest",
    "FinishRequest",
    "Fleet",
    "FleetLease",
    "FleetReport",
    "FleetSet",
    "Group",
    "Hold",
    "HoldRequest",
    "InferenceServer",
    "ItemLease",
    "ItemRequest",
    "Pacing",
    "PolicyState",
    "PolicyUpdate",
    "Problem",
    "RunInfo",
    "RunRequest",
    "ScaleRequest",
    "ServerLease",
    "ServerReport",
    "ServerSet",
    "Span",
    "Submission",
    "SubmitAnswer",
]
