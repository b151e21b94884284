"""Group types: the data that environments return, under the original Atropos' names, and its form for the broker.

`scored_group` and `scored_item` build it from a session's sequences, `GroupRules` says which groups may be sent, and
`to_wire` adds the parts that the environment left out. The rule for late members of a group is in `members`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from numbers import Real
from typing import Any, NotRequired, TypedDict, cast

from atropos_api.wire.groups import ABSENT, OPTIONAL_PER_SEQUENCE, Group, Span
from environments.sdk.config import BaseEnvConfig
from environments.sdk.reporting import EQUAL_SCORES, GROUP_SIZE, NOT_FINITE, TOO_LONG, Rejection
from environments.sdk.session.tokens_and_masks import ESTIMATED, NO_LOGPROB, NOT_TRAINED, SampleLog, SequenceNode

Item = Any
"""The type of what `get_next_item` returns: anything that the environment understands."""

number = int | float

UUID = str


class Message(TypedDict):
    """One turn of a chat: `content` is text or a list of OpenAI content parts."""

    role: str
    content: Any
    reward: NotRequired[float | None]


class ScoredDataItem(TypedDict, total=False):
    """One scored rollout: `collect_trajectory` returns it."""

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
    sampling_masks: list[list[int]] | None


class ScoredDataGroup(TypedDict, total=False):
    """The scored rollouts of one item: most keys hold a list with one entry per rollout."""

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
    sampling_masks: list[list[list[int]]] | None


ABSENT_ROWS: Mapping[str, Any] = {
    "inference_logprobs": [NO_LOGPROB],
    "policy_versions": [],
    "advantages": [0.0],
    "ref_logprobs": [0.0],
    "messages": [],
    "distill_token_ids": [[]],
    "distill_logprobs": [[]],
    "sampling_masks": [[]],
    "images": None,
}
"""The entries of an absent member, whose row is one token."""


def _all_members(size: int) -> int:
    return size


def _own_size(group: Group) -> int | None:
    size: int | None = (group.group_overrides or {}).get("group_size")
    return size


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRules:
    """Rules for sending: they say which groups may be sent. `max_token_length` of 0 or less allows any length."""

    group_size: int
    max_token_length: int
    ensure_scores_are_not_same: bool
    scheduled_sizes: frozenset[int] = frozenset()
    """All values of `group_size` in the schedule: a group may have been started under an earlier one than the current.
    """
    least_members_of: Callable[[int], int] = _all_members
    """Returns the number of rollouts that a group of a size needs; the others may be absent."""

    @classmethod
    def from_config(cls, config: BaseEnvConfig, first_size: int | None = None, *, max_token_length: int) -> GroupRules:
        """Return the rules of a configuration, whose group size was `first_size` before a schedule replaced it."""
        return cls(
            group_size=config.group_size,
            max_token_length=max_token_length,
            ensure_scores_are_not_same=config.ensure_scores_are_not_same,
            scheduled_sizes=config.scheduled_sizes(first_size or config.group_size),
            least_members_of=config.least_members_of if config.late_members == "close" else _all_members,
        )

    def rejection(self, group: Group) -> Rejection | None:
        """Return the reason why a group is not sent, or None when it may be sent."""
        if self.full_size(group) is None:
            expected = _own_size(group) or self.group_size
            return Rejection(GROUP_SIZE, f"{len(group.tokens)} rollouts where {expected} were expected")
        strange = next((score for score in group.scores if not math.isfinite(score)), None)
        if strange is not None:
            return Rejection(NOT_FINITE, f"a score is {strange}")
        if self.ensure_scores_are_not_same and len(set(group.scores)) == 1:
            return Rejection(EQUAL_SCORES, f"every score is {group.scores[0]:g}")
        longest = max(map(len, group.tokens))
        if 0 < self.max_token_length <= longest:
            return Rejection(
                TOO_LONG, f"a rollout has {longest} tokens where the trainer takes fewer than {self.max_token_length}"
            )
        return None

    def full_size(self, group: Group) -> int | None:
        """Return the size of a group with its absent members; None if it has too few rollouts, or too many."""
        own, count = _own_size(group), len(group.tokens)
        sizes = self.scheduled_sizes | {self.group_size} if own is None else {own}
        fitting = [size for size in sizes if (size if own else self.least_members_of(size)) <= count <= size]
        return min(fitting, default=None)


def fill_absent(group: Group, size: int) -> int:
    """Add rows for absent members until the group has `size` rows, and return their number.

    Such a row is one masked token with the override `absent`: our trainer leaves it out before anything is computed.
    Its score is the mean of the others, so that a trainer that does not know the override has the same baseline.
    """
    present = len(group.tokens)
    missing = size - present
    if missing <= 0:
        return 0
    mean = sum(group.scores) / present
    group.overrides = [*(group.overrides or [None] * present), *({ABSENT: True} for _ in range(missing))]
    group.tokens = [*group.tokens, *([group.tokens[0][0]] for _ in range(missing))]
    group.masks = [*group.masks, *([NOT_TRAINED] for _ in range(missing))]
    group.scores = [*group.scores, *(mean for _ in range(missing))]
    for key, row in ABSENT_ROWS.items():
        values = getattr(group, key)
        if isinstance(values, list):
            setattr(group, key, [*values, *(row for _ in range(missing))])
    return missing


def sampled_lengths(group: Group) -> list[int]:
    """Return the number of sampled tokens of each rollout, without the rows that stand for absent ones."""
    overrides = group.overrides or [None] * len(group.masks)
    present = [mask for mask, one in zip(group.masks, overrides, strict=True) if not (one or {}).get(ABSENT)]
    return [len(mask) - mask.count(NOT_TRAINED) for mask in present]


def scored_group(
    nodes: Sequence[SequenceNode], scores: Sequence[float], *, messages: list[list[Message]] | None = None
) -> ScoredDataGroup:
    """Build a group from a session's sequences and their scores, with logprobs, policy versions and sampling
    parameters.
    """
    params = nodes[0].metadata["generation_params"] if nodes else None
    return ScoredDataGroup(
        tokens=[node.tokens for node in nodes],
        masks=[node.masked_tokens for node in nodes],
        scores=[float(score) for score in scores],
        inference_logprobs=None if any(map(_is_estimated, nodes)) else [node.logprobs for node in nodes],
        policy_versions=[node.policy_versions for node in nodes],
        sampling_masks=_sampling_masks(nodes),
        generation_params=params,
        messages=messages,
    )


def _sampling_masks(nodes: Sequence[SequenceNode]) -> list[list[list[int]]] | None:
    """Return the sampling masks of all sequences; None if no sequence has any."""
    if all(node.sampling_masks is None for node in nodes):
        return None
    return [node.sampling_masks or [[] for _ in node.tokens] for node in nodes]


def scored_item(node: SequenceNode, score: float, *, messages: list[Message] | None = None) -> ScoredDataItem:
    """Build one rollout from a session's sequence and its score."""
    return ScoredDataItem(
        tokens=node.tokens,
        masks=node.masked_tokens,
        scores=float(score),
        inference_logprobs=None if _is_estimated(node) else node.logprobs,
        policy_versions=node.policy_versions,
        sampling_masks=node.sampling_masks,
        generation_params=node.metadata["generation_params"],
        messages=messages,
    )


