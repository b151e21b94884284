"""The process's version and its use of the machine, by the names that Prometheus' own clients use."""

from __future__ import annotations

import platform
import resource
from collections.abc import Iterator
from typing import Final, NamedTuple

import psutil

BUILD_INFO: Final = "atropos_build_info"


class ProcessMetric(NamedTuple):
    """A metric that every program has, with its kind and its meaning."""

    name: str
    kind: str
    meaning: str


PROCESS_METRICS: Final = (
    ProcessMetric(BUILD_INFO, "gauge", "1; its labels are the versions of the broker and of Python"),
    ProcessMetric("process_cpu_seconds_total", "counter", "User and system CPU time of the broker's process"),
    ProcessMetric("process_resident_memory_bytes", "gauge", "Memory that the process holds in RAM"),
    ProcessMetric("process_virtual_memory_bytes", "gauge", "Addresses that the process has mapped"),
    ProcessMetric("process_open_fds", "gauge", "Open files and connections"),
    ProcessMetric("process_max_fds", "gauge", "As many as it may have open"),
    ProcessMetric("process_start_time_seconds", "gauge", "When the process started, in seconds since 1970"),
)


def render_process(version: str) -> Iterator[str]:
    """The lines of these metrics."""
    values = _measure()
    for metric in PROCESS_METRICS:
        sample = metric.name
        if metric.name == BUILD_INFO:
            sample += f'{{version="{version}",python="{platform.python_version()}"}}'
        yield f"# HELP {metric.name} {metric.meaning}\n# TYPE {metric.name} {metric.kind}\n"
        yield f"{sample} {values.get(metric.name, 1)}\n"


def _measure() -> dict[str, float]:
    process = psutil.Process()
    with process.oneshot():
        times, memory = process.cpu_times(), process.memory_info()
        return {
            "process_cpu_seconds_total": times.user + times.system,
            "process_resident_memory_bytes": memory.rss,
            "process_virtual_memory_bytes": memory.vms,
            "process_open_fds": process.num_fds(),
            "process_max_fds": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "process_start_time_seconds": process.create_time(),
        }
