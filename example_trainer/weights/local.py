"""A bridge to nowhere: loads the policy and serves it to nobody.

For training on recorded batches and for tests of the loop, where no server is in sight.
"""

from __future__ import annotations

from example_trainer.model import Policy, PolicyOptions, load_policy
from example_trainer.weights.bridge import PublishReport, WeightBridge


class LocalBridge(WeightBridge):
    """Implements `WeightBridge` without a server; a publish only counts."""

    def __init__(self, options: PolicyOptions) -> None:
        self._options = options
        self.published_versions: list[int] = []

    def prepare(self) -> Policy:
        return load_policy(self._options)

    def publish(self, version: int) -> PublishReport:
        self.published_versions.append(version)
        return PublishReport(version=version, seconds=0.0)

    def highest_version(self) -> int:
        return max(self.published_versions, default=0)

    def should_publish(self, steps_since_publish: int) -> bool:
        return steps_since_publish > 0

    def needs_publish(self) -> bool:
        return False

    def close(self) -> None:
        return None
