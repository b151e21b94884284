"""The sequences of a group: each is read, checked, and reduced to arrays over its trained tokens.

All fields are aligned with the tokens as `inference_logprobs` are: the entry at a position is about the token there.
`inference_logprobs` holds a placeholder of 1.0 wherever nothing was sampled; at a trained token it is an error.
Advantages, reference logprobs and a teacher's logprobs are optional: a group may have none for a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from atropos_api.wire import Batch, Group
from atropos_api.wire.groups import ABSENT, OPTIONAL_PER_SEQUENCE
from example_trainer.errors import BadBatch, MissingLogprobs

FloatArray = NDArray[np.float32]

IntArray = NDArray[np.int64]

SamplingMasks = tuple[IntArray, IntArray]
"""Ids that the draws could choose from, `[M]`, token after token, and their number at each token, 0: not known."""

Teacher = tuple[IntArray, FloatArray]
"""Token ids `[n, K]` and their logprobs, padded with -inf if there are fewer than K."""

MASKED = -100
PLACEHOLDER_LOGPROB = 1.0
UNKNOWN_VERSION = -1
DEFAULT_TEMPERATURE = 1.0


@dataclass(slots=True, eq=False)
class Candidate:
    """A sequence that may be trained, before its advantage is final: its arrays hold one entry per trained token."""

    tokens: IntArray
    targets: IntArray
    rollout_logprobs: FloatArray
    temperature: float
    advantages: FloatArray | None
    """Per trained token, when the environment supplies them."""
    reference_logprobs: FloatArray | None
    teacher: Teacher | None
    truncated_sampling: bool
    sampling_masks: SamplingMasks | None
    versions: IntArray
    version_bounds: IntArray
    group: int
    sample: int
    """Index of the sequence in its group."""
    advantage: float = 0.0

    def cut(self, length: int) -> None:
        """Drop everything beyond the first `length` tokens."""
        inside = slice(int(np.searchsorted(self.targets, length)))
        self.tokens, self.targets = self.tokens[:length], self.targets[inside]
        self.rollout_logprobs = self.rollout_logprobs[inside]
        self.versions, self.version_bounds = self.versions[inside], self.version_bounds[inside]
        if self.advantages is not None:
            self.advantages = self.advantages[inside]
        if self.reference_logprobs is not None:
            self.reference_logprobs = self.reference_logprobs[inside]
        if self.teacher is not None:
            self.teacher = (self.teacher[0][inside], self.teacher[1][inside])
        if self.sampling_masks is not None:
            ids, counts = self.sampling_masks
            self.sampling_masks = ids[: counts[inside].sum()], counts[inside]


def read_sequence(
    group: Group, number: int, index: int, reads_teacher: bool, vocabulary: int | None = None
) -> Candidate:
    """Return sequence `index` of the batch's group `number`; every id must be below `vocabulary`."""
    tokens = np.asarray(group.tokens[index], dtype=np.int64)
    mask = np.asarray(group.masks[index], dtype=np.int64)
    if len(mask) != len(tokens):
        raise BadBatch(f"{where(group, index)}: {len(tokens)} tokens but {len(mask)} mask entries")
    positions = np.flatnonzero(mask != MASKED)
    targets = positions[positions > 0]  # nothing precedes the first token, so nothing predicts it
    wrong = targets[mask[targets] != tokens[targets]]
    if len(wrong):
        raise BadBatch(
            f"{where(group, index)}: mask at position {wrong[0]} is {mask[wrong[0]]}, neither -100 nor the token "
            f"{tokens[wrong[0]]}"
        )
    teacher = _supplied_teacher(group, index, targets, len(tokens)) if reads_teacher else None
    masks = _sampling_masks(group, index, tokens, targets)
    _require_known(
        group,
        index,
        vocabulary,
        tokens=[tokens],
        distill_token_ids=teacher[:1] if teacher else (),
        sampling_masks=masks[:1] if masks else (),
    )
    versions = _versions(group, index, len(tokens))[targets]
    bound = UNKNOWN_VERSION if group.received_version is None else group.received_version
    return Candidate(
        tokens=tokens,
        targets=targets,
        rollout_logprobs=_rollout_logprobs(group, index, targets, len(tokens)),
        temperature=find_temperature(group, index),
        advantages=_supplied_advantages(group, index, targets, len(tokens)),
        reference_logprobs=_supplied_reference(group, index, targets, len(tokens)),
        teacher=teacher,
        truncated_sampling=bool((group.generation_params or {}).get("truncated_sampling")),
        sampling_masks=masks,
        versions=versions,
        version_bounds=np.where(versions == UNKNOWN_VERSION, bound, versions),
        group=number,
        sample=index,
    )


