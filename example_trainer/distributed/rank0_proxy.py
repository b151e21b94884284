"""Broker session and weight bridge of a run with several ranks: rank 0 makes the calls for all of them.

The training loop is the same on every rank. Each call to the broker or the bridge is made once, by rank 0, and all
ranks get the result, so that they decide alike. Batches are the exception: each rank fetches its own slice of whole
groups from the broker, in a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec

from atropos_api.client import BrokerClient
from atropos_api.wire import Batch, RunInfo, RunRequest
from example_trainer.api import LONG_POLL_SECONDS, BrokerSession
from example_trainer.distributed.collective_publish import join_publish, publish_on_rank0
from example_trainer.distributed.ranks import Ranks
from example_trainer.weights.base import PublishReport, WeightBridge

if TYPE_CHECKING:
    from example_trainer.modeling.loading import PolicyOptions
    from example_trainer.modeling.policy import Policy
    from example_trainer.weights.weight_source import WeightSource

AnswerT = TypeVar("AnswerT")


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
        from example_trainer.weights.weight_source import WeightSource

        self._policy = load_policy(self._options) if self._inner is None else self._inner.prepare()
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
            return PublishReport(**self._call_main(lambda bridge: asdict(bridge.publish(version))))

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

    def _call_main(self, call: Callable[[WeightBridge], AnswerT]) -> AnswerT:
        return self._ranks.on_main(lambda: call(self._main))

    @property
    def _main(self) -> WeightBridge:
        assert self._inner is not None, "only rank 0 has a bridge of its own"
        return self._inner
