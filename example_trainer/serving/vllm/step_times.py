"""The times of an engine core's steps and the lengths of its outputs, for the choice of a publish (`serving/drain.py`).

A step's time is fitted as a + b * requests + c * prefilled tokens by least squares, in which each step counts for less
than the one after it. It is the time between the ends of two steps, which is right with and without asynchronous
scheduling; a step after a pause or an idle time is left out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

_FORGETTING = 0.998
"""Weight of a step relative to the next one: the last 500 or so decide."""

_SHRINKAGE = 1e-4
"""The share of each slope's own sum of squares by which the fit prefers to count a time as fixed.

Without it, steps of always the same number of requests would not say how to divide their time.
"""
_LENGTHS = 512


class StepTimes:
    """Sums of products of the steps' sizes and times, and the lengths of the last outputs."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended: float | None = None
        self._sizes = [[0.0] * 3 for _ in range(3)]
        self._times = [0.0] * 3
        self.lengths: deque[int] = deque(maxlen=_LENGTHS)

    def end_step(self, requests: int, tokens: int, *, goes_on: bool) -> None:
        """Add a step of some requests and scheduled tokens; `goes_on` is True if another follows at once."""
        now = self._clock()
        if self._ended is not None and requests:
            self._add((1.0, float(requests), float(tokens - requests)), now - self._ended)
        self._ended = now if goes_on else None

    def interrupt(self) -> None:
        """Leave out the time until the next step ends."""
        self._ended = None

    def fit(self) -> tuple[float, float, float]:
        """Return the fixed seconds of a step, those for each request, and those for each prefilled token."""
        import numpy as np

        sizes, times = np.array(self._sizes), np.array(self._times)
        if sizes[0, 0] == 0.0:
            return 0.0, 0.0, 0.0
        sizes[1, 1] *= 1.0 + _SHRINKAGE
        sizes[2, 2] = sizes[2, 2] * (1.0 + _SHRINKAGE) + 1e-9
        fixed, request, token = np.linalg.solve(sizes, times)
        if request < 0.0 or fixed < 0.0:  # noise, since nearly all steps had one size
            fixed, request = times[0] / sizes[0, 0], 0.0
        return float(fixed), float(request), max(0.0, float(token))

    def _add(self, step: tuple[float, float, float], seconds: float) -> None:
        for row, size in enumerate(step):
            self._times[row] = self._times[row] * _FORGETTING + size * seconds
            products = self._sizes[row]
            for column, other in enumerate(step):
                products[column] = products[column] * _FORGETTING + size * other


def noting_length(free: Any, times_of: Callable[[Any], StepTimes]) -> Any:
    """Return the scheduler's `_free_request` changed to note the lengths of outputs that have ended by themselves."""
    from vllm.v1.request import RequestStatus

    ended = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)

    def freeing(scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if request.status in ended:
            times_of(scheduler).lengths.append(request.num_output_tokens)
        return free(scheduler, request, *args, **kwargs)

    return freeing
