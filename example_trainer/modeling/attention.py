"""Attention over a packed micro-batch: all tokens are in one flat row, without padding.

A micro-batch is one row of tokens made of segments. A segment is a contiguous run of tokens that attends to itself
causally and, if its prompt is stored once for a whole group, also to that prompt. Linear layers work on the flat row
directly. Attention gathers segments of similar size into buckets, so that a dense mask over the whole row (quadratic in
its length) is never built.

`packed_attention` is registered with transformers' `AttentionInterface`; a call without a layout uses SDPA, so the same
module still accepts ordinary padded batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from example_trainer.errors import UnsupportedModel

ATTENTION_NAME = "atropos_packed"
MAX_PADDED_AREA_RATIO = 1.4
SMALL_AREA = 1 << 15  # below this many query-key pairs a bucket's overhead outweighs its padding
MAX_BUCKET_AREA = 1 << 22  # bounds the memory of one bucket's scores
EXPLICIT_SCORES_AREA = 1 << 14  # rows up to this query x key size are faster with explicit scores than in SDPA


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment: `length` tokens from flat index `start` that also attend to `prefix_length` from `prefix_start`."""

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0

    @property
    def area(self) -> int:
        return self.length * (self.prefix_length + self.length)


@dataclass(slots=True, eq=False)
class Bucket:
    """Segments of similar size as rectangles of flat indices: queries are `[B, Lq]`, keys `[B, P + Lq]`.

    Prefixes are padded on the left and segments on the right; `key_start[b]` is the first real key column.
    """

    queries: Tensor
    keys: Tensor
    key_start: Tensor
    prefix_columns: int
    ragged_prefix: bool
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def needs_no_mask(self, window: int | None) -> bool:
        return self.prefix_columns == 0 and (window is None or window >= self.queries.shape[1])

    def allowed(self, window: int | None) -> Tensor:
        """Return the Boolean mask `[B or 1, Lq, P + Lq]`: causal, inside the window, not a padded prefix column."""
        if window not in self._masks:
            self._masks[window] = self._build_mask(window)
        return self._masks[window]

    def _build_mask(self, window: int | None) -> Tensor:
        device = self.queries.device
        column = torch.arange(self.keys.shape[1], device=device)[None, :]
        own = torch.arange(self.queries.shape[1], device=device)[:, None] + self.prefix_columns
        mask = column <= own
        if window is not None:
            mask = mask & (column > own - window)
        if not self.ragged_prefix:
            return mask[None]
        # A query always sees itself, so no row of the softmax is empty.
        return mask[None] & (column[None] >= self.key_start[:, None, None])


@dataclass(slots=True, eq=False)
class AttentionLayout:
    """The attention layout of one packed row: its buckets, and each token's index in their concatenated outputs.

    On devices with a variable-length kernel, `varlen` holds cumulative lengths and the longest length instead.
    """

    buckets: list[Bucket]
    restore: Tensor
    varlen: tuple[Tensor, int] | None = None


def build_layout(
    segments: Sequence[Segment], total_tokens: int, device: torch.device, *, varlen: bool = False
) -> AttentionLayout:
    """Return the layout of `segments`, which together cover each of the `total_tokens` flat indices once."""
    if varlen and not any(segment.prefix_length for segment in segments):
        return AttentionLayout([], torch.empty(0), _cumulative(segments, device))
    planned = _plan_buckets(segments)
    restore = torch.empty(total_tokens, dtype=torch.long)
    offset = 0
    for members in planned:
        width = max(segment.length for segment in members)
        for segment in members:
            restore[segment.start : segment.start + segment.length] = torch.arange(offset, offset + segment.length)
            offset += width
    return AttentionLayout([_build_bucket(members, device) for members in planned], restore.to(device))


def uses_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if packed rows of `dtype` are attended by the variable-length kernel: 16 bits on a GPU."""
    return device.type == "cuda" and dtype in {torch.bfloat16, torch.float16}


def install(module: Any) -> bool:
    """Make a Hugging Face model use packed attention; return False if its attention cannot be replaced."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    if not module._can_set_attn_implementation():  # noqa: SLF001 - no public method tells this
        return False
    module.set_attn_implementation(ATTENTION_NAME)
    return True


def no_mask(device: torch.device) -> Tensor:
    """Return an empty four-dimensional mask: transformers passes such a mask on instead of building one."""
    return torch.empty(0, 0, 0, 0, device=device)


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed_layout: AttentionLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend `[1, heads, tokens, dim]` by the layout; returns `[1, tokens, heads, dim]` as transformers expects."""
    if packed_layout is None:
        return _plain_attention(module, query, key, value, attention_mask, **kwargs)
    _refuse_unsupported(kwargs)
    window = kwargs.get("sliding_window")
    scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
    rows = [tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value)]
    if packed_layout.varlen is not None:
        return _varlen(rows, packed_layout.varlen, scaling, window)[None], None
    outputs = [_attend_bucket(rows, bucket, scaling, window) for bucket in packed_layout.buckets]
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.index_select(0, packed_layout.restore).view(1, *rows[0].shape[:2], -1), None


def _plain_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    result: tuple[Tensor, Tensor | None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return result


def _refuse_unsupported(kwargs: dict[str, Any]) -> None:
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise UnsupportedModel(f"packed attention does not support {name}; train a model without it")


def _attend_bucket(rows: list[Tensor], bucket: Bucket, scaling: float, window: int | None) -> Tensor:
    """Return the outputs of a bucket's rectangle, flattened to `[B * Lq, heads * dim]`."""
    batch, width = bucket.queries.shape
    query = _gather(rows[0], bucket.queries)
    key, value = _gather(rows[1], bucket.keys), _gather(rows[2], bucket.keys)
    attend = _explicit if width * bucket.keys.shape[1] <= EXPLICIT_SCORES_AREA else _fused
    return attend(query, key, value, bucket, scaling, window).reshape(batch * width, -1)


