"""The small messages of the v1 contract: runs, environments, pacing, policy, answers to submissions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from atropos_api.wire.groups import Group

Positive = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
"""A count of sequences, batches or ranks: a million at most, so that no arithmetic on it grows out of hand."""
NotNegative = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Unit = Literal["sequences", "groups"]

LONGEST_HOLD_SECONDS = 600.0
"""A lease that nobody renews ends by itself, so that an evaluation that died stops no run."""


class RunRequest(msgspec.Struct, kw_only=True):
    """Begin a run, or resume the one of this name."""

    name: Name
    batch_size: Positive
    """What a batch holds, counted in `unit`."""
    max_token_length: int
    """Longest sequence the trainer takes; 0 or less: any."""
    num_steps: NotNegative
    resume: bool = False
    take_over: bool = False
    """Begin although the trainer of another open run is at work: that run closes. Without it such a call is refused."""
    resume_from_batch: NotNegative = 0
    """The last batch covered by the checkpoint that is resumed from."""
    checkpoint_dir: str = ""
    checkpoint_interval: int = 0
    wandb_project: str = ""
    wandb_group: str = ""
    world_size: Positive = 1
    max_staleness: NotNegative | None = None
    """Groups whose policy is more than this many trainer steps old are expired; None: the broker's own setting."""
    unit: Unit = "sequences"
    """Of sequences a batch holds exactly `batch_size`, whatever the groups' sizes; of groups, the oldest ones."""


class RunInfo(msgspec.Struct, kw_only=True):
    run_id: str
    epoch: int
    """Rises with each takeover; batches and commits of an older epoch are refused."""
    next_batch: int
    highest_policy_version: int
    """Highest version ever announced to this broker; the next publish goes above it."""
    committed_batch: int
    leftover_groups: int
    """Groups of other runs that stay on disk and are never served to this one."""


class PolicyUpdate(msgspec.Struct, kw_only=True):
    """A publish that succeeded: from now on the servers sample under `version`."""

    run_id: str
    version: NotNegative
    step: NotNegative
    """The trainer step the weights come from."""
    published_at: float
    epoch: int | None = None
    policy_name: Annotated[str, msgspec.Meta(min_length=1, max_length=200)] | None = None
    """The model that clients have to ask for to get this policy; None: the one they ask for anyway."""


class HoldRequest(msgspec.Struct, kw_only=True):
    """Ask the trainer to publish no policy for a while, or for a while longer (`hold_id`)."""

    seconds: Annotated[float, msgspec.Meta(gt=0.0, le=LONGEST_HOLD_SECONDS)]
    hold_id: str | None = None
    reason: Annotated[str, msgspec.Meta(max_length=200)] = ""


class Hold(msgspec.Struct, kw_only=True):
    """A lease on the published policy; whoever has its id may renew or release it."""

    hold_id: str
    seconds: float
    """How long it lasts from now; 0 once released."""
    policy_version: int | None
    """The version published when it was granted."""
    kept: bool
    """Whether that is the published version still. A publish under way when the hold is granted may break it."""


class PolicyState(msgspec.Struct, kw_only=True):
    """What is published, and how long the trainer is asked to leave it so. Read it before each publish."""

    run_id: str
    version: int | None
    step: int | None
    held_seconds: float
    """Until the last lease ends, if nobody renews it; 0: publish."""


class CommitRequest(msgspec.Struct, kw_only=True):
    run_id: str
    epoch: int | None = None


class FinishRequest(msgspec.Struct, kw_only=True):
    epoch: int | None = None
    """The caller's own; a trainer whose run was taken over is refused. None: whoever holds the run."""


class EnvironmentRequest(msgspec.Struct, kw_only=True):
    """Register by a stable name: a restart gets the same id."""

    name: Name
    group_size: Positive
    max_token_length: int
    weight: float = 1.0
    min_batch_allocation: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None
    max_batches_offpolicy: Positive = 3


class Pacing(msgspec.Struct, kw_only=True):
    """How much an environment should have under way."""

    state: Literal["wait", "run", "finished"]
    revision: int
    """Changes with state, step, policy, and whenever room appears or ends."""
    current_step: int
    num_steps: int
    batch_size: int
    """In sequences; in a run that counts groups, as many as it takes of this environment's."""
    outstanding_sequences: int
    """Queued, or in formed batches that are not yet trained."""
    room_sequences: int
    """How many sequences this environment may have in flight now; 0 means pause."""
    policy_version: int | None
    policy_step: int | None
    policy_held_seconds: float = 0.0
    """How long evaluations ask that no other policy be published; 0: they do not."""
    paused_because: str | None = None
    """The reason where there is no room until something else changes, such as another environment's group size."""
    policy_name: str | None = None
    """The model to ask for to get this policy, where a plain server has each version under a name of its own."""


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
    """The groups an environment dropped so far instead of submitting them: totals, so that a report may be repeated."""

    session: Name
    """Of the process that counts, made up by it; another process counts from 0."""
    groups: Annotated[
        dict[Annotated[str, msgspec.Meta(min_length=1, max_length=60)], NotNegative], msgspec.Meta(max_length=32)
    ]
    """By reason."""
    explanation: Annotated[str, msgspec.Meta(max_length=2000)] = ""
    """A sentence for whoever watches: how many, why, an example, and what to change."""


class Submission(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/groups`."""

    environment_id: int
    groups: list[Group]


class SubmitAnswer(msgspec.Struct, kw_only=True):
    accepted: int
    buffered: int
    """Of those accepted: groups that no batch can use until others arrive."""
    duplicates: int
    """Groups that had been taken before under the same idempotency key."""
    pacing: Pacing | None


class Problem(msgspec.Struct, kw_only=True):
    """RFC 9457 problem details; other members name the offending field and value."""

    type: str
    title: str
    status: int
    detail: str


def decode_problem(body: bytes) -> dict[str, Any]:
    """A problem body as a mapping; a body that is none becomes the detail of one."""
    try:
        problem = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError:
        return {"type": "about:blank", "detail": body[:500].decode("utf-8", "replace")}
    return problem
