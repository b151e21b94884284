"""The weight bridge: the one object in which the training modes differ.

The training loop asks it for a policy, hands it a version number after a step, and closes it at the
end. How the new weights reach the server (shared tensors, a restart) is behind this protocol.

Order of a run: `prepare()`, then the masters may be overwritten from a checkpoint, then the run's
first version, above both `highest_version()` and what the broker remembers, is published before
anything can be sampled; that publish proves that trainer and server compute the same logprobs. From
then on `publish` follows the steps that `should_publish` asks for. While the loop waits for rollouts
it asks `needs_publish` every few seconds: a server that has restarted serves nothing until the
current masters are published again.

How often to publish, so that recomputing what a publish interrupts does not eat the generation.

How often a sync is proven (`--sync-check`): the first to each start of a server always, then every Nth.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from example_trainer.modeling.policy import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishReport:
    """What one publish did and cost."""

    version: int
    seconds: float
    """From the call to the server serving the new version."""
    fence_seconds: float = 0.0
    """For how long the server held new requests."""
    recomputed_tokens: int = 0
    """Tokens whose KV entries were computed again because their request was still running."""
    generated_tokens: int = 0
    """Tokens the server has generated since the publish before."""
    paused_requests: int = 0
    policy_name: str | None = None
    """The model that clients have to ask for to get this version; None: the one they ask for anyway."""


class WeightBridge(Protocol):
    """How a policy gets its weights and how new weights get to the server."""

    def prepare(self) -> Policy:
        """Wait for the server where one is needed and load the policy."""
        ...

    def publish(self, version: int) -> PublishReport:
        """Make the masters, as they are now, the served policy under this version; blocks until it is.

        A forward from the masters may run meanwhile, an optimizer step may not.
        """
        ...

    def highest_version(self) -> int:
        """The highest version the server has had; what is published next must be above it. 0 if none."""
        ...

    def should_publish(self, steps_since_publish: int) -> bool:
        """Whether a publish is due after this many optimizer steps without one."""
        ...

    def needs_publish(self) -> bool:
        """Whether the server serves nothing until it is published to (again); cheap, never raises."""
        ...

    def close(self) -> None:
        """Let go of the server; end it, if the bridge started it."""
        ...

    def notify_update(self) -> PublishReport:
        """The masters have moved: publish them under the next version, for callers that keep no count of their own."""
        return self.publish(self.highest_version() + 1)


class SyncBudget:
    """`--sync-budget` as a rule over the publishes of the last seconds.

    Each publish makes the server compute the KV entries of its paused requests again. While those
    tokens exceed `share` of the tokens generated in the window, the next publish waits, but never
    for more than `most_steps` optimizer steps (the staleness bound, where there is one).
    """

    def __init__(
        self,
        share: float,
        *,
        most_steps: int | None = None,
        window_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._share = share
        self._most_steps = most_steps
        self._window_seconds = window_seconds
        self._clock = clock
        self._publishes: deque[tuple[float, int, int]] = deque()

    def note(self, report: PublishReport) -> None:
        self._publishes.append((self._clock(), report.recomputed_tokens, report.generated_tokens))

    def recomputed_fraction(self) -> float:
        """Recomputed over generated tokens of the publishes within the window."""
        oldest = self._clock() - self._window_seconds
        while self._publishes and self._publishes[0][0] < oldest:
            self._publishes.popleft()
        recomputed = sum(entry[1] for entry in self._publishes)
        return recomputed / max(1, sum(entry[2] for entry in self._publishes)) if recomputed else 0.0

    def allows(self, steps_since_publish: int) -> bool:
        """Whether to publish now, that many optimizer steps after the last time."""
        if steps_since_publish < 1:
            return False
        if self._most_steps is not None and steps_since_publish >= max(1, self._most_steps):
            return True
        return self.recomputed_fraction() <= self._share


@dataclass(slots=True)
class SyncCheck:
    """Counts publishes from one proof to the next."""

    every: int
    """0: none is due."""
    _since: int = field(default=0, init=False)

    def is_due(self) -> bool:
        """Whether the publish just made is to be proven; call it once a publish."""
        self._since += 1
        if self.every == 0 or self._since < self.every:
            return False
        self._since = 0
        return True