def _is_estimated(node: SequenceNode) -> bool:
    """Return True for a sequence whose tokens were encoded from the server's text: it has no logprobs."""
    return bool((node.metadata.get("generation_params") or {}).get(ESTIMATED))


def group_items(items: Sequence[ScoredDataItem]) -> ScoredDataGroup:
    """Combine rollouts that were collected one by one into a group."""
    group: dict[str, Any] = {key: [item[key] for item in items] for key in ("tokens", "masks", "scores")}
    for key in OPTIONAL_PER_SEQUENCE:
        values = [item.get(key) for item in items]
        known = [value is not None for value in values]
        if all(known) if key == "inference_logprobs" else any(known):
            group[key] = values
    for key in ("group_overrides", "generation_params"):
        merged: dict[str, Any] = {}
        for item in items:
            found = item.get(key)
            merged.update(found if isinstance(found, dict) else {})
        if merged:
            group[key] = merged
    return cast("ScoredDataGroup", group)


def to_wire(raw: Mapping[str, Any], sample_log: SampleLog) -> Group:
    """Convert a group to the wire type; what the environment left out is taken from the sequences it sampled."""
    raw = _plain_fields(raw)
    tokens = raw["tokens"]
    fields = {key: _per_sequence(raw, key, len(tokens)) for key in OPTIONAL_PER_SEQUENCE}
    if fields["advantages"] is not None:
        fields["advantages"] = [_per_token(*pair) for pair in zip(fields["advantages"], tokens, strict=True)]
    if fields["sampling_masks"] is not None:  # those of some members may be missing
        masks = zip(fields["sampling_masks"], tokens, strict=True)
        fields["sampling_masks"] = [row or [[] for _ in own] for row, own in masks]
    group = Group(
        tokens=tokens,
        masks=raw["masks"],
        scores=[_as_score(index, score) for index, score in enumerate(raw["scores"])],
        generation_params=raw.get("generation_params"),
        group_overrides=raw.get("group_overrides") or None,
        **fields,
    )
    _require_aligned(group)
    if None in (group.inference_logprobs, group.policy_versions, group.generation_params, group.sampling_masks):
        _complete(group, sample_log)
    _mark_sampling(group, sample_log)
    return group


PER_TOKEN = (
    *("tokens", "masks", "inference_logprobs", "advantages", "ref_logprobs"),
    *("distill_token_ids", "distill_logprobs"),
)


UNORDERED = (Mapping, AbstractSet, str, bytes)
"""Types that can be iterated and are no list of a group's rollouts."""


