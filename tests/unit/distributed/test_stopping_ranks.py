"""A stop that reaches rank 0 alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from example_trainer.config import TrainingConfig
from example_trainer.distributed.ranks import Ranks
from example_trainer.monitoring.trackers import RunTrackers
from example_trainer.trainers import Trainer


class Leader(Ranks):
    """Rank 0, which keeps what it tells the others."""

    world_size = 2

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_main(self, action: Callable[[], Any]) -> Any:
        self.told.append(action())
        return self.told[-1]


class Follower(Ranks):
    """Rank 1, which hears what rank 0 told."""

    rank, world_size = 1, 2

    def __init__(self, told: list[Any]) -> None:
        self._told = iter(told)

    def on_main(self, action: Callable[[], Any]) -> Any:
        return next(self._told)


class Feed:
    """A feed that has these batches."""

    def __init__(self, *batches: Any) -> None:
        self._batches = list(batches)

    def take(self, number: int) -> Any:
        assert self._batches, "a rank waits for a batch that nobody fills"
        return self._batches.pop(0)


def take(ranks: Ranks, *batches: Any) -> Any:
    trainer = Trainer(
        TrainingConfig(model_name="m", run_dir="r"),
        session=None,  # type: ignore[arg-type]  # no call needs it
        bridge=None,  # type: ignore[arg-type]
        trackers=RunTrackers(Path("r"), ()),
        ranks=ranks,
    )
    return trainer._take(1, Feed(*batches))  # type: ignore[arg-type]


def test_no_rank_waits_for_a_batch_after_a_stop_that_only_rank_0_has_heard() -> None:
    leader = Leader()
    assert take(leader, None) is None
    assert take(Follower(leader.told)) is None


def test_each_rank_takes_its_share_once_rank_0_has_its_own() -> None:
    leader = Leader()
    assert take(leader, "share of rank 0") == "share of rank 0"
    assert take(Follower(leader.told), "share of rank 1") == "share of rank 1"
