"""The small messages of the v1 contract: runs, environments, pacing, policy, answers to submissions."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec

from atropos_api.wire.groups import DEFAULT_POLICY, Group

Positive = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
"""A count of sequences, batches or ranks: a million at most, so that no arithmetic on it gets too large."""
NotNegative = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Whole = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
"""An integer that the ledger and every JSON reader can hold."""
Weight = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
"""A weight among others, within bounds in which sums of its products with lengths stay finite."""
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Unit = Literal["sequences", "groups"]

LONGEST_HOLD_SECONDS = 600.0
"""The longest lease: it expires unless it is renewed, so that a crashed evaluation blocks no run."""


class RunRequest(msgspec.Struct, kw_only=True):
    """Begin a run, or resume the one of this name."""

    name: Name
    batch_size: Positive
    """Size of a batch, counted in `unit`."""
    max_token_length: Whole
    """Longest sequence that the trainer takes; 0 or less: any length."""
    num_steps: NotNegative
    resume: bool = False
    take_over: bool = False
    """Begin even if the trainer of another open run is active: that run closes. Without it such a call is refused."""
    resume_from_batch: NotNegative = 0
    """The last batch covered by the checkpoint that is resumed from."""
    checkpoint_dir: str = ""
    checkpoint_interval: Whole = 0
    wandb_project: str = ""
    wandb_group: str = ""
    world_size: Positive = 1
    max_staleness: NotNegative | None = None
    """Groups whose policy is more than this many trainer steps old are expired; None: the broker's own setting."""
    batches_dir: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    """The directory in which the trainer saves each batch as `batch-N.atb`; empty if it saves none."""
    unit: Unit = "sequences"
    """With `sequences`, a batch holds exactly `batch_size`, whatever the group sizes; with `groups`, the oldest."""
    policy: Name = DEFAULT_POLICY
    """Name of the policy that the run trains."""


class RunInfo(msgspec.Struct, kw_only=True):
    run_id: str
    epoch: int
    """Rises with each takeover; batches and commits of an older epoch are refused."""
    next_batch: int
    highest_policy_version: int
    """Highest version ever announced to this broker; the next publish must be higher."""
    committed_batch: int
    leftover_groups: int
    """Groups of other runs that stay on disk and are never served to this one."""
    policy: str = DEFAULT_POLICY
    max_staleness: int | None = None
    """Most steps that a group's policy may be older than its batch, by the run's bound and the broker's own."""


class PolicyUpdate(msgspec.Struct, kw_only=True):
    """A publish that succeeded: from now on the servers sample under `version`."""

    run_id: str
    version: NotNegative
    step: NotNegative
    """The trainer step the weights come from."""
    published_at: float
    epoch: Whole | None = None
    policy_name: Annotated[str, msgspec.Meta(min_length=1, max_length=200)] | None = None
    """The model that clients must request to get this policy; None: the one they request anyway."""
    servers: Annotated[list[Annotated[str, msgspec.Meta(max_length=64)]], msgspec.Meta(max_length=4096)] | None = None
    """Lease ids of the registered servers that were proven to serve it: these serve, the policy's others have to join
    again. None: the trainer does not follow the registry, and no server's state changes.
    """


class HoldRequest(msgspec.Struct, kw_only=True):
    """Ask the trainer not to publish for some time, or to extend such a hold (`hold_id`)."""

    seconds: Annotated[float, msgspec.Meta(gt=0.0, le=LONGEST_HOLD_SECONDS)]
    hold_id: str | None = None
    reason: Annotated[str, msgspec.Meta(max_length=200)] = ""


class Hold(msgspec.Struct, kw_only=True):
    """A lease on the published policy: any caller that has its id may renew or release it."""

    hold_id: str
    seconds: float
    """Time from now until it expires; 0 once released."""
    policy_version: int | None
    """The version published when it was granted."""
    kept: bool
    """True if that version is still published. A publish in progress when the hold is granted may break it."""


class PolicyState(msgspec.Struct, kw_only=True):
    """The published policy, and how long the trainer is asked to keep it: read this before each publish."""

    run_id: str
    version: int | None
    step: int | None
    held_seconds: float
    """Time until the last lease expires if none is renewed; 0: publishing is free."""


class CommitRequest(msgspec.Struct, kw_only=True):
    run_id: str
    epoch: Whole | None = None


class FinishRequest(msgspec.Struct, kw_only=True):
    epoch: Whole | None = None
    """The caller's epoch; a trainer whose run was taken over is refused. None: end the run under any epoch."""


