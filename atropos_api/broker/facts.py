"""The facts that a diagnosis looks at: plain numbers and names, as of one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from atropos_api.wire.reports import OpenRollout

WAIT_SECONDS: Final = 3.0
"""A trainer that waits for less is not called blocked: a moment's wait before each batch is usual."""

SILENT_SECONDS: Final = 30.0
"""A trainer that reports does so every few seconds, an environment every ten."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentFacts:
    """One environment; durations are as of now. What it does not report is None."""

    name: str
    connected: bool = True
    quiet_seconds: float = 0.0
    paused_because: str | None = None
    drops: str | None = None
    """Its explanation of dropped groups, if it dropped some and delivered none lately."""
    open_rollouts: int | None = None
    open_requests: int | None = None
    idle_seconds: float = 0.0
    usual_seconds: float | None = None
    slowest: Sequence[OpenRollout] = ()
    unavailable: Sequence[str] = ()
    """Addresses of its inference servers that do not answer, if none does."""
    evaluating: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFacts:
    """One registered inference server that serves the run's policy, with the load that it reported last."""

    server_id: str
    running: int = 0
    waiting: int = 0
    kv_free: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class HoldFacts:
    """The longest hold on the published policy."""

    seconds: float
    """Time since it was granted."""
    left_seconds: float
    version: int | None
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StartFacts:
    """The start of a run: no group of it has come yet since the broker's process began."""

    seconds: float
    """Time since the run began or, if later, the broker's process."""
    published: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """All that the rules look at; durations are as of now."""

    run: str | None = None
    """Name of the open run."""
    finished: bool = False
    """True if no run is open and the last one finished."""
    ended: bool = False
    """True if the broker has ended, and this is a copy of its store."""
    store_failure: str | None = None
    start: StartFacts | None = None
    """None once a group of the run has come."""
    queued_sequences: int = 0
    outstanding: int = 0
    limit: int = 0
    """The `outstanding` from which on environments may start no more groups, in the run's unit."""
    unit: str = "sequences"
    batch_size: int = 0
    batch_number: int = 0
    batch_wait_seconds: float | None = None
    """Time for which the trainer has waited for a batch that it could train now."""
    publish_wait_seconds: float | None = None
    """Time for which the trainer has waited for holds to end."""
    hold: HoldFacts | None = None
    minimum_of: Sequence[str] = ()
    """Environments whose minimum the next batch waits for."""
    trainer_quiet_seconds: float | None = None
    """Time since the trainer's last call or report."""
    trainer_silence_limit_seconds: float = SILENT_SECONDS
    busy_seconds: float | None = None
    """Time since the last batch was handed out, while the trainer asks for no other."""
    phases: Mapping[str, float] = field(default_factory=dict)
    step_seconds: float | None = None
    """Usual time of a step."""
    fetch_share: float = 0.0
    sync_share: float = 0.0
    environments: Sequence[EnvironmentFacts] = ()
    servers: Sequence[ServerFacts] = ()

    @property
    def waits_for_batch(self) -> bool:
        """True if the trainer has waited for longer than a moment."""
        return (self.batch_wait_seconds or 0.0) >= WAIT_SECONDS

    @property
    def connected(self) -> list[EnvironmentFacts]:
        return [one for one in self.environments if one.connected]
