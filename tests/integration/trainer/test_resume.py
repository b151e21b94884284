"""A run that breaks off before its first checkpoint continues as the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from example_trainer.checkpointing import find_checkpoint, list_checkpoints
from example_trainer.errors import CheckpointError
from example_trainer.step import train_step
from example_trainer.testing import ServingBridge
from example_trainer.trainers import Trainer
from example_trainer.weights.base import PublishReport

from .conftest import Workbench


class DyingBridge(ServingBridge):
    """A bridge whose publish after `last_version` raises."""

    last_version = 3

    def publish(self, version: int) -> PublishReport:
        if version > self.last_version:
            raise ZeroDivisionError
        return super().publish(version)


@pytest.mark.parametrize("interval", [0, 10], ids=["committed as it went", "nothing committed"])
def test_before_the_first_checkpoint_it_begins_again_as_the_same_run_and_logs_each_step_once(
    bench: Workbench, tmp_path: Path, interval: int
) -> None:
    steps = 4
    bench.submit(bench.record_groups(2 * steps if interval else 2 * steps + 2 * DyingBridge.last_version))
    config = bench.config(training_steps=steps, checkpoint_interval=interval, resume="auto")
    with pytest.raises(ZeroDivisionError):
        bench.trainer(config, DyingBridge(bench.options)).run()
    assert list_checkpoints(config.checkpoint_root) == []
    run = bench.sessions[-1].info
    bridge = bench.bridge()
    assert bench.trainer(config, bridge).run()
    assert bench.sessions[-1].info.run_id == run.run_id
    assert [line["step"] for line in bench.metrics(config)] == list(range(1, steps + 1))
    # The version of the interrupted publish is never used for other weights: a client may have received it.
    assert bridge.published[0][0] == DyingBridge.last_version + 2


def test_a_directory_in_which_nothing_has_begun_begins_a_run_of_its_own(bench: Workbench, tmp_path: Path) -> None:
    bench.submit(bench.record_groups(4))
    settings = {"training_steps": 2, "resume": "auto"}
    assert bench.trainer(bench.config(run_dir=tmp_path / "one", **settings), bench.bridge()).run()
    first = bench.sessions[-1].info.run_id
    bench.submit(bench.record_groups(4, seed=1))
    assert bench.trainer(bench.config(run_dir=tmp_path / "two", **settings), bench.bridge()).run()
    assert bench.sessions[-1].info.run_id != first


def test_a_crash_between_checkpoint_and_log_leaves_no_gap_in_the_metrics(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.submit(bench.record_groups(8))
    config = bench.config(checkpoint_interval=1, resume="auto", health_limits=["clipped_fraction=-1"])
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_log", _dying_at(2))
        with pytest.raises(ZeroDivisionError):
            bench.trainer(config, bench.bridge()).run()
    assert [line["step"] for line in bench.metrics(config)] == [1]
    assert bench.trainer(config, bench.bridge()).run()
    lines = bench.metrics(config)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    of_the_crash = ("time/", "sync/", "perf/", "staleness/age", "policy_version")
    assert [name for name in lines[2].keys() - lines[1].keys() if not name.startswith(of_the_crash)] == []
    events = (config.required_run_dir / "events.jsonl").read_text()
    assert events.count('"sign": "clipped_fraction"') == 1  # it was there before and after: nothing new


def test_a_run_that_went_back_and_ended_at_once_goes_back_again_unless_it_was_refused(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.submit(bench.record_groups(8))
    config = bench.config(checkpoint_interval=2)
    assert bench.trainer(config, bench.bridge()).run()
    back, last = list_checkpoints(config.checkpoint_root)
    gone_back = config.model_copy(update={"resume": str(back)})

    def refuse(*_: Any, **__: Any) -> None:
        raise CheckpointError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(train_step, "restore", refuse)
        with pytest.raises(CheckpointError, match="refused"):
            bench.trainer(gone_back, bench.bridge()).set_up()
    assert find_checkpoint("auto", config.checkpoint_root) == last
    ended = bench.trainer(gone_back, bench.bridge())
    ended.set_up()
    ended._tracker.close()
    assert find_checkpoint("auto", config.checkpoint_root) == back


def _dying_at(last_step: int) -> Any:
    log = Trainer._log

    def dying(self: Trainer, step: int, metrics: dict[str, float]) -> Any:
        if step == last_step:
            raise ZeroDivisionError
        return log(self, step, metrics)

    return dying