def _require_known(group: Group, index: int, vocabulary: int | None, **ids: Sequence[IntArray]) -> None:
    """Raise `BadBatch` for an id that the policy's embedding does not have: on a GPU it would end the process."""
    for key, arrays in ids.items():
        largest = max((int(array.max()) for array in arrays if array.size), default=0)
        if vocabulary is not None and largest >= vocabulary:
            raise BadBatch(
                f"{where(group, index)}: {key} has the id {largest}, and the policy has {vocabulary} tokens; sample "
                "from a server of the same model, with its tokenizer"
            )


def _rollout_logprobs(group: Group, index: int, targets: IntArray, length: int) -> FloatArray:
    if not len(targets):
        return np.zeros(0, dtype=np.float32)
    if not group.inference_logprobs:
        raise MissingLogprobs(_missing(group, index, "the group has none"))
    values = np.asarray(group.inference_logprobs[index], dtype=np.float32)
    if len(values) != length:
        raise MissingLogprobs(_missing(group, index, f"{len(values)} logprobs for {length} tokens"))
    chosen = values[targets]
    bad = np.flatnonzero((chosen == PLACEHOLDER_LOGPROB) | ~np.isfinite(chosen))
    if len(bad):
        cause = f"{chosen[bad[0]]:g} at trained position {targets[bad[0]]}"
        raise MissingLogprobs(_missing(group, index, cause))
    return chosen


def _missing(group: Group, index: int, cause: str) -> str:
    return (
        f"GRPO requires inference_logprobs for importance sampling: {where(group, index)}: {cause}; "
        "let the environment sample through a server that returns logprobs (--openai.server_type vllm)"
    )


def _versions(group: Group, index: int, length: int) -> IntArray:
    versions = np.full(length, UNKNOWN_VERSION, dtype=np.int64)
    if group.policy_versions and index < len(group.policy_versions):
        for start, end, version in group.policy_versions[index]:
            versions[start:end] = UNKNOWN_VERSION if version is None else version
    return versions


def find_temperature(group: Group, index: int) -> float:
    """Return one sequence's sampling temperature, from its override, generation_params, group_overrides, or else 1."""
    for source in (override_of(group, index), group.generation_params, group.group_overrides):
        if isinstance(source, Mapping) and source.get("temperature") is not None:
            return _checked_temperature(source["temperature"], where(group, index))
    return DEFAULT_TEMPERATURE


def _checked_temperature(value: object, place: str) -> float:
    try:
        temperature = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        temperature = math.nan
    if math.isfinite(temperature) and temperature > 0.0:
        return temperature
    raise BadBatch(
        f"{place}: temperature {value} gives no distribution to learn from; sample rollouts for training at a "
        "temperature above 0"
    )


def _supplied_advantages(group: Group, index: int, targets: IntArray, length: int) -> FloatArray | None:
    """Return the advantages sent by the environment: one per token, or a single one for the sequence."""
    values = _row(group.advantages, index)
    if values is None:
        return None
    if len(values) == 1:
        return np.full(len(targets), values[0], dtype=np.float32)
    return _at_targets(values, targets, length, f"{where(group, index)}: advantages", "send one, or one a token")


def _supplied_reference(group: Group, index: int, targets: IntArray, length: int) -> FloatArray | None:
    """Return the reference policy's logprobs sent by the environment; they take precedence over the trainer's own."""
    values = _row(group.ref_logprobs, index)
    if values is None:
        return None
    return _at_targets(values, targets, length, f"{where(group, index)}: ref_logprobs", "send one a token, or none")


def _supplied_teacher(group: Group, index: int, targets: IntArray, length: int) -> Teacher | None:
    """Return the teacher's tokens and logprobs at each trained position."""
    ids, logprobs = _row(group.distill_token_ids, index), _row(group.distill_logprobs, index)
    if ids is None or logprobs is None:
        return None
    if len(ids) != length or len(logprobs) != length:
        raise BadBatch(
            f"{where(group, index)}: {len(ids)} distill_token_ids and {len(logprobs)} distill_logprobs for {length} "
            "tokens; send one list a token"
        )
    return _padded(group, index, [_listed(ids[at]) for at in targets], [_listed(logprobs[at]) for at in targets])


