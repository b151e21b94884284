"""Documents of rollouts, made from the group as it was sent and from what the trainer reported about its tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import Any, Final, Literal

import msgspec

from atropos_api.page.documents import GroupDocument, GroupSummary, SampleSummary, SampleWindow
from atropos_api.wire.columns import unpack_record
from atropos_api.wire.columns_groups import decode_group
from atropos_api.wire.groups import Form
from atropos_api.wire.reports import SampleValues

NOT_TRAINED: Final = -100
PLACEHOLDER_LOGPROB: Final = 1.0
"""The logprob that stands where nothing was sampled."""

MOST_TOKENS_A_WINDOW: Final = 4000
LONGEST_TEXT: Final = 200_000
"""Characters of one message that are shown; a browser lays out no more in reasonable time."""

LARGE_FIELDS: Final = frozenset(
    {"tokens", "masks", "scores", "inference_logprobs", "advantages", "ref_logprobs", "messages", "images"}
    | {"distill_token_ids", "distill_logprobs", "sampling_masks", "policy_versions", "received_version", "env_id"}
)
"""Fields of a group that the page shows in another form, or not at all."""

Fields = Mapping[str, Any]

Order = Literal["newest", "lowest-reward", "highest-reward", "widest-reward"]
Only = Literal["all", "equal", "mixed", "failed", "remarked"]
"""Choice of groups: those with equal rewards or different ones, with a reward of 0 or less, or with a remark."""

REMARK_TEXTS: Final = ("finish_reason", "error")
"""Overrides whose text is shown as a remark. Any other override that is true is shown by its name."""
USUAL_END: Final = "stop"
MOST_REMARKS: Final = 20
LONGEST_REMARK: Final = 60


class GroupLine(msgspec.Struct):
    """The fields of a stored group that a list of groups shows."""

    scores: list[float]
    overrides: list[dict[str, Any] | None] | None = None


class _LineHead(msgspec.Struct):
    fields: GroupLine


_line_decoder = msgspec.json.Decoder(GroupLine)
_line_head_decoder = msgspec.json.Decoder(_LineHead)


def read_line(body: bytes, form: Form) -> GroupLine:
    """Return what a list shows of a stored group without decoding the rest."""
    if form == "columns":
        return _line_head_decoder.decode(unpack_record(body).head).fields
    return _line_decoder.decode(body)


def remarks_of(overrides: Sequence[Mapping[str, Any] | None] | None) -> dict[str, int]:
    """Count the remarks of the environment about a group's sequences, the commonest first."""
    found: Counter[str] = Counter()
    for name, value in chain.from_iterable((one or {}).items() for one in overrides or ()):
        if value is True:
            found[name[:LONGEST_REMARK]] += 1
        elif name in REMARK_TEXTS and isinstance(value, str) and value not in {"", USUAL_END}:
            found[value[:LONGEST_REMARK]] += 1
    return dict(found.most_common(MOST_REMARKS))


def fits(group: GroupSummary, only: Only) -> bool:
    """Return True if a list limited to `only` shows this group."""
    if only == "failed":
        return any(reward <= 0 for reward in group.rewards)
    if only == "remarked":
        return bool(group.remarks)
    return only == "all" or group.equal_rewards == (only == "equal")


def read_fields(body: bytes, form: Form) -> Fields:
    """Return all fields of a stored group."""
    if form == "columns":
        return msgspec.structs.asdict(decode_group(unpack_record(body)))
    fields: dict[str, Any] = msgspec.json.decode(body)
    return fields


def in_order(groups: Sequence[GroupSummary], order: Order) -> list[GroupSummary]:
    """Return groups, which come newest first, in this order; equal ones by mean reward, then the newest first.

    With rewards of 0 and 1 nearly all groups have the same lowest and highest reward.
    """
    if order == "lowest-reward":
        return sorted(groups, key=lambda one: (min(one.rewards, default=0.0), _mean(one.rewards)))
    if order == "highest-reward":
        return sorted(groups, key=lambda one: (-max(one.rewards, default=0.0), -_mean(one.rewards)))
    if order == "widest-reward":
        return sorted(groups, key=lambda one: min(one.rewards, default=0.0) - max(one.rewards, default=0.0))
    return list(groups)


