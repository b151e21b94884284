"""The documents that the page reads about runs and rollouts; a broker and `atropos view RUN` answer with them.

Numbers that a document has no value for are null. Ids, roles and texts come from models and environments: the page
shows them as text.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

RunState = Literal["open", "closed", "finished"]


class RunSummary(msgspec.Struct, kw_only=True):
    """One run in the list of runs."""

    run_id: str
    name: str
    state: RunState
    began_at: float
    current_step: int
    num_steps: int
    """Steps that the run is to have; 0: no end was set."""
    batch_size: int
    unit: Literal["sequences", "groups"]
    has_metrics: bool
    """True if steps of this run were reported."""
    policy_version: int | None = None


class RunList(msgspec.Struct, kw_only=True):
    """All runs that are known, the newest first."""

    runs: list[RunSummary]


class MetricList(msgspec.Struct, kw_only=True):
    """The metrics of a run: their names, each with its newest value."""

    run_id: str
    first_step: int | None
    last_step: int | None
    steps: int
    latest: dict[str, float]


class SeriesLine(msgspec.Struct, kw_only=True):
    steps: list[int]
    values: list[float]


class Series(msgspec.Struct, kw_only=True):
    """Metrics over steps, reduced so that the smallest and largest value of each span of steps are kept."""

    run_id: str
    last_step: int | None
    """The newest step of the run, whether or not it was asked for."""
    series: dict[str, SeriesLine]
    """Names that no step has are left out."""


class GroupSummary(msgspec.Struct, kw_only=True):
    """One group in a list of groups."""

    batch: int
    """Number of its batch; 0 while it is queued."""
    group: int
    """Its index in the batch or, while it is queued, its place in the order of arrival."""
    environment_id: int | None
    environment: str
    rewards: list[float]
    tokens: int
    """Tokens of all its sequences together."""
    oldest_version: int | None
    arrived_at: float
    equal_rewards: bool
    """True if all rewards are equal, so that nothing is learned from it."""
    has_values: bool
    """True if the trainer reported its own values of these tokens."""
    remarks: dict[str, int] = {}
    """Numbers of its sequences with each remark in their overrides, such as `absent`, `length` or an error."""


class GroupList(msgspec.Struct, kw_only=True):
    """Groups that can be shown and fit the request, and how many there are without the limit."""

    run_id: str
    total: int
    groups: list[GroupSummary]


class SampleSummary(msgspec.Struct, kw_only=True):
    """One sequence of a group."""

    reward: float
    tokens: int
    sampled_tokens: int
    """Tokens that the model sampled, by the mask."""
    oldest_version: int | None
    newest_version: int | None
    finish: str | None = None
    """A remark of the environment about this sequence, from its overrides."""


class GroupDocument(msgspec.Struct, kw_only=True):
    """One group: its sequences, its messages, and all that came with it."""

    run_id: str
    summary: GroupSummary
    samples: list[SampleSummary]
    messages: list[list[dict[str, Any]]] | None
    """The chat of each sequence, if the environment sent them."""
    more: dict[str, Any]
    """Its other fields, such as `generation_params` and `group_overrides`."""
    replay: str | None = None
    """The command that trains its batch again, if the batch was saved."""


class SampleWindow(msgspec.Struct, kw_only=True):
    """Some tokens of one sequence, with what is known of each; a column that is not known is null."""

    start: int
    total: int
    """Tokens of the whole sequence."""
    tokens: list[int]
    texts: dict[str, str]
    """The text of these tokens by id, as far as it is known."""
    sampled: list[bool]
    """False where the mask says that nothing is trained: prompts, answers of tools."""
    sampler_logprobs: list[float | None] | None
    logprobs: list[float | None] | None
    """Logprobs under the policy in training, as its trainer reported them."""
    entropies: list[float | None] | None
    advantages: list[float | None] | None
    versions: list[int | None]