def _sampling_masks(group: Group, index: int, tokens: IntArray, targets: IntArray) -> SamplingMasks | None:
    """Return the sampling masks at the trained tokens.

    A token that its own mask does not allow is an error, and so is one that a mask has more than once.
    """
    rows = _row(group.sampling_masks, index)
    if rows is None:
        return None
    if len(rows) != len(tokens):
        raise BadBatch(
            f"{where(group, index)}: {len(rows)} sampling_masks for {len(tokens)} tokens; send one list a token"
        )
    masks = [_listed(rows[at]) for at in targets]
    counts = np.fromiter(map(len, masks), dtype=np.int64, count=len(masks))
    ids = np.fromiter(chain.from_iterable(masks), dtype=np.int64, count=int(counts.sum()))
    owners = np.repeat(np.arange(len(masks)), counts)
    found = np.bincount(owners, ids == tokens[targets][owners], minlength=len(masks))
    wrong = np.flatnonzero((counts > 0) & (found != 1))
    if len(wrong):
        at = targets[wrong[0]]
        raise BadBatch(
            f"{where(group, index)}: the sampling mask at position {at} has the token {tokens[at]} that was drawn "
            f"there {found[wrong[0]]:.0f} times; send each token that could be drawn once, or an empty list"
        )
    width = int(ids.max(initial=0)) + 1
    ranked = np.sort(owners * width + ids)
    twice = ranked[1:][ranked[1:] == ranked[:-1]]
    if len(twice):  # it would count twice in the sum of what could be drawn
        owner, token = divmod(int(twice[0]), width)
        raise BadBatch(
            f"{where(group, index)}: the sampling mask at position {targets[owner]} has the token {token} more than "
            "once; send each token that could be drawn once"
        )
    return (ids, counts) if len(ids) else None


def leave_out_absent(batch: Batch) -> tuple[Batch, int]:
    """Return the batch without the rows of absent members, and their number.

    A baseline over the others is the same as in a group that was collected with these members only.
    """
    groups = [_present(group) for group in batch.groups]
    absent = sum(len(before.tokens) - len(after.tokens) for before, after in zip(batch.groups, groups, strict=True))
    return (replace(batch, groups=groups) if absent else batch), absent


def find_places(share: Sequence[Group], whole: Sequence[Group]) -> list[int]:
    """Return the index in `whole` of each group of `share`, a rank's part of it; groups are compared by their tokens.

    One that is not there, because the broker lost it between the two calls, is counted after the others.
    """
    left = dict(enumerate(whole))
    places: list[int] = []
    for group in share:
        found = (index for index, other in left.items() if _have_same_tokens(group, other))
        place = next(found, len(whole) + len(places))
        left.pop(place, None)
        places.append(place)
    return places


def _have_same_tokens(one: Group, other: Group) -> bool:
    pairs = zip(one.tokens, other.tokens, strict=False)
    return len(one.tokens) == len(other.tokens) and all(np.array_equal(mine, theirs) for mine, theirs in pairs)


def _present(group: Group) -> Group:
    rows = [index for index in range(len(group.tokens)) if not override_of(group, index).get(ABSENT)]
    if len(rows) == len(group.tokens):
        return group
    keys = ("tokens", "masks", "scores", *OPTIONAL_PER_SEQUENCE)
    kept = {key: [values[at] for at in rows] for key in keys if (values := getattr(group, key))}
    return replace(group, **kept)


def override_of(group: Group, index: int) -> Mapping[str, Any]:
    """Return what the environment has overridden for one sequence."""
    found = group.overrides[index] if group.overrides and index < len(group.overrides) else None
    return found or {}


def where(group: Group, index: int) -> str:
    """Return a sequence's name for error messages."""
    environment = "unknown" if group.env_id is None else group.env_id
    return f"environment {environment}, sequence {index} of its group"


def _row(rows: Any, index: int) -> Any:
    """Return the entry of one sequence, or None; absent, null and empty all mean that nothing is supplied."""
    if rows is None or index >= len(rows) or rows[index] is None or len(rows[index]) == 0:
        return None
    return rows[index]


def _at_targets(values: Any, targets: IntArray, length: int, what: str, remedy: str) -> FloatArray:
    if len(values) != length:
        raise BadBatch(f"{what}: {len(values)} values for {length} tokens; {remedy}")
    chosen = np.asarray(values, dtype=np.float32)[targets]
    bad = np.flatnonzero(~np.isfinite(chosen))
    if len(bad):
        raise BadBatch(f"{what}: {chosen[bad[0]]:g} at trained position {targets[bad[0]]}; send finite numbers")
    return chosen


def _listed(entry: Any) -> list[Any]:
    return [] if entry is None else list(entry)


def _padded(group: Group, index: int, ids: list[list[int]], logprobs: list[list[float]]) -> Teacher:
    width = max((len(row) for row in ids), default=0)
    padded_ids = np.zeros((len(ids), width), dtype=np.int64)
    padded = np.full((len(ids), width), -np.inf, dtype=np.float32)
    for at, (some, values) in enumerate(zip(ids, logprobs, strict=True)):
        if len(some) != len(values):
            raise BadBatch(
                f"{where(group, index)}: {len(some)} distill_token_ids but {len(values)} distill_logprobs at its "
                f"trained token {at}; send equally many of both"
            )
        padded_ids[at, : len(some)], padded[at, : len(values)] = some, values
    return padded_ids, padded
