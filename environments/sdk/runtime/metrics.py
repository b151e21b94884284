"""The metrics of an environment server for Prometheus (`--env.metrics_port`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import TYPE_CHECKING, Final

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family

from atropos_api.common.prometheus import Metric

if TYPE_CHECKING:
    from atropos_api.wire.messages import Pacing
    from environments.sdk.environment import Environment

PREFIX: Final = "atropos_environment_"

ROLLOUTS: Final = Metric(
    "rollout_seconds", "histogram", "Time from an item's first attempt to its group or its end", ("outcome",)
)

METRICS: Final = (
    ROLLOUTS,
    Metric("retries_total", "counter", "Attempts at an item that failed and were repeated"),
    Metric("members_redrawn_total", "counter", "Rollouts of groups that were late or failed and were drawn again"),
    Metric("members_absent_total", "counter", "Rollouts without which groups were closed"),
    Metric("groups_sent_total", "counter", "Groups that were sent to the broker"),
    Metric("groups_dropped_total", "counter", "Groups and items that were dropped instead of sent", ("reason",)),
    Metric("sampled_tokens_total", "counter", "Tokens of the sent groups that the model sampled and that are trained"),
    Metric("rollouts_in_progress", "gauge", "Items whose rollouts are in progress"),
    Metric("unsent_groups", "gauge", "Groups that the broker has not acknowledged yet"),
    Metric("room_sequences", "gauge", "Sequences that the broker lets this environment have in flight; 0: it pauses"),
    Metric("requests_in_flight", "gauge", "Requests to inference servers that are in progress"),
    Metric("servers_up", "gauge", "Inference servers that answer"),
    Metric("step", "gauge", "Trainer step that the environment knows"),
    Metric("policy_version", "gauge", "Version of the published policy that the environment knows"),
    Metric("evaluation", "gauge", "Results of the newest evaluation", ("metric",)),
)

_BY_NAME: Final[Mapping[str, Metric]] = {metric.name: metric for metric in METRICS}


@dataclass(eq=False)
class EnvironmentMetrics:
    """The metrics of one environment; `running`, `unsent` and `pacing` tell the state of its worker."""

    env: Environment
    _: KW_ONLY
    running: Callable[[], int]
    unsent: Callable[[], int]
    pacing: Callable[[], Pacing | None]

    def collect(self) -> Iterator[Family]:
        """Yield all metrics, measured now; called in the thread that serves them."""
        rollouts = self.env.metrics.totals
        histogram = HistogramMetricFamily(PREFIX + ROLLOUTS.name, ROLLOUTS.meaning, labels=ROLLOUTS.labels)
        for outcome, seconds in (("succeeded", rollouts.succeeded), ("failed", rollouts.failed)):
            buckets = [
                ("+Inf" if bound == math.inf else f"{bound:g}", float(count)) for bound, count in seconds.cumulative()
            ]
            histogram.add_metric((outcome,), buckets, seconds.total_seconds)
        yield histogram
        for name, value in self._values().items():
            yield _BY_NAME[name].family(PREFIX, value)
        dropped = [((reason,), float(count)) for reason, count in dict(self.env.dropped_groups.counts).items()]
        yield _BY_NAME["groups_dropped_total"].family(PREFIX, *dropped)
        yield _BY_NAME["evaluation"].family(PREFIX, *self._evaluation())

    def _values(self) -> dict[str, float]:
        servers = self.env.server.servers
        values: dict[str, float] = {
            "retries_total": self.env.metrics.totals.retried,
            "members_redrawn_total": self.env.metrics.totals.redrawn,
            "members_absent_total": self.env.metrics.totals.absent,
            "groups_sent_total": self.env.dropped_groups.sent,
            "sampled_tokens_total": self.env.metrics.totals.sampled_tokens,
            "rollouts_in_progress": self.running(),
            "unsent_groups": self.unsent(),
            "requests_in_flight": sum(server.in_flight for server in servers),
            "servers_up": sum(server.channel.up for server in servers),
        }
        pacing = self.pacing()
        if pacing is not None:
            values |= {"room_sequences": pacing.room_sequences, "step": pacing.current_step}
            if pacing.policy_version is not None:
                values["policy_version"] = pacing.policy_version
        return values

    def _evaluation(self) -> list[tuple[tuple[str, ...], float]]:
        result = self.env.last_evaluation
        found = {} if result is None else result.all_metrics()
        return [((name,), float(value)) for name, value in found.items() if isinstance(value, Real)]
