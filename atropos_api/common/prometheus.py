"""Prometheus metrics of every program: the tables they are declared in, those of the process, and an endpoint for them.

Names have base units (`_seconds`, `_bytes`), and counters end in `_total`. A program declares each metric in a table,
from which its collector makes samples and its reference page a row. The broker and the inference server have a
`/metrics` route; trainer and environments serve theirs by `MetricsEndpoint`.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Final, Literal, NamedTuple

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.exposition import generate_latest, start_wsgi_server
from prometheus_client.metrics_core import Metric as Family

from atropos_api.common.errors import AtroposError
from atropos_api.common.identity import package_version

logger = logging.getLogger(__name__)

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Collect = Callable[[], Iterable[Family]]
"""A function that returns all metrics of a program, measured now."""


class MetricsPortUnusable(AtroposError):
    """Raised if the metrics port is taken, or its address does not belong to this machine."""


class Metric(NamedTuple):
    """A metric: its name without the program's prefix, its kind, its meaning and the names of its labels."""

    name: str
    kind: Literal["counter", "gauge", "histogram", "summary"]
    meaning: str
    labels: tuple[str, ...] = ()

    def family(self, prefix: str, *samples: float | tuple[tuple[str, ...], float]) -> Family:
        """Return a counter or gauge with these samples: values, or pairs of label values and value.

        Samples of equal labels are added up, since Prometheus keeps only one of them.
        """
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = kind(prefix + self.name, self.meaning, labels=self.labels)
        sums: dict[tuple[str, ...], float] = {}
        for sample in samples:
            values, value = sample if isinstance(sample, tuple) else ((), sample)
            sums[values] = sums.get(values, 0.0) + float(value)
        for values, value in sums.items():
            family.add_metric(values, value)
        return family

    def summary(self, prefix: str, *, count: int, total: float) -> Family:
        """Return a summary of `count` measurements that add up to `total`."""
        return SummaryMetricFamily(prefix + self.name, self.meaning, count_value=count, sum_value=total)


BUILD: Final = Metric(
    "atropos_build_info", "gauge", "1; its labels are the versions of the program and of Python", ("version", "python")
)

PROCESS_METRICS: Final = (
    BUILD,
    Metric("process_cpu_seconds_total", "counter", "User and system CPU time of the process"),
    Metric("process_resident_memory_bytes", "gauge", "Memory that the process holds in RAM"),
    Metric("process_virtual_memory_bytes", "gauge", "Addresses that the process has mapped"),
    Metric("process_open_fds", "gauge", "Open files and connections"),
    Metric("process_max_fds", "gauge", "Limit on open files and connections"),
    Metric("process_start_time_seconds", "gauge", "Start time of the process, in seconds since 1970"),
)
"""Metrics of every program, under the names that Prometheus' own clients use."""


def build_info() -> Family:
    return BUILD.family("", ((package_version(), platform.python_version()), 1.0))


def collect_process() -> Iterator[Family]:
    """Yield the metrics of this process."""
    yield build_info()
    yield from ProcessCollector(registry=None).collect()


class _Collector:
    def __init__(self, collect: Collect) -> None:
        self.collect = collect


def render(collect: Collect) -> bytes:
    """Return the metrics in Prometheus' text form."""
    return generate_latest(_Collector(collect))


class MetricsEndpoint:
    """An HTTP server for the metrics of a program that has no other, in a thread of its own."""

    def __init__(self, collect: Collect, *, host: str, port: int) -> None:
        """Listen at `host` and `port`; port 0 takes a free one."""

        def everything() -> Iterator[Family]:
            yield from collect_process()
            yield from collect()

        try:
            self._server, self._thread = start_wsgi_server(port, host, _Collector(everything))
        except OSError as error:
            raise MetricsPortUnusable(
                f"metrics_port {port}: cannot listen on {host}: {error.strerror}; choose another port"
            ) from error
        self.port: int = self._server.server_port
        logger.info("metrics at http://%s:%d/metrics", host, self.port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def serving_metrics(collect: Collect, host: str, port: int | None) -> Iterator[None]:
    """Serve the metrics inside the block; nothing happens if `port` is None."""
    if port is None:
        yield
        return
    with closing(MetricsEndpoint(collect, host=host, port=port)):
        yield


def table(metrics: Iterable[Metric], prefix: str = "") -> str:
    """Return the metrics as a Markdown table; label names follow in braces."""
    rows = "".join(f"| `{prefix}{one.name}{_braces(one.labels)}` | {one.kind} | {one.meaning} |\n" for one in metrics)
    return f"| name | kind | meaning |\n|---|---|---|\n{rows}"


def _braces(labels: Iterable[str]) -> str:
    joined = ",".join(labels)
    return f"{{{joined}}}" if joined else ""
