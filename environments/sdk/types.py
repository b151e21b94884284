"""The data that environments return, by Atropos' names."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from atropos_api.wire.groups import Span

Item = Any
"""What `get_next_item` returns: whatever the environment understands."""

number = int | float
UUID = str


class Message(TypedDict):
    """One turn of a chat; `content` is text or a list of OpenAI content parts."""

    role: str
    content: Any
    reward: NotRequired[float | None]


class ScoredDataItem(TypedDict, total=False):
    """One scored rollout, as `collect_trajectory` returns it."""

    tokens: list[int]
    masks: list[int]
    scores: float
    inference_logprobs: list[float] | None
    policy_versions: list[Span] | None
    advantages: list[float] | None
    ref_logprobs: list[float] | None
    messages: list[Message] | None
    group_overrides: dict[str, Any] | None
    overrides: dict[str, Any] | None
    images: Any
    generation_params: dict[str, Any] | None
    distill_token_ids: list[list[int]] | None
    distill_logprobs: list[list[float]] | None


class ScoredDataGroup(TypedDict, total=False):
    """The rollouts of one item: lists over them, and two mappings that hold for the whole group."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    inference_logprobs: list[list[float]] | None
    policy_versions: list[list[Span]] | None
    advantages: list[list[float]] | None
    ref_logprobs: list[list[float]] | None
    messages: list[list[Message]] | None
    generation_params: dict[str, Any] | None
    group_overrides: dict[str, Any] | None
    overrides: list[dict[str, Any] | None] | None
    images: Any
    distill_token_ids: list[list[list[int]]] | None
    distill_logprobs: list[list[list[float]]] | None


PER_SEQUENCE_KEYS = (
    "inference_logprobs",
    "policy_versions",
    "advantages",
    "ref_logprobs",
    "messages",
    "overrides",
    "images",
    "distill_token_ids",
    "distill_logprobs",
)
"""The optional keys that a group holds once a rollout."""