def _mean(rewards: Sequence[float]) -> float:
    return fmean(rewards) if rewards else 0.0


def describe_group(run_id: str, summary: GroupSummary, fields: Fields, *, replay: str | None = None) -> GroupDocument:
    """Return the document of a whole group, without its tokens."""
    overrides = fields.get("overrides") or []
    samples = [
        _describe_sample(fields, index, overrides[index] if index < len(overrides) else None)
        for index in range(len(fields["tokens"]))
    ]
    messages = fields.get("messages")
    return GroupDocument(
        run_id=run_id,
        summary=summary,
        samples=samples,
        messages=None if not messages else [[_shortened(one) for one in chat] for chat in messages],
        more={name: value for name, value in fields.items() if name not in LARGE_FIELDS and value not in (None, [])},
        replay=replay,
    )


def window(
    fields: Fields, index: int, start: int, count: int, *, values: SampleValues | None, texts: Mapping[str, str]
) -> SampleWindow:
    """Return `count` tokens of one sequence from position `start` on."""
    tokens = fields["tokens"][index]
    end = min(len(tokens), start + min(count, MOST_TOKENS_A_WINDOW))
    shown = list(tokens[start:end])
    ids = {str(token) for token in shown}
    return SampleWindow(
        start=start,
        total=len(tokens),
        tokens=shown,
        texts={token: text for token, text in texts.items() if token in ids},
        sampled=[value != NOT_TRAINED for value in fields["masks"][index][start:end]],
        sampler_logprobs=_sampler_logprobs(fields, index, start, end),
        logprobs=_spread(values, values.logprobs if values else (), start, end),
        entropies=_spread(values, values.entropies if values else (), start, end),
        advantages=_spread(values, values.advantages, start, end)
        if values
        else _given_advantages(fields, index, start, end),
        versions=_versions(fields, index, start, end),
    )


def _describe_sample(fields: Fields, index: int, override: Any) -> SampleSummary:
    spans = fields.get("policy_versions") or []
    versions = [span[2] for span in spans[index]] if index < len(spans) else []
    known = [version for version in versions if version is not None]
    finish = override.get("finish_reason") if isinstance(override, Mapping) else None
    return SampleSummary(
        reward=float(fields["scores"][index]),
        tokens=len(fields["tokens"][index]),
        sampled_tokens=sum(value != NOT_TRAINED for value in fields["masks"][index]),
        oldest_version=min(known, default=None),
        newest_version=max(known, default=None),
        finish=finish if isinstance(finish, str) else None,
    )


def _sampler_logprobs(fields: Fields, index: int, start: int, end: int) -> list[float | None] | None:
    rows = fields.get("inference_logprobs")
    if not rows:
        return None
    return [None if value == PLACEHOLDER_LOGPROB else value for value in rows[index][start:end]]


def _given_advantages(fields: Fields, index: int, start: int, end: int) -> list[float | None] | None:
    """Return the advantages that the environment gave, where it gave any."""
    rows = fields.get("advantages")
    return list(rows[index][start:end]) if rows and index < len(rows) and rows[index] else None


def _spread(
    values: SampleValues | None, column: Sequence[float | None], start: int, end: int
) -> list[float | None] | None:
    """Return one entry for each position, from a column that has one for each trained token."""
    if values is None or not column:
        return None
    spread: list[float | None] = [None] * (end - start)
    for position, value in zip(values.positions, column, strict=False):
        if start <= position < end:
            spread[position - start] = value
    return spread


def _versions(fields: Fields, index: int, start: int, end: int) -> list[int | None]:
    found: list[int | None] = [None] * (end - start)
    spans = fields.get("policy_versions") or []
    for first, last, version in spans[index] if index < len(spans) else []:
        for position in range(max(first, start), min(last, end)):
            found[position - start] = version
    return found


def _shortened(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        return {"role": "", "content": message}
    content = message.get("content")
    if isinstance(content, str) and len(content) > LONGEST_TEXT:
        left = len(content) - LONGEST_TEXT
        return {**message, "content": f"{content[:LONGEST_TEXT]}… ({left} more characters are not shown)"}
    return dict(message)