class EnvironmentRequest(msgspec.Struct, kw_only=True):
    """Register an environment by a stable name: after a restart it gets the same id."""

    name: Name
    process: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """An id of the caller's process, which its heartbeats name too: a second process that runs at the same time is
    another environment, `name_1`. Empty: all callers of this name are one environment."""
    group_size: Positive
    max_token_length: Whole
    weight: Weight = 1.0
    min_batch_allocation: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None
    max_batches_offpolicy: Positive = 3


class Pacing(msgspec.Struct, kw_only=True):
    """Pacing of one environment: it says how much work to have in flight."""

    state: Literal["wait", "run", "finished"]
    revision: int
    """A number that changes with state, step, policy, and whenever room appears or ends."""
    current_step: int
    num_steps: int
    batch_size: int
    """In sequences; if the run counts groups, the sequences of that many groups of this environment's size."""
    outstanding_sequences: int
    """Sequences queued, or in formed batches that are not yet trained."""
    room_sequences: int
    """Sequences that this environment may have in flight now; 0 means pause."""
    policy_version: int | None
    policy_step: int | None
    policy_held_seconds: float = 0.0
    """Time for which evaluations ask that no other policy be published; 0: none asks."""
    paused_because: str | None = None
    """The reason if there is no room until something else changes, such as another environment's group size."""
    policy_name: str | None = None
    """The model to request for this policy, if a stock vLLM server has each version under a name of its own."""
    run_id: str | None = None
    """The run that this is about; None while there is none."""
    epoch: int | None = None
    """The number of that run's owner: a trainer that resumes the run may have given it other settings."""


class EnvironmentInfo(msgspec.Struct, kw_only=True):
    environment_id: int
    display_name: str
    pacing: Pacing
    run_id: str | None
    batch_size: int
    """In sequences, as in `pacing`."""
    max_token_length: int
    num_steps: int
    checkpoint_dir: str
    checkpoint_interval: int
    wandb_project: str
    wandb_group: str


class DropReport(msgspec.Struct, kw_only=True):
    """The groups that an environment dropped instead of submitting: totals so far, so a report may be repeated."""

    session: Name
    """Name that the counting process made up for itself; another process counts from 0."""
    groups: Annotated[
        dict[Annotated[str, msgspec.Meta(min_length=1, max_length=60)], NotNegative], msgspec.Meta(max_length=32)
    ]
    """Dropped groups by reason."""
    explanation: Annotated[str, msgspec.Meta(max_length=2000)] = ""
    """A sentence for the operator: how many, why, an example, and what to change."""


class ItemRequest(msgspec.Struct, kw_only=True):
    """Report of what happened to leased items, and a request for others. Numbers count from 0 in each run."""

    process: Name
    """Name that the asking process made up for itself; the leases of another process of the environment end."""
    call: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    """Number of this call, one more than that of the last; a call that is repeated gets the same answer."""
    finished: list[NotNegative] = []
    """Items of which every group is acknowledged."""
    dropped: dict[Annotated[str, msgspec.Meta(min_length=1, max_length=60)], list[NotNegative]] = {}
    """Items without a group that could be submitted, by reason."""
    count: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 0
    """Number of items to lease."""
    limit: NotNegative | None = None
    """Number of items in all; None: their numbers never end."""
    sampled_sequences: NotNegative = 0
    """Rollouts scored since the last call, those of dropped groups included."""
    sampled_tokens: NotNegative = 0
    """Tokens sampled for them."""


class ItemLease(msgspec.Struct, kw_only=True):
    """The items that a call leased; each is the process's until it is finished or dropped, or another process asks."""

    run_id: str | None
    items: list[int]
    """Fewer than were asked for if there are no more; none without an open run."""


ITEM_KEY = re.compile(r"(?P<run_id>.+)/item-(?P<number>[0-9]{1,16})/[0-9]+")
"""The form of `item_key`."""


def item_key(run_id: str, number: int, group: int) -> str:
    """Return the idempotency key of a leased item's group, counted from 0: that of an item used again is the same."""
    return f"{run_id}/item-{number}/{group}"


class Submission(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/groups`: the groups of one environment."""

    environment_id: Whole
    groups: list[Group]


class SubmitAnswer(msgspec.Struct, kw_only=True):
    accepted: int
    buffered: int
    """Accepted groups that no batch can use until others arrive."""
    duplicates: int
    """Groups that were already taken under the same idempotency key."""
    pacing: Pacing | None


class Problem(msgspec.Struct, kw_only=True):
    """RFC 9457 problem details; other members name the offending field and value."""

    type: str
    title: str
    status: int
    detail: str


def decode_problem(body: bytes) -> dict[str, Any]:
    """Return a problem body as a mapping; any other body becomes the `detail` of one."""
    try:
        problem = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError:
        # The page of a proxy has many lines, and the error that quotes it has one.
        return {"type": "about:blank", "detail": " ".join(body[:500].decode("utf-8", "replace").split())}
    return problem
