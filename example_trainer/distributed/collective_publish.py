"""Publishes of sharded weights by broadcast: rank 0 decides what all ranks do next, and the others follow.

A publish may be repeated after a failure of a server, so the other ranks cannot know how often each bucket is gathered.
Before any work in which all take part, rank 0 sends them a message that names it; the last one holds the result or the
error of the whole publish. So the order of collective operations is the same on all ranks, whatever rank 0 repeats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from example_trainer.distributed.ranks import Ranks
from example_trainer.errors import RanksFailed
from example_trainer.modeling.policy import Policy
from example_trainer.weight_protocol.buckets import BUCKET_BYTES
from example_trainer.weights.base import PublishReport, WeightBridge
from example_trainer.weights.logprob_parity import Agreement, Difference, ProbeSample
from example_trainer.weights.weight_source import WeightSource

_GATHER, _COMPARE, _END = "gather", "compare", "end"


class CollectiveWeightSource(WeightSource):
    """Rank 0's `WeightSource`: it makes the other ranks take part in each call."""

    def __init__(self, ranks: Ranks, policy: Policy, *, limit_bytes: int = BUCKET_BYTES) -> None:
        super().__init__(policy, limit_bytes=limit_bytes)
        self._ranks = ranks

    def packed(self, number: int, device: torch.device) -> Tensor:
        self._ranks.on_main(lambda: (_GATHER, number))
        with _failing_together():
            return super().packed(number, device)

    def compare(self, samples: Sequence[ProbeSample], limit: Difference | None) -> Agreement:
        known = None if limit is None else asdict(limit)
        self._ranks.on_main(lambda: (_COMPARE, (list(samples), known)))
        return super().compare(samples, limit)


def publish_on_rank0(ranks: Ranks, bridge: WeightBridge, version: int) -> PublishReport:
    """Publish on rank 0, whose bridge reads a `CollectiveWeightSource`; send the other ranks its outcome."""
    _, report = ranks.on_main(lambda: (_END, asdict(bridge.publish(version))))
    return PublishReport(**report)


def join_publish(ranks: Ranks, source: WeightSource) -> PublishReport:
    """Take part in rank 0's publish, on any other rank; raise `RanksFailed` with rank 0's error."""
    while True:
        task, value = ranks.on_main(_no_message)
        if task == _GATHER:
            with _failing_together():
                source.help_gather(value)
        elif task == _COMPARE:
            samples, limit = value
            source.compare(samples, None if limit is None else Difference(**limit))
        else:
            return PublishReport(**value)


@contextmanager
def _failing_together() -> Iterator[None]:
    """Raise `RanksFailed` for a failed gather: it is not repeated, since a rank that is gone does not come back."""
    try:
        yield
    except RuntimeError as error:
        raise RanksFailed(f"the ranks could not gather the weights for a publish, so the run ends: {error}") from error


def _no_message() -> tuple[str, Any]:
    raise AssertionError("rank 0 publishes and does not join")
