"""`atroposlib.utils.metrics`: four statistics of a list under one name."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

__all__ = ["get_std_min_max_avg"]


def get_std_min_max_avg(name: str, data: Sequence[float], metrics_dict: dict[str, Any]) -> dict[str, Any]:
    """Add mean, standard deviation, maximum and minimum of `data` to the metrics."""
    metrics_dict |= {
        f"{name}_mean": statistics.fmean(data),
        f"{name}_std": statistics.pstdev(data),
        f"{name}_max": max(data),
        f"{name}_min": min(data),
    }
    return metrics_dict