def _plain_fields(raw: Any) -> Mapping[str, Any]:
    """Return the fields of a group with arrays and tensors as lists; raise an error if `raw` is no group."""
    if not isinstance(raw, Mapping):
        raise TypeError(f"a group is a dictionary with tokens, masks and scores, not {raw!r:.80}")
    if missing := [key for key in ("tokens", "masks", "scores") if raw.get(key) is None]:
        raise ValueError(f"a group needs tokens, masks and scores, and this one has no {' and no '.join(missing)}")
    for key in ("tokens", "masks", "scores"):
        if isinstance(raw[key], UNORDERED):  # the scores would be the mapping's keys, or in the set's order
            raise TypeError(f"{key} is a {type(raw[key]).__name__}, {raw[key]!r:.80}; give a list, an entry a rollout")
    return {**raw, **{key: _as_lists(raw[key]) for key in PER_TOKEN if raw.get(key) is not None}}


def _as_lists(rows: Any) -> Any:
    """Return rows that may be an array, or hold arrays, as lists."""
    if hasattr(rows, "tolist"):
        return rows.tolist()
    return [row.tolist() if hasattr(row, "tolist") else row for row in rows] if isinstance(rows, list | tuple) else rows


def _as_score(index: int, score: Any) -> float:
    try:
        return float(score)
    except (TypeError, ValueError):
        raise ValueError(f"scores[{index}] is {score!r:.80}, which is not a number") from None


def _per_sequence(raw: Mapping[str, Any], key: str, count: int) -> Any:
    """Return the value of an optional key; an empty list counts as not given."""
    value = raw.get(key)
    if isinstance(value, tuple):
        value = list(value)
    if value is None or (isinstance(value, list) and not value):
        return None
    if isinstance(value, list) and len(value) != count:
        raise ValueError(f"group has {count} rollouts but {len(value)} entries of {key}")
    return value


def _per_token(advantage: Any, tokens: Sequence[int]) -> Any:
    """Return a rollout's advantages, one per token; a single number is repeated for all tokens."""
    return [float(advantage)] * len(tokens) if isinstance(advantage, Real) else advantage


def _require_aligned(group: Group) -> None:
    counts = len(group.tokens), len(group.masks), len(group.scores)
    if len(set(counts)) != 1:
        raise ValueError(f"group has {counts[0]} token lists, {counts[1]} masks and {counts[2]} scores")
    for key in ("masks", "inference_logprobs"):
        for index, (values, tokens) in enumerate(zip(getattr(group, key) or [], group.tokens, strict=False)):
            if len(values) != len(tokens):
                raise ValueError(f"rollout {index} has {len(tokens)} tokens but {len(values)} entries of {key}")
    named = [("group_overrides", group.group_overrides), ("generation_params", group.generation_params)]
    named += [(f"overrides[{index}]", row) for index, row in enumerate(group.overrides or [])]
    for name, value in named:
        if value is not None and not isinstance(value, Mapping):
            raise TypeError(f"{name} is {value!r:.80}; give a dictionary of names and values, or None")


def _complete(group: Group, sample_log: SampleLog) -> None:
    """Add logprobs, policy versions and sampling parameters from the sample log, if it holds every rollout."""
    nodes = [sample_log.find(tokens) for tokens in group.tokens]
    found = [node for node in nodes if node is not None]
    if len(found) != len(nodes) or not found:
        return
    if group.inference_logprobs is None and not any(map(_is_estimated, found)):
        group.inference_logprobs = [node.logprobs for node in found]
    if group.policy_versions is None:
        group.policy_versions = [node.policy_versions for node in found]
    if group.sampling_masks is None:
        group.sampling_masks = _sampling_masks(found)
    if group.generation_params is None:
        group.generation_params = found[0].metadata["generation_params"]


def _mark_sampling(group: Group, sample_log: SampleLog) -> None:
    """Mark the rollouts whose sampling parameters differ from the group's, which are those of its first rollout.

    The trainer reads a temperature per rollout, and truncated sampling per group.
    """
    stated = group.generation_params or {}
    if all(node.metadata["generation_params"] == stated for node in sample_log.nodes):
        return
    nodes = [sample_log.find(tokens) for tokens in group.tokens]
    own = [{} if node is None else node.metadata["generation_params"] for node in nodes]
    if any(params.get("truncated_sampling") for params in own) and not stated.get("truncated_sampling"):
        group.generation_params = {**stated, "truncated_sampling": True}
    shared = stated.get("temperature")
    differing = [params.get("temperature", shared) != shared for params in own]
    if any(differing):
        rows = group.overrides or [None] * len(own)
        group.overrides = [
            {"temperature": params["temperature"], **(row or {})} if differs else row
            for row, params, differs in zip(rows, own, differing, strict=True)
        ]


def as_groups(scored_data: Any) -> list[Mapping[str, Any] | None]:
    """Return one group or several as a list; None marks one that the environment dropped."""
    is_several = isinstance(scored_data, Iterable) and not isinstance(scored_data, Mapping | str)
    return list(scored_data) if is_several else [scored_data]


def as_items(more: Any) -> list[Item]:
    """Return the items to try next as a list; raise an error for what is no list of items.

    A text or a mapping is one item: its letters or its keys would be tried.
    """
    if isinstance(more, str | bytes | Mapping):
        raise TypeError(f"items to try next are a list, not {more!r:.80}; return [] or [item] beside the group")
    return list(more)
