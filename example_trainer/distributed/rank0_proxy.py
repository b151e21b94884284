"""Broker session and weight bridge of a run with several ranks: rank 0 makes the calls for all of them.

The training loop is the same on every rank. Each call to the broker or the bridge is made once, by rank 0, and all
ranks get the result, so that they decide the same. Batches are the exception: each rank fetches its own slice of whole
groups from the broker, in a thread of its own.

Sharded weights are broadcast one bucket at a time, which all ranks gather. A publish may be repeated after a failure of
a server, so the other ranks cannot know how often each bucket is gathered. Before any work in which all take part, rank
0 sends them a message that names it; the last one holds the result or the error of the whole publish. So the order of
collective operations is the same on all ranks, whatever rank 0 repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch
from torch import Tensor

from atropos_api.client import BrokerClient
from atropos_api.wire import Batch, RunInfo, RunRequest
from example_trainer.api import LONG_POLL_SECONDS, BrokerSession
from example_trainer.distributed.ranks import Ranks
from example_trainer.errors import RanksFailed, WaitStopped
from example_trainer.modeling.policy import Policy
from example_trainer.weight_protocol.buckets import BUCKET_BYTES
from example_trainer.weights.base import PublishReport, WeightBridge
from example_trainer.weights.logprob_parity import Agreement, Difference, ProbeSample
from example_trainer.weights.weight_source import WeightSource

if TYPE_CHECKING:
    from example_trainer.modeling.loading import PolicyOptions

AnswerT = TypeVar("AnswerT")

_GATHER, _COMPARE, _END = "gather", "compare", "end"


class RankedSession(BrokerSession):
    """A `BrokerSession` shared by all ranks."""

    def __init__(self, client: BrokerClient, ranks: Ranks, *, all_see_whole: bool = False) -> None:
        """Keep the arguments; with `all_see_whole` every rank, not only rank 0, fetches whole batches too."""
        super().__init__(client, rank=ranks.data.rank, world_size=ranks.data.world_size)
        self._ranks = ranks
        self._sees_whole = all_see_whole or ranks.is_main

    def refuse_unknown_host(self) -> None:
        self._ranks.on_main(super().refuse_unknown_host)

    def wait_until_ready(self, timeout_seconds: float) -> None:
        self._ranks.on_main(partial(super().wait_until_ready, timeout_seconds))

    def begin(self, request: RunRequest) -> RunInfo:
        begin = super().begin
        self._info = RunInfo(**self._ranks.on_main(lambda: msgspec.structs.asdict(begin(request))))
        return self._info

    def announce_policy(
        self, version: int, step: int, policy_name: str | None = None, servers: Sequence[str] | None = None
    ) -> None:
        self._ranks.on_main(partial(super().announce_policy, version, step, policy_name, servers))

    def held_seconds(self, wait_seconds: float = 0.0) -> float:
        return self._ranks.on_main(partial(super().held_seconds, wait_seconds))

    def commit(self, number: int) -> None:
        self._ranks.on_main(partial(super().commit, number))

    def finish(self) -> None:
        self._ranks.on_main(super().finish)

    def whole_batch(self, batch: Batch) -> Batch:
        """Return the whole batch of which `batch` is this rank's slice; the slice itself if this rank needs no more."""
        if not self._sees_whole:
            return batch
        whole = self._client.get_batch(
            batch.number,
            run_id=self.info.run_id,
            epoch=self.info.epoch,
            wait_seconds=LONG_POLL_SECONDS,
            arrays=True,
        )
        return batch if whole is None else whole


class RankedBridge(WeightBridge):
    """A `WeightBridge` for several ranks: rank 0's bridge serves the weights that all of them train."""

    def __init__(
        self, inner: WeightBridge | None, options: PolicyOptions, ranks: Ranks, *, by_bucket: bool = False
    ) -> None:
        """Keep the arguments; with `by_bucket` rank 0's bridge gathers sharded weights itself, one bucket at a time."""
        self._inner = inner
        """The bridge of rank 0; None on the other ranks."""
        self._by_bucket = by_bucket
        self._source: WeightSource | None = None
        """The part of another rank in publishes by bucket."""
        self._options = options
        self._ranks = ranks
        self._policy: Policy | None = None

    def prepare(self) -> Policy:
        from example_trainer.model import load_policy

        if self._inner is None:
            self._policy = load_policy(self._options)
        if self._options.sharding is not None:  # all ranks load together: no message can be sent meanwhile
            self._policy = self._policy or self._main.prepare()
        else:
            self._ranks.on_main(self._prepare_main)
        assert self._policy is not None
        if self._by_bucket and self._inner is None:
            self._source = WeightSource(self._policy)
        if not self._policy.is_sharded:
            self._ranks.copy_from_main(self._policy.masters.values())
        return self._policy

    def publish(self, version: int) -> PublishReport:
        """Publish at rank 0; the other ranks send it their shards of the weights and wait."""
        assert self._policy is not None, "prepare() comes first"
        if self._source is not None:
            return join_publish(self._ranks, self._source)
        if self._by_bucket:
            return publish_on_rank0(self._ranks, self._main, version)
        with self._policy.gathered():
            return _read_outcome(self._call_main(lambda bridge: _outcome(bridge, version)))

    def highest_version(self) -> int:
        return self._call_main(lambda bridge: bridge.highest_version())

    def should_publish(self, steps_since_publish: int) -> bool:
        return self._call_main(lambda bridge: bridge.should_publish(steps_since_publish))

    def needs_publish(self) -> bool:
        """Return the answer of rank 0's bridge; called on rank 0 only, while the other ranks wait for a message."""
        return self._main.needs_publish()

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()

    def _prepare_main(self) -> None:
        """Prepare rank 0's bridge; if its server refuses or does not answer in time, the other ranks get the error."""
        self._policy = self._main.prepare()

    def _call_main(self, call: Callable[[WeightBridge], AnswerT]) -> AnswerT:
        return self._ranks.on_main(lambda: call(self._main))

    @property
    def _main(self) -> WeightBridge:
        assert self._inner is not None, "only rank 0 has a bridge of its own"
        return self._inner


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
    _, outcome = ranks.on_main(lambda: (_END, _outcome(bridge, version)))
    return _read_outcome(outcome)


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
            return _read_outcome(value)


def _outcome(bridge: WeightBridge, version: int) -> dict[str, Any] | str:
    """Publish; return the report's fields, or the reason why the publish ended without one when the run is stopped.

    That is no failure: every rank goes on, and takes part in the checkpoint.
    """
    try:
        return asdict(bridge.publish(version))
    except WaitStopped as stopped:
        return str(stopped)


def _read_outcome(outcome: dict[str, Any] | str) -> PublishReport:
    if isinstance(outcome, str):
        raise WaitStopped(outcome)
    return PublishReport(**outcome)


@contextmanager
def _failing_together() -> Iterator[None]:
    """Raise `RanksFailed` for a failed gather: it is not repeated, since a rank that is gone does not come back."""
    try:
        yield
    except RuntimeError as error:
        raise RanksFailed(f"the ranks could not gather the weights for a publish, so the run ends: {error}") from error


def _no_message() -> tuple[str, Any]:
    raise AssertionError("rank 0 publishes and does not join")
