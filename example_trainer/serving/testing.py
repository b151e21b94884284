"""An engine without vLLM, for tests of the fence and of what stands behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from example_trainer.serving.fence import Counters
from example_trainer.serving.replies import UNLABELLED

Spans = list[list[int | None]]


class StubEngine:
    """Implements the fence's `Engine`: decodes step by step, stands still while paused, stamps each token.

    It keeps nothing computed between two steps, so what it decodes after a pause is of the weights after it.
    """

    def __init__(self, *, step_tokens: int = 1, step_seconds: float = 0.0) -> None:
        self.calls: list[tuple[str, object]] = []
        """What the fence has asked for, in order, as far as it was done."""
        self.failing: set[str] = set()
        """Names of calls that fail: `pause`, `resume`, `stamp`."""
        self.generated_tokens = 0
        self._step_tokens = step_tokens
        self._step_seconds = step_seconds
        self._version = UNLABELLED
        self._decoding = 0
        self._runs = asyncio.Event()
        self._runs.set()

    @property
    def paused(self) -> bool:
        return not self._runs.is_set()

    async def pause(self, *, discard: bool) -> Counters:
        self._note("pause", discard)
        self._runs.clear()
        return {"discarded_tokens": 12 if discard else 0, "paused_requests": self._decoding} | self._counters()

    async def resume(self, version: str | None) -> Counters:
        self._note("resume", version)
        self._version = version or self._version
        self._runs.set()
        return self._counters()

    async def stamp(self, version: str) -> None:
        self._note("stamp", version)
        self._version = version

    def salt_prefixes(self, salt: str) -> None:
        self._note("salt", salt)

    async def decode(self, length: int, compute: Callable[[int, int], None]) -> Spans:
        """Have `compute(start, end)` work out a request's tokens, step by step; the versions they are of."""
        spans: Spans = []
        self._decoding += 1
        try:
            for start in range(0, length, self._step_tokens):
                await self._runs.wait()
                end = min(start + self._step_tokens, length)
                compute(start, end)
                version = None if self._version == UNLABELLED else int(self._version)
                if spans and spans[-1][2] == version:
                    spans[-1][1] = end
                else:
                    spans.append([start, end, version])
                self.generated_tokens += end - start
                await asyncio.sleep(self._step_seconds)
        finally:
            self._decoding -= 1
        return spans

    def _note(self, name: str, value: object) -> None:
        if name in self.failing:
            raise RuntimeError(f"the engine does not {name}")
        self.calls.append((name, value))

    def _counters(self) -> Counters:
        return {"generated_tokens_total": self.generated_tokens, "recomputed_tokens_total": 0}
