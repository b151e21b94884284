"""Scored groups and batches of them: the payload that travels from environments to trainers."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

Span = tuple[int, int, int | None]
"""Token positions [start, end) in the full sequence and the policy version they were sampled under (None: unknown)."""

Form = Literal["json", "columns"]
"""The form of a group: JSON text, or the binary columns of `wire.columns`."""

DEFAULT_POLICY: Final = "default"
"""The policy of runs and servers that name none."""

WIRE_KEYS: Final = (
    "tokens",
    "masks",
    "scores",
    "advantages",
    "ref_logprobs",
    "messages",
    "generation_params",
    "inference_logprobs",
    "overrides",
    "group_overrides",
    "images",
    "env_id",
    "distill_token_ids",
    "distill_logprobs",
)
"""The keys of a batch item as every Atropos trainer expects them: all present, null when not sent."""

OPTIONAL_PER_SEQUENCE: Final = (
    "inference_logprobs",
    "policy_versions",
    "advantages",
    "ref_logprobs",
    "messages",
    "overrides",
    "images",
    "distill_token_ids",
    "distill_logprobs",
    "sampling_masks",
)
"""The optional keys that have one entry per rollout, as `tokens`, `masks` and `scores` have."""

MOST_MASK_TOKENS: Final = 255
"""Most tokens of a sampling mask. A wider one would take too much of the trainer's memory."""
MOST_TEACHER_TOKENS: Final = 1024
"""Most tokens that a teacher names at a position. A trainer pads all positions of a batch to the widest one: a single
position with 150,000 tokens, 1 MB of a request, would take gigabytes in the trainer, again after each resume."""

ABSENT: Final = "absent"
"""Key of `overrides`, true for the row in place of a rollout that had not ended when its group was closed: it is not
trained and not counted."""


class Group(msgspec.Struct, kw_only=True):
    """Several rollouts of one prompt: the payload. Keys that are not listed here stay in the broker's storage.

    If a client asked for arrays, rows of numbers are numpy arrays instead of lists.
    """

    tokens: list[list[int]]
    """One full sequence (prompt and completion) per rollout."""
    masks: list[list[int]]
    """Shaped as `tokens`: -100 where nothing is trained, else the token."""
    scores: list[float]
    """One score per rollout."""
    advantages: list[list[float]] | None = None
    """Token-level override of the trainer's advantages; an empty list means none."""
    ref_logprobs: list[list[float]] | None = None
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: list[list[float]] | None = None
    """Shaped as `tokens`: logprob under the sampling policy, 1.0 where nothing was sampled."""
    overrides: list[dict[str, Any] | None] | None = None
    """One entry per rollout; a null is delivered as an empty object, because some trainers can read nothing else."""
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    env_id: int | None = None
    """The environment that sent the group; the broker fills it in."""
    distill_token_ids: list[list[list[int]]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None
    policy_versions: list[list[Span]] | None = None
    """Per sequence: spans that cover its sampled tokens."""
    sampling_masks: list[list[list[int]]] | None = None
    """Shaped as `tokens`: at each sampled token the at most 255 that the draw could choose from; empty: not known."""
    policy: str | None = None
    """Name of the policy that sampled it; None: the one that its run trains."""
    received_version: int | None = None
    """The newest policy version when the broker took the group: it bounds the age if `policy_versions` is missing."""


class Batch(msgspec.Struct, kw_only=True):
    """A batch: the groups that a trainer (or one rank of it) gets for one step."""

    number: int
    run_id: str
    policy: str = DEFAULT_POLICY
    """Name of the policy that its run trains."""
    groups: list[Group]


def as_plain(value: Any) -> Any:
    """Return a number or an array of numpy or torch as Python's own, for JSON: an encoder's `enc_hook`."""
    to_list = getattr(value, "tolist", None)
    if not callable(to_list):
        raise TypeError(f"an object of type {type(value).__name__} cannot be written as JSON; give text or numbers")
    return to_list()
