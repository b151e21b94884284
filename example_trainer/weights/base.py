"""The weight bridge: the one object in which the training modes differ.

The training loop gets a policy from it, publishes a version after a step, and closes it at the end. The transfer of the
weights (shared tensors, a restart) is hidden behind this protocol. Order of a run: `prepare()`; then the masters may be
overwritten from a checkpoint; then the run's first version, above both `highest_version()` and the broker's last one,
is published before anything can be sampled, and that publish runs the logprob parity check. From then on `publish`
follows the steps for which `should_publish` is true. While the loop waits for rollouts it calls `needs_publish` every
few seconds: a server that has restarted serves nothing until the current masters are published again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from example_trainer.modeling.policy import Policy
    from example_trainer.weight_protocol.client import Fence


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishReport:
    """The result and the cost of one publish."""

    version: int
    seconds: float
    """Time from the call until the server serves the new version."""
    fence_seconds: float = 0.0
    """Time during which the server held back new requests."""
    loss_seconds: float = 0.0
    """Generation time that the server lost by draining and recomputing, if `--in-flight auto` chose."""
    expected_loss_seconds: float = 0.0
    """The same time, as the server expected it when the publish began."""
    recomputed_tokens: int = 0
    """Tokens whose KV entries were computed again because their request was still running."""
    generated_tokens: int = 0
    """Tokens the server has generated since the previous publish."""
    paused_requests: int = 0
    policy_name: str | None = None
    """The model name that clients have to send to get this version; None: the name they send anyway."""
    server_count: int = 1
    """Number of servers whose costs these are."""
    servers: tuple[str, ...] | None = None
    """Lease ids of the registered servers that serve this version; None if servers are not taken from the registry."""


class CountingServer(Protocol):
    """A server whose generated tokens are counted from one publish to the next."""

    generated_tokens_total: int


@dataclass(slots=True)
class Cost:
    """The cost of one publish's fences, on all servers together."""

    fence_seconds: float = 0.0
    loss_seconds: float = 0.0
    expected_loss_seconds: float = 0.0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    paused_requests: int = 0
    server_count: int = 0

    def note(self, server: CountingServer, fence: Fence, ended: Mapping[str, Any]) -> None:
        """Add one server's fence, by its answers to the begin and the end of the publish."""
        self.fence_seconds = max(self.fence_seconds, float(ended.get("fence_seconds", 0.0)))
        self.loss_seconds += float(ended.get("loss_seconds", 0.0))
        self.expected_loss_seconds += float(ended.get("expected_loss_seconds", 0.0))
        self.recomputed_tokens += int(ended.get("recomputed_tokens", 0))
        self.generated_tokens += max(0, fence.generated_tokens_total - server.generated_tokens_total)
        self.paused_requests += fence.paused_requests
        self.server_count += 1
        server.generated_tokens_total = fence.generated_tokens_total

    def add(self, other: Cost) -> None:
        """Add the cost of a further exchange of the same publish."""
        for each in fields(other):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def report(self, version: int, seconds: float, servers: tuple[str, ...] | None = None) -> PublishReport:
        """Return the report of a publish with this cost."""
        costs = asdict(self) | {"server_count": max(1, self.server_count)}
        return PublishReport(version=version, seconds=seconds, servers=servers, **costs)


class WeightBridge(Protocol):
    """The interface between the training loop and the server: it loads the policy and publishes new weights."""

    def prepare(self) -> Policy:
        """Wait for the server, in modes that need one already running, and load the policy."""

    def publish(self, version: int) -> PublishReport:
        """Make the masters, as they are now, the served policy under this version; return once the server serves it.

        A forward from the masters may run meanwhile, an optimizer step may not.
        """

    def highest_version(self) -> int:
        """Return the highest version the server has had, 0 if none; the next published version must be above it."""

    def should_publish(self, steps_since_publish: int) -> bool:
        """Return True if a publish is due after this many optimizer steps without one, by default after each."""
        return steps_since_publish > 0

    def needs_publish(self) -> bool:
        """Return True if the server serves nothing until the next publish; cheap, never raises."""

    def close(self) -> None:
        """Disconnect from the server, and stop it if the bridge started it."""

    def notify_update(self) -> PublishReport:
        """Publish the changed masters under the next version, for callers that keep no version count of their own."""
        return self.publish(self.highest_version() + 1)
