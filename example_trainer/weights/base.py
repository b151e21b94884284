"""The weight bridge: the one object in which the training modes differ.

The training loop gets a policy from it, publishes a version after a step, and closes it at the end. The transfer of the
weights (shared tensors, a restart) is hidden behind this protocol. Order of a run: `prepare()`; then the masters may be
overwritten from a checkpoint; then the run's first version, above both `highest_version()` and the broker's last one,
is published before anything can be sampled, and that publish runs the logprob parity check. From then on `publish`
follows the steps for which `should_publish` is true. While the loop waits for rollouts it calls `needs_publish` every
few seconds: a server that has restarted serves nothing until the current masters are published again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from example_trainer.modeling.policy import Policy


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


class WeightBridge(Protocol):
    """The interface between the training loop and the server: it loads the policy and publishes new weights."""

    def prepare(self) -> Policy:
        """Wait for the server, in modes that need one already running, and load the policy."""
        ...

    def publish(self, version: int) -> PublishReport:
        """Make the masters, as they are now, the served policy under this version; return once the server serves it.

        A forward from the masters may run meanwhile, an optimizer step may not.
        """
        ...

    def highest_version(self) -> int:
        """Return the highest version the server has had, 0 if none; the next published version must be above it."""
        ...

    def should_publish(self, steps_since_publish: int) -> bool:
        """Return True if a publish is due after this many optimizer steps without one."""
        ...

    def needs_publish(self) -> bool:
        """Return True if the server serves nothing until the next publish; cheap, never raises."""
        ...

    def close(self) -> None:
        """Disconnect from the server, and stop it if the bridge started it."""
        ...

    def notify_update(self) -> PublishReport:
        """Publish the changed masters under the next version, for callers that keep no version count of their own."""
        return self.publish(self.highest_version() + 1)
