"""The trainer's exit code tells a broker that is gone, which a new start waits for, from what no new start mends."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from atropos_api.client import BrokerRefused, BrokerUnreachable
from atropos_api.common.errors import OUTAGE, AtroposError
from example_trainer import cli
from example_trainer.config import TrainingConfig
from example_trainer.distributed.ranks import Ranks
from example_trainer.errors import STOPPED_BY_HEALTH, BadBatch, PublishFailed, WaitTimedOut

GONE = BrokerUnreachable("Atropos API not reachable")
NO_SERVER = WaitTimedOut("waited 600 s for the vLLM server")


def end_with(
    error: AtroposError | Callable[[], None],
    method: str,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    stopped_by: Mock | None = None,
    begun: bool = True,
    resume: str | None = None,
) -> int:
    trainer = Mock(**{f"{method}.side_effect": error, "stopped_by": stopped_by})
    monkeypatch.setattr("example_trainer.trainers.Trainer", lambda *_, **__: trainer)
    monkeypatch.setattr(cli, "_bridge", Mock())
    config = TrainingConfig(model_name="model", run_dir=run_dir, resume=resume)
    return cli._train_in(Mock(begun=Mock() if begun else None), config, Ranks(), Mock())


@pytest.mark.parametrize(
    ("error", "method"),
    [(GONE, "train"), (BrokerRefused({"detail": "the disk is full"}, 503), "train"), (GONE, "set_up")],
)
def test_a_run_that_loses_its_broker_ends_with_a_code_after_which_it_is_started_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: AtroposError,
    method: str,
) -> None:
    """It ended with 2 as a refused setting does, and the launcher gave up a run that could go on.

    So did one that lost its broker a second time, while it loaded the policy or published its first version.
    """
    assert end_with(error, method, tmp_path, monkeypatch) == OUTAGE == 75
    assert f"atropos-grpo: error: {error}\n" in capsys.readouterr().err


def test_a_run_that_goes_on_and_finds_no_broker_is_started_again_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that its launcher had started again ended with 2 if the broker was still away."""
    assert end_with(GONE, "set_up", tmp_path, monkeypatch, begun=False, resume="auto") == OUTAGE


@pytest.mark.parametrize(("method", "resume"), [("train", None), ("set_up", "auto")])
def test_a_run_whose_inference_server_stays_away_is_started_again_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, resume: str | None
) -> None:
    """It ended with 2 while the launcher was about to start the server again."""
    assert end_with(NO_SERVER, method, tmp_path, monkeypatch, resume=resume) == OUTAGE


@pytest.mark.parametrize(
    ("error", "method", "begun"),
    [
        (GONE, "set_up", False),
        (NO_SERVER, "set_up", True),
        (PublishFailed("the server refuses"), "train", True),
        (BadBatch("no tokens"), "train", True),
        (BrokerRefused({}, 409), "train", True),
    ],
)
def test_what_a_new_start_does_not_mend_stays_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: AtroposError, method: str, begun: bool
) -> None:
    with pytest.raises(type(error)):
        end_with(error, method, tmp_path, monkeypatch, begun=begun)


def test_a_run_that_is_stopped_and_loses_its_broker_on_the_way_ends_as_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last checkpoint was written, but could not be committed: it exited with 75."""

    def train() -> None:
        signal.raise_signal(signal.SIGTERM)
        raise GONE

    assert end_with(train, "train", tmp_path, monkeypatch) == 128 + signal.SIGTERM


def test_a_run_that_a_sign_of_trouble_ends_stays_ended_when_its_broker_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert end_with(GONE, "train", tmp_path, monkeypatch, stopped_by=Mock()) == STOPPED_BY_HEALTH