def _gather(rows: Tensor, index: Tensor) -> Tensor:
    """Gather `[T, H, D]` rows by `[B, L]` index into `[B, L, H, D]`; index_select has the fastest backward."""
    flat = rows.reshape(rows.shape[0], -1)
    return flat.index_select(0, index.reshape(-1)).view(*index.shape, *rows.shape[1:])


def _explicit(query: Tensor, key: Tensor, value: Tensor, bucket: Bucket, scaling: float, window: int | None) -> Tensor:
    """Attend with explicit scores: for many short rows on a CPU, two batched products beat SDPA by a third."""
    batch, width, heads, dim = query.shape
    kv_heads, columns = key.shape[2], key.shape[1]
    shared = heads // kv_heads
    folded = query.view(batch, width, kv_heads, shared, dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(batch, kv_heads, shared * width, dim) * scaling
    scores = torch.matmul(folded, key.permute(0, 2, 3, 1)).view(batch, kv_heads, shared, width, columns)
    # In place: the scores are not needed again, and a copy of them would be the largest tensor here.
    weights = scores.masked_fill_(~bucket.allowed(window)[:, None, None], float("-inf"))
    weights = weights.softmax(-1, dtype=torch.float32).to(value.dtype)
    mixed = torch.matmul(weights.view(batch, kv_heads, shared * width, columns), value.transpose(1, 2))
    return mixed.view(batch, kv_heads, shared, width, -1).permute(0, 3, 1, 2, 4)


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _fused(query: Tensor, key: Tensor, value: Tensor, bucket: Bucket, scaling: float, window: int | None) -> Tensor:
    causal = bucket.needs_no_mask(window)
    shared = query.shape[2] // key.shape[2]
    if shared > 1 and _on_gpu(query):
        # With a mask, or in fp32, only SDPA's math kernel takes enable_gqa on a GPU, and it writes all scores out.
        key, value = (tensor.repeat_interleave(shared, dim=2) for tensor in (key, value))
    mixed = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=None if causal else bucket.allowed(window)[:, None],
        is_causal=causal,
        scale=scaling,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return mixed.transpose(1, 2)


def _varlen(rows: list[Tensor], lengths: tuple[Tensor, int], scaling: float, window: int | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    cumulative, longest = lengths
    left = -1 if window is None else window - 1
    value = rows[2]
    # Rotary embedding leaves queries and keys in fp32 under autocast; the kernel needs one half-precision dtype.
    query, key = (tensor.to(value.dtype) for tensor in rows[:2])
    options: dict[str, Any] = {"scale": scaling, "window_size": (left, 0)}
    shared = query.shape[1] // key.shape[1]
    if shared > 1 and "enable_gqa" in signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    elif shared > 1:  # torch before 2.12 has no such argument
        key, value = (tensor.repeat_interleave(shared, dim=1) for tensor in (key, value))
    mixed = varlen_attn(query, key, value, cumulative, cumulative, longest, longest, **options)
    assert isinstance(mixed, Tensor)
    return mixed


def _cumulative(segments: Sequence[Segment], device: torch.device) -> tuple[Tensor, int]:
    lengths = torch.tensor([segment.length for segment in sorted(segments, key=lambda segment: segment.start)])
    cumulative = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device=device, dtype=torch.int32)
    return cumulative, int(lengths.max())


@dataclass(slots=True)
class _OpenBucket:
    """A bucket being filled, with the running sizes that decide if one more segment fits."""

    members: list[Segment]
    width: int = 0
    used_area: int = 0

    def take(self, segment: Segment) -> bool:
        width = max(self.width, segment.length)
        used = self.used_area + segment.area
        prefix = self.members[0].prefix_length if self.members else segment.prefix_length  # sorted, longest first
        padded = (len(self.members) + 1) * width * (prefix + width)
        fits = padded <= SMALL_AREA or (padded <= MAX_BUCKET_AREA and padded <= MAX_PADDED_AREA_RATIO * used)
        if self.members and not fits:
            return False
        self.members.append(segment)
        self.width, self.used_area = width, used
        return True


def _plan_buckets(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Sort segments by size and split them wherever padding them to one rectangle would waste too much."""
    planned: list[_OpenBucket] = []
    for segment in sorted(segments, key=lambda item: (-item.prefix_length, -item.length, item.start)):
        if not (planned and planned[-1].take(segment)):
            planned.append(_OpenBucket([]))
            planned[-1].take(segment)
    return [bucket.members for bucket in planned]


def _build_bucket(members: Sequence[Segment], device: torch.device) -> Bucket:
    width = max(segment.length for segment in members)
    prefix = max(segment.prefix_length for segment in members)
    starts = torch.tensor([segment.start for segment in members])[:, None]
    lengths = torch.tensor([segment.length for segment in members])[:, None]
    own = starts + torch.minimum(torch.arange(width)[None], lengths - 1)
    key_start = prefix - torch.tensor([segment.prefix_length for segment in members])
    prefix_starts = torch.tensor([segment.prefix_start for segment in members])[:, None]
    before = prefix_starts + (torch.arange(prefix)[None] - key_start[:, None]).clamp(min=0)
    return Bucket(
        queries=own.to(device),
        keys=torch.cat([before, own], dim=1).to(device),
        key_start=key_start.to(device),
        prefix_columns=prefix,
        ragged_prefix=bool(key_start.any()),
    )
