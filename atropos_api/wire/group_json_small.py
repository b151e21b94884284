"""Checks of small groups: decoding once, by type, costs less than examining the text of a few kilobytes.

The decoded values are thrown away, and the text is kept as it came, with the missing last keys appended. A group that
is not clearly valid, or whose keys come in another order than they are delivered in, goes through
`group_json.check_group`, which repairs what it can and says what is wrong with the rest.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from atropos_api.errors import InvalidGroup
from atropos_api.wire.group_json import (
    CheckedGroup,
    check_group,
    check_messages,
    check_overrides,
    decode_fields,
    is_deep,
)
from atropos_api.wire.group_json import oldest_version as oldest_version_in
from atropos_api.wire.groups import WIRE_KEYS, Span
from atropos_api.wire.json_arrays import ID_LIMIT, SPACE, Float

SMALL_BYTES: Final = 1 << 14
"""Below this, decoding numbers is cheaper than the calls that avoid it."""

_Id = Annotated[int, msgspec.Meta(ge=0, lt=ID_LIMIT)]

_Mask = Annotated[int, msgspec.Meta(ge=-ID_LIMIT, lt=ID_LIMIT)]

_EnvironmentId = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]

_FloatRows = list[list[Float]] | None


class _SmallGroup(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A clearly valid group: fields that need checks value by value, or must be moved or removed, are not in it."""

    tokens: list[list[_Id]]
    masks: list[list[_Mask]]
    scores: list[Float]
    advantages: _FloatRows | UnsetType = UNSET
    ref_logprobs: _FloatRows | UnsetType = UNSET
    messages: list[list[dict[str, Any]]] | UnsetType | None = UNSET
    generation_params: dict[str, Any] | UnsetType | None = UNSET
    inference_logprobs: _FloatRows | UnsetType = UNSET
    overrides: list[dict[str, Any]] | UnsetType | None = UNSET
    group_overrides: dict[str, Any] | UnsetType | None = UNSET
    images: Any = UNSET
    env_id: _EnvironmentId | UnsetType | None = UNSET
    distill_token_ids: UnsetType | None = UNSET
    distill_logprobs: UnsetType | None = UNSET
    policy_versions: list[list[Span]] | UnsetType | None = UNSET


_decoder = msgspec.json.Decoder(_SmallGroup)

_values_in_order = operator.attrgetter(*WIRE_KEYS)

_free_values = operator.attrgetter("messages", "generation_params", "overrides", "group_overrides", "images")

_KEYS: Final = tuple(f'"{key}":'.encode() for key in WIRE_KEYS)
_REST: Final = tuple(b"".join(b",%bnull" % key for key in _KEYS[count:]) for count in range(len(_KEYS) + 1))
"""The text to append to a group with the first n keys: the remaining keys, each null."""


def check_body(body: bytes) -> CheckedGroup:
    """Check a group that is a body of its own. Raises `InvalidGroup` or `InvalidRequest`."""
    checked = _check_small(body) if len(body) < SMALL_BYTES else None
    return checked or check_group(decode_fields(body))


def _check_small(body: bytes) -> CheckedGroup | None:
    """Return the checked group, or None if it is not clearly valid."""
    try:
        group = _decoder.decode(body)
        lengths = list(map(len, group.tokens))
        if not _is_shaped(group, lengths) or any(map(is_deep, filter(None, _free_values(group)))):
            return None
        if group.messages:
            check_messages(group.messages, "messages")
        if group.overrides:
            check_overrides(group.overrides, len(lengths), "overrides")
        versions = group.policy_versions
        oldest = oldest_version_in(versions, lengths, "policy_versions") if versions else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, InvalidGroup):
        return None
    values = _values_in_order(group)
    count = len(values) - values.count(UNSET)
    keys = _KEYS[:count]
    if versions is not UNSET:  # it is stored after all others, so nothing may have to be added before it
        keys = (*_KEYS, b'"policy_versions":')
    if UNSET in values[:count] or not _is_in_order(body, keys):
        return None
    return CheckedGroup(
        text=body.strip(SPACE)[:-1] + _REST[count],
        size=len(lengths),
        token_count=sum(lengths),
        env_id=group.env_id if group.env_id is not UNSET else None,
        oldest_version=oldest,
    )


def _is_shaped(group: _SmallGroup, lengths: list[int]) -> bool:
    if not lengths or 0 in lengths or len(group.scores) != len(lengths) or list(map(len, group.masks)) != lengths:
        return False
    for rows in (group.advantages, group.ref_logprobs, group.inference_logprobs):
        if rows and list(map(len, rows)) != lengths:
            return False
    return True


def _is_in_order(body: bytes, keys: Sequence[bytes]) -> bool:
    """Return True if these keys are there in order. (No string holds such a text: its quotes would be escaped.)"""
    place = 0
    for key in keys:
        place = body.find(key, place)
        if place < 0:
            return False
    return True
