"""A stop, or the loss of the broker, that reaches rank 0 alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atropos_api.client import BrokerUnreachable
from atropos_api.common.errors import AtroposError
from example_trainer import model
from example_trainer.api import ends_batches
from example_trainer.config import TrainingConfig
from example_trainer.distributed.rank0_proxy import RankedBridge
from example_trainer.distributed.ranks import Ranks
from example_trainer.errors import CannotSwap
from example_trainer.modeling.loading import PolicyOptions
from example_trainer.monitoring.trackers import RunTrackers
from example_trainer.trainers import Trainer

from .ranks import run_ranks


class Leader(Ranks):
    """Rank 0, which keeps what it tells the others."""

    world_size = 2

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_main(self, action: Callable[[], Any]) -> Any:
        try:
            self.told.append(action())
        except BrokerUnreachable as error:
            self.told.append(error)
            raise
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
        if isinstance(self._batches[0], Exception):
            raise self._batches[0]
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


def test_the_others_are_told_that_rank_0_gets_no_batch() -> None:
    """Each needs to know, because each has a part of the checkpoint that is written then."""
    leader = Leader()
    with pytest.raises(BrokerUnreachable):
        take(leader, BrokerUnreachable("nothing answers"))
    assert [type(each) for each in leader.told] == [BrokerUnreachable]


def test_each_rank_takes_its_share_once_rank_0_has_its_own() -> None:
    leader = Leader()
    assert take(leader, "share of rank 0") == "share of rank 0"
    assert take(Follower(leader.told), "share of rank 1") == "share of rank 1"


def lose_the_broker(ranks: Ranks) -> list[Any]:
    """Return what this rank knows of an outage within another exchange, and the ranks that exchange something then."""

    def announce() -> str:
        raise BrokerUnreachable("nothing answers")

    try:
        ranks.on_main(lambda: ranks.on_main(announce))
    except AtroposError as error:
        return [ends_batches(error), ranks.have_heard(error), ranks.gather(ranks.rank)]
    raise AssertionError("the outage was not raised")


def test_after_an_outage_that_rank_0_met_all_ranks_can_still_write_a_checkpoint_together(tmp_path: Path) -> None:
    """A run of several processes with --checkpoint-interval 0 lost all of its steps."""
    assert run_ranks(2, tmp_path / "meeting", lose_the_broker) == [[True, True, [0, 1]]] * 2


def prepare_adapters(ranks: Ranks) -> str:
    """Return the error of this rank, if rank 0's server takes no adapters."""

    def refuse() -> None:
        raise CannotSwap("the server takes no adapters")

    model.load_policy = lambda _: SimpleNamespace(is_sharded=False)
    inner: Any = SimpleNamespace(prepare=refuse) if ranks.is_main else None
    try:
        RankedBridge(inner, PolicyOptions(model_name="m"), ranks).prepare()
    except AtroposError as error:
        return str(error)
    return "none"


def test_the_others_are_told_that_rank_0s_server_is_unfit(tmp_path: Path) -> None:
    """They waited for its weights until it had ended, and then with a traceback that hid the reason."""
    own, told = run_ranks(2, tmp_path / "meeting", prepare_adapters)
    assert own == "the server takes no adapters"
    assert told == f"rank 0 has failed, so rank 1 stops too: CannotSwap: {own}"
