"""The end of a launch: what still runs is stopped in order, and nothing that was well done is called a failure."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from atropos_api.common.errors import OUTAGE
from environments.sdk.config import BaseEnvConfig
from example_trainer.launcher.launch import TRAINER_LAG_SECONDS, Launch, Stopwatch, _lag_of_trainer
from example_trainer.launcher.preflight import plan_launch
from example_trainer.launcher.programs import BROKER, TRAINER
from example_trainer.launcher.progress import Snapshot, answered_requests
from example_trainer.launcher.restarts import LONGEST_PAUSE_SECONDS
from example_trainer.launcher.run_file import read_settings
from example_trainer.launcher.stop_request import StopRequest
from example_trainer.launcher.supervisor import FAILURE_GRACE_SECONDS, Supervisor
from example_trainer.processes.child import ChildSpec
from example_trainer.processes.tree import wait_until

WAITS = "import time; time.sleep(600)"
FAILS_WITHOUT_BROKER = """
import psutil, sys, time
broker = psutil.Process(int(sys.argv[1]))
open(sys.argv[2], "w").close()
while broker.is_running() and broker.status() != "zombie":
    time.sleep(0.01)
sys.exit("BrokerUnreachable: nothing answers")
"""
WRITES_SLOWLY = """
import pathlib, signal, sys, time
def write(*_):
    time.sleep(float(sys.argv[2]))
    pathlib.Path(sys.argv[1], "written").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, write)
pathlib.Path(sys.argv[1], "trains").touch()
time.sleep(600)
"""


def planned(tmp_path: Path, *flags: str) -> Launch:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return plan_launch(read_settings(["--model-name", str(model), "--run-dir", str(tmp_path / "run"), *flags]))


def program(name: str, code: str, *arguments: str, ends: bool = True) -> ChildSpec:
    return ChildSpec(name=name, command=(sys.executable, "-c", code, *arguments), ends_by_itself=ends)


def test_an_environment_that_does_not_end_is_stopped_before_its_broker_and_spoils_no_picture(tmp_path: Path) -> None:
    launch = planned(tmp_path, "--env.server", "arithmetic_server.py")
    launch.run = launch.run.reserve().create()
    row = {"step": 1, "reward/mean": 0.5, "time/step": 0.1, "timestamp": time.time()}
    launch.run.metrics.write_text(json.dumps(row) + "\n")
    snapshot = Snapshot(name="x", run_dir=launch.run.root, total_steps=1, started_at=time.time())
    with Supervisor(launch.run.logs) as supervisor:
        broker = supervisor.start(program(BROKER, WAITS, ends=False))
        begun = tmp_path / "begun"
        supervisor.start(program("environment", FAILS_WITHOUT_BROKER, str(broker.process.pid), str(begun)))
        assert wait_until(begun.exists, 20)
        launch._conclude([], supervisor, snapshot, StopRequest())
    assert [note for note in launch.notes if "environment" in note] == []
    assert launch.run.plot.exists()


def test_a_full_disk_gives_the_trainer_the_time_of_a_stop_for_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(launch: Launch, plan: object, supervisor: Supervisor, *_: object) -> None:
        seconds = FAILURE_GRACE_SECONDS + 1.0
        supervisor.start(program(TRAINER, WRITES_SLOWLY, str(tmp_path), str(seconds)))
        assert wait_until((tmp_path / "trains").exists, 20)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Launch, "_train", fail)
    with pytest.raises(OSError, match="No space left"):
        planned(tmp_path, "--atropos-url", "http://broker:8000").go()
    assert (tmp_path / "written").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("step", "seconds", "told"),
    [(9, TRAINER_LAG_SECONDS, "waits for batches"), (10, 900.0, "not ended within 900 s after its last step")],
)
def test_a_trainer_that_has_trained_all_its_steps_does_not_wait_for_batches(
    tmp_path: Path, step: int, seconds: float, told: str
) -> None:
    config = planned(tmp_path, "--training-steps", "10", "--wait-timeout", "900").settings.trainer
    snapshot = Snapshot(name="x", run_dir=tmp_path, total_steps=10, started_at=0.0, rows=[{"step": step}])
    limit, words = _lag_of_trainer(snapshot, config)
    assert limit == seconds
    assert told in words


def test_a_final_evaluation_goes_on_while_a_server_answers_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of more than --wait-timeout (600 s) was cut off, and its figures were lost."""
    now = 1000.0
    monkeypatch.setattr("example_trainer.launcher.launch.time.monotonic", lambda: now)
    snapshot = Snapshot(name="x", run_dir=tmp_path, total_steps=1, started_at=0.0, callers={"e"})
    alone, seconds = Stopwatch(), []
    for answered in (None, 5, 9, 9):
        report = None if answered is None else {"servers": [{"requests": answered}]}
        snapshot.status = {"environments": [{"name": "e", "activity": report}, {"name": "of Atropos"}]}
        seconds.append(alone.seconds(True, answered_requests(snapshot)))
        now += 400.0
    assert seconds == [0.0, 0.0, 0.0, 400.0]
    assert alone.seconds(False, 9) == 0.0


@pytest.mark.parametrize(
    ("flags", "wait_seconds"),
    [(("--env.wait-timeout", "7200"), 7200.0), ((), BaseEnvConfig.model_fields["wait_timeout"].default)],
)
def test_outages_count_over_the_waits_of_the_most_patient_program(
    tmp_path: Path, flags: tuple[str, ...], wait_seconds: float
) -> None:
    """The waits of an environment were longer than the window, so that each outage of it was the first of six."""
    launch = planned(tmp_path, "--env.server", "arithmetic_server.py", "--wait-timeout", "60", *flags)
    with Supervisor(tmp_path) as supervisor:
        budget = launch._make_restarts(supervisor)._budget
    assert budget.window_after(OUTAGE) > budget.restarts * (wait_seconds + LONGEST_PAUSE_SECONDS)
