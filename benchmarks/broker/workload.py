"""Groups as environments send them: text of `json.dumps`, skewed token ids, logprobs that were float32.

Half of the sampled tokens are almost certain, as in a trained model, so many logprobs are written with an exponent.
"""

from __future__ import annotations

import gzip
import json
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

PROMPT_FRACTION = 0.25
VOCABULARY = 150_000
GZIP_LEVEL = 9
"""The compression level that the published environment client uses."""


@dataclass(frozen=True)
class Shape:
    """Sequences per group, tokens per sequence, groups per batch."""

    size: int
    length: int
    groups_per_batch: int

    def __str__(self) -> str:
        return f"{self.size}x{self.length}"

    @property
    def batch_size(self) -> int:
        return self.size * self.groups_per_batch


@dataclass(frozen=True)
class SentGroup:
    """One group: its values and its JSON text."""

    values: dict[str, Any]
    text: bytes

    @property
    def mark(self) -> int:
        """Return the first token, which differs in all groups of a workload."""
        first: int = self.values["tokens"][0][0]
        return first

    @cached_property
    def zipped(self) -> bytes:
        return gzip.compress(self.text, GZIP_LEVEL)


def make_groups(shape: Shape, count: int, *, environments: int, seed: int = 0) -> list[SentGroup]:
    random = np.random.default_rng(seed)
    return [_make_group(shape, index, index % environments, random) for index in range(count)]


def _make_group(shape: Shape, mark: int, env_id: int, random: np.random.Generator) -> SentGroup:
    prompt = int(shape.length * PROMPT_FRACTION)
    tokens, masks, logprobs = [], [], []
    for _ in range(shape.size):
        row = [int(token) for token in VOCABULARY ** random.random(shape.length)]
        row[0] = mark
        tokens.append(row)
        masks.append([-100] * prompt + row[prompt:])
        logprobs.append([1.0] * prompt + _logprobs(random, shape.length - prompt))
    values = {
        "tokens": tokens,
        "masks": masks,
        "scores": [float(score) for score in random.integers(0, 2, shape.size)],
        "advantages": None,
        "ref_logprobs": None,
        "messages": None,
        "generation_params": {"temperature": 1.0},
        "inference_logprobs": logprobs,
        "overrides": None,
        "group_overrides": {},
        "images": None,
        "env_id": env_id,
    }
    return SentGroup(values, json.dumps(values).encode())


def _logprobs(random: np.random.Generator, count: int) -> list[float]:
    sure = -(10.0 ** random.uniform(-7, -1, count))
    unsure = -random.exponential(1.5, count)
    chosen = np.where(random.random(count) < 0.5, sure, unsure).astype("<f4")
    return list(struct.unpack(f"<{count}f", chosen.tobytes()))


def compare(sent: list[SentGroup], delivered: list[dict[str, Any]]) -> None:
    """Check that every value delivered is the value sent; further keys are null or the broker's own."""
    wanted = {group.mark: group.values for group in sent}
    if sorted(wanted) != sorted(item["tokens"][0][0] for item in delivered):
        raise AssertionError(f"{len(sent)} groups were sent, {len(delivered)} others were delivered")
    for item in delivered:
        values = wanted[item["tokens"][0][0]]
        for key, value in item.items():
            if key != "received_version" and value != values.get(key):
                raise AssertionError(f"{key} of group {item['tokens'][0][0]} was altered on its way")
