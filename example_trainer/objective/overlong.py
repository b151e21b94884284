"""Answers that ran into the length limit: which they are, and a penalty that grows as they come near it.

After DAPO (Yu et al. 2025, section 3.4): an answer that was cut off says little about its reasoning, so it is either
left out of the loss or, before that, made a little worse the longer it is.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlongSettings:
    """`limit` is the longest answer in tokens; without one nothing is overlong."""

    limit: int | None = None
    buffer: int = 0
    """Tokens before the limit over which the penalty grows from 0 to its whole."""
    penalty: float = 0.0
    """Taken from the reward at the limit; 0: none."""
    mask: bool = False
    """Whether answers at the limit are left out of forward and denominators."""


def is_truncated(length: int, settings: OverlongSettings) -> bool:
    """Whether an answer of `length` tokens reached the limit; one that ended just there cannot be told apart."""
    return settings.limit is not None and length >= settings.limit


def overlong_penalty(length: int, settings: OverlongSettings) -> float:
    """What is added to the reward of an answer of `length` tokens: 0 down to -`penalty` (DAPO's equation 13)."""
    if settings.limit is None or not settings.penalty:
        return 0.0
    beyond = length - (settings.limit - settings.buffer)
    share = 1.0 if length >= settings.limit else 0.0 if beyond <= 0 else beyond / settings.buffer
    return -settings.penalty * share
