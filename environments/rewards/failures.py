"""The module describes the error of a reward: its place in the user's file, and the columns that a sample has."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

from atropos_api.common.errors import AtroposError

MOST_COLUMNS = 40
LONGEST_REASON = 300


class RewardFailed(AtroposError):
    """A reward raised an error, which is the cause of this one; the message names its line."""


def reward_failed(name: str, reward: Any, samples: Sequence[Any], error: Exception) -> RewardFailed:
    """Return the error to raise for one that the reward `name` raised while it scored `samples`."""
    raised = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    forms = "" if _was_entered(reward, error) else ": it is called as f(samples), or f(prompts, completions, **columns)"
    return RewardFailed(
        f"reward {name} failed at {place_of(reward, error)}: {raised:.{LONGEST_REASON}}; a sample has "
        f"{_listed(columns_of(samples))}. Correct the reward, or the columns of the data{forms}"
    )


def place_of(reward: Any, error: Exception) -> str:
    """Return file, line and function of the last frame in the reward's own file; of its definition if it has none."""
    code = _code_of(reward)
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    if code is not None:
        own = [(each, line) for each, line in frames if each.co_filename == code.co_filename]
        frames = own or [(code, code.co_firstlineno)]
    last, line = frames[-1]
    functions = [each.co_name for each, _ in frames if not each.co_name.startswith("<")]  # `<listcomp>` is no function
    return f"{Path(last.co_filename).name}:{line}, in {functions[-1] if functions else last.co_name}"


def _was_entered(reward: Any, error: Exception) -> bool:
    """Return False if a function's parameters did not fit the call, so that none of its lines ran."""
    code = _code_of(reward)
    return code is None or any(frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__))


def columns_of(samples: Sequence[Any]) -> list[str]:
    """Return the keys of the samples in their order; those that are plain texts have none."""
    return list(dict.fromkeys(str(key) for sample in samples if isinstance(sample, Mapping) for key in sample))


def _listed(columns: Iterable[str]) -> str:
    names = list(columns)
    left_out = len(names) - MOST_COLUMNS
    more = f" and {left_out} more" if left_out > 0 else ""
    return (", ".join(names[:MOST_COLUMNS]) or "no columns (it is plain text)") + more


def _code_of(reward: Any) -> CodeType | None:
    """Return the code of a function, of a method, or of an object's `__call__`; None for what Python cannot show."""
    found = inspect.unwrap(reward)
    while isinstance(found, partial):
        found = inspect.unwrap(found.func)
    if not inspect.isroutine(found):
        found = inspect.unwrap(type(found).__call__)
    code = getattr(found, "__code__", None)
    return code if isinstance(code, CodeType) else None
