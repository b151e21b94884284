"""The reports that trainers and environments make about themselves, for those who watch a run.

No report is needed for training: a client that sends none works as before, and the page shows what is known without
it. All are small and bounded, and each may be sent again. Times are durations up to the moment of sending, so that the
clocks of two machines need not agree.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from atropos_api.wire.messages import Whole

MOST_STEPS_A_REPORT = 200
MOST_METRICS_A_STEP = 512
MOST_SAMPLES_A_GROUP = 1024

Seconds = Annotated[float, msgspec.Meta(ge=0.0)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Step = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
ShortText = Annotated[str, msgspec.Meta(max_length=200)]
MetricName = Annotated[str, msgspec.Meta(min_length=1, max_length=120)]


class StepMetrics(msgspec.Struct, kw_only=True):
    """The metrics of one trainer step, by the names of docs/reference/metrics.md or any others."""

    step: Step
    time: float
    """Unix time at which the step ended."""
    values: Annotated[dict[MetricName, float], msgspec.Meta(max_length=MOST_METRICS_A_STEP)]


class HealthSign(msgspec.Struct, kw_only=True):
    """A sign of trouble that appeared at a step."""

    sign: ShortText
    step: Step
    value: float
    message: Annotated[str, msgspec.Meta(max_length=1000)]
    advice: Annotated[str, msgspec.Meta(max_length=1000)] = ""


class TrainerActivity(msgspec.Struct, kw_only=True):
    """The state of a trainer's process at the time of the report."""

    step: Step
    """The step in progress."""
    phases: Annotated[dict[ShortText, Seconds], msgspec.Meta(max_length=16)]
    """Each part of the step that is in progress, such as `train` or `publish`, with its time so far."""
    host: ShortText = ""
    pid: Count = 0
    world_size: Annotated[int, msgspec.Meta(ge=1, le=2**20)] = 1


class RunReport(msgspec.Struct, kw_only=True):
    """A trainer's report: new steps, signs of trouble, and the state of its process."""

    epoch: Whole | None = None
    """The caller's epoch; the report of a trainer whose run was taken over is refused. None: any."""
    steps: Annotated[list[StepMetrics], msgspec.Meta(max_length=MOST_STEPS_A_REPORT)] = []
    """Steps, each in place of an earlier report of the same step."""
    signs: Annotated[list[HealthSign], msgspec.Meta(max_length=100)] = []
    activity: TrainerActivity | None = None


class SampleValues(msgspec.Struct, kw_only=True):
    """The trainer's values of one sequence: one entry for each of the positions it trained on."""

    positions: list[Count]
    """Positions in the full sequence, in order."""
    advantages: list[float]
    logprobs: list[float | None]
    """Logprobs under the policy in training, before the step."""
    entropies: list[float | None] = []


class GroupValues(msgspec.Struct, kw_only=True):
    """The trainer's values of one group; a sequence that was not trained has None."""

    group: Count
    """Index of the group in the caller's batch, which is its rank's slice."""
    samples: Annotated[list[SampleValues | None], msgspec.Meta(max_length=MOST_SAMPLES_A_GROUP)]


class TokenReport(msgspec.Struct, kw_only=True):
    """The trainer's values of some groups of one batch, token by token, for people to look at."""

    epoch: Whole | None = None
    rank: Count = 0
    world_size: Annotated[int, msgspec.Meta(ge=1, le=2**20)] = 1
    groups: list[GroupValues]
    texts: dict[str, str] = {}
    """The text of each token id that occurs in these groups."""


class WaitingMember(msgspec.Struct, kw_only=True):
    """A rollout of a group that is not finished, in environments that collect the members one by one."""

    member: Count
    """Its index in the group."""
    last_event: ShortText = ""
    """The last thing that it did."""
    seconds: Seconds = 0.0
    """Time since then, or since it began."""


class OpenRollout(msgspec.Struct, kw_only=True):
    """A group that an environment is collecting."""

    name: ShortText
    """The item, in a few words."""
    seconds: Seconds
    """Time since its collection began."""
    done: Count
    """Members that are finished."""
    wanted: Count
    """Members of the group."""
    last_event: ShortText = ""
    """The last thing that a member of it did."""
    last_event_seconds: Seconds = 0.0
    waiting: Annotated[list[WaitingMember], msgspec.Meta(max_length=8)] = []
    """Members that are not finished, the one that has done nothing for longest first."""


class ServerUse(msgspec.Struct, kw_only=True):
    """An inference server as one environment sees it."""

    url: ShortText
    open_requests: Count
    requests: Count
    """Requests answered since the environment's process began."""
    available: bool = True
    """False while the server is known not to answer."""
    policy_version: Whole | None = None


class EnvironmentActivity(msgspec.Struct, kw_only=True):
    """The state of an environment's process at the time of the report."""

    open_rollouts: Count
    """Groups that are being collected."""
    open_requests: Count
    """Requests to inference servers in progress, those of evaluations included."""
    idle_seconds: Seconds = 0.0
    """Time for which no request has been in progress; 0 while one is."""
    finished_rollouts: Count = 0
    """Groups collected since the process began."""
    usual_seconds: Seconds | None = None
    """The 95th percentile of the time that a group took lately; None while too few are finished."""
    slowest: Annotated[list[OpenRollout], msgspec.Meta(max_length=8)] = []
    """The groups that have been collected for longest, the oldest first."""
    servers: Annotated[list[ServerUse], msgspec.Meta(max_length=64)] = []
    evaluating: bool = False
