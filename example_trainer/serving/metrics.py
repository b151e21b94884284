"""Our metrics of the inference server, which its `/metrics` shows beside vLLM's (`vllm:...`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.metrics_core import Metric as Family

from atropos_api.common.prometheus import Metric, build_info
from example_trainer.serving.state import ServerState

PREFIX: Final = "atropos_server_"

FENCE: Final = Metric(
    "fence_seconds", "summary", "Time for which publishes held new requests, and their number; adapters need no fence"
)

METRICS: Final = (
    FENCE,
    Metric(
        "fence_loss_seconds_total",
        "counter",
        "Generation time that publishes have cost by draining and recomputing, under --in-flight auto",
    ),
    Metric(
        "fence_expected_loss_seconds_total",
        "counter",
        "The same time, as expected when each publish chose how long to drain",
    ),
    Metric("policy_version", "gauge", "Version under which tokens are sampled now"),
    Metric("ready", "gauge", "1 while requests for tokens are accepted, as at /readyz"),
    Metric("paused", "gauge", "1 during a publish, while paused by hand and while the weights are torn"),
    Metric("weights_torn", "gauge", "1 while the weights are partly overwritten, so that nothing is served"),
    Metric("asleep", "gauge", "1 while the weights are in host memory, so that nothing is served"),
    Metric("requests_in_flight", "gauge", "Requests for tokens that are being answered"),
    Metric("adapters", "gauge", "Adapters that are loaded"),
)


class ServerMetrics:
    """A collector of the state of one server, for the registry that vLLM's `/metrics` renders."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def collect(self) -> Iterator[Family]:
        state = self._state
        values: dict[str, float] = {
            "fence_loss_seconds_total": state.fence.loss_seconds,
            "fence_expected_loss_seconds_total": state.fence.expected_loss_seconds,
            "ready": not state.gate.refuses,
            "paused": state.fence.paused,
            "weights_torn": state.fence.torn,
            "asleep": state.sleeping,
            "requests_in_flight": state.gate.inside,
            "adapters": state.adapters.count,
        }
        if state.policy_version is not None:
            values["policy_version"] = state.policy_version
        yield build_info()
        yield FENCE.summary(PREFIX, count=state.fence.publishes, total=state.fence.fence_seconds)
        for metric in METRICS:
            if metric.name in values:
                yield metric.family(PREFIX, values[metric.name])
