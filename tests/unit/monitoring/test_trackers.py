"""Trackers write each step and event once, also over a resume, and refuse in one line if their package is missing."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import subprocess
import sys
import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest
import wandb

from example_trainer.cli import run_trackers
from example_trainer.config import TrainingConfig
from example_trainer.errors import NotWritten, TrainerError
from example_trainer.monitoring import trackers
from example_trainer.monitoring.health import HealthEvent
from example_trainer.monitoring.trackers import (
    EVENTS_FILE,
    JsonlTracker,
    RunTrackers,
    SummaryTracker,
    TensorBoardTracker,
    TrackerSet,
    TrackioTracker,
    WandbTracker,
    last_line,
    read_metrics,
)
from tests.trackio_stand_in import RecordedTrackio

SIGN = HealthEvent(sign="kl", step=3, value=1.5, message="KL 1.50 is above 1: diverging KL", advice="lower --lr")


def test_a_line_is_on_disk_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.log(1, {"reward/mean": 0.5, "train/loss": float("nan")})
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (line["step"], line["reward/mean"]) == (1, 0.5)
    assert "train/loss" not in line
    tracker.close()


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_disk_that_is_full_is_told_with_the_file_and_how_to_go_on(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/dev/full")
    tracker = JsonlTracker(tmp_path)
    with pytest.raises(NotWritten, match=rf"{name} cannot be written \(No space left on device\); .*--resume auto"):
        tracker.log(1, {}) if name == "metrics.jsonl" else tracker.event(SIGN)
    tracker.close()


def test_a_resume_on_a_full_disk_is_told_in_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    JsonlTracker(tmp_path).close()
    monkeypatch.setattr(trackers, "replace_whole", full)
    with pytest.raises(NotWritten, match=r"metrics.jsonl cannot be written \(No space left on device\)"):
        JsonlTracker(tmp_path, resumed_step=1)


def test_a_resumed_run_drops_the_lines_of_steps_that_are_trained_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 6)) + '{"step": 6, "rew')
    tracker = JsonlTracker(tmp_path, resumed_step=3)
    tracker.log(4, {})
    tracker.close()
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4]


def test_a_resume_reads_the_lines_of_all_steps_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    values = {f"metric/{number}": number / 7 for number in range(40)}
    with path.open("w") as file:
        file.writelines(json.dumps({"step": step, **values}) + "\n" for step in range(1, 3001))
        file.write('{"step": 3001, "met')
    tracemalloc.start()
    try:
        assert last_line(path)["step"] == 3000
        JsonlTracker(tmp_path, resumed_step=2990).close()
        assert last_line(path)["step"] == 2990
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 1_000_000, f"the file has {path.stat().st_size} bytes"
    assert [line["step"] for line in read_metrics(path)] == [*range(1, 2991)]
    assert last_line(tmp_path / "none") == {"step": 0}


def test_all_trackers_hear_of_a_step_and_are_closed() -> None:
    class Memory:
        def __init__(self) -> None:
            self.steps: list[int] = []
            self.events: list[HealthEvent] = []
            self.closed = False

        def log(self, step: int, metrics: object) -> None:
            self.steps.append(step)

        def event(self, event: HealthEvent) -> None:
            self.events.append(event)

        def close(self) -> None:
            self.closed = True

    members = [Memory(), Memory()]
    both = TrackerSet(members)
    both.log(3, {})
    both.event(SIGN)
    both.close()
    assert [(member.steps, member.events, member.closed) for member in members] == [([3], [SIGN], True)] * 2


def test_a_tracker_that_cannot_be_closed_does_not_keep_the_others_open() -> None:
    closed = []

    class Last:
        def log(self, step: int, metrics: object) -> None: ...

        def event(self, event: HealthEvent) -> None: ...

        def close(self) -> None:
            closed.append(self)

    class OnAFullDisk(Last):
        def close(self) -> None:
            super().close()
            raise OSError(28, "No space left on device")

    first, second = OnAFullDisk(), Last()
    with pytest.raises(OSError, match="No space left"):
        TrackerSet([first, second]).close()
    assert closed == [first, second]


def test_the_benchmark_summary_gives_the_mean_times_of_the_run(caplog: pytest.LogCaptureFixture) -> None:
    summary = SummaryTracker()
    for step, seconds in enumerate((1.0, 3.0), start=1):
        summary.log(step, {"time/step": seconds, "reward/mean": 1.0})
    with caplog.at_level(logging.INFO):
        summary.close()
    assert "benchmark: time/step mean 2.0000 median 2.0000 max 3.0000 (2 steps)" in caplog.text
    assert "reward" not in caplog.text


def test_wandb_that_is_asked_for_and_missing_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(TrainerError, match="pip install wandb"):
        WandbTracker(project=None, group=None, name="n", directory=tmp_path, config={})


@pytest.mark.parametrize(
    ("mode", "told"),
    [("online", r"No API key configured.*run wandb login, set WANDB_MODE=offline"), ("typo", "'offline'")],
)
def test_wandb_that_begins_no_run_is_one_line(
    mode: str, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_SILENT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_MODE", mode)
    wandb.teardown()
    with pytest.raises(TrainerError, match=told) as caught:
        WandbTracker(project="p", group=None, name="n", directory=tmp_path, config={})
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    wandb.teardown()


def test_trackers_that_refuse_are_found_before_the_files_are_opened_and_close_the_others(tmp_path: Path) -> None:
    summary = SummaryTracker()
    closed: list[str] = []
    summary.close = lambda: closed.append("summary")  # type: ignore[method-assign]

    def refuse() -> TensorBoardTracker:
        raise TrainerError("no login")

    trackers = RunTrackers(tmp_path, [lambda: summary, refuse])
    with pytest.raises(TrainerError, match="no login"):
        trackers.open()
    assert closed == ["summary"]
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_writes_nothing_opens_nothing(tmp_path: Path) -> None:
    trackers = RunTrackers(tmp_path, [SummaryTracker], writes=False)
    trackers.open()
    trackers.at(None).log(1, {"x": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_an_event_is_a_line_of_its_own_file_and_leaves_with_the_steps_that_are_trained_anew(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.event(SIGN)
    tracker.close()
    (line,) = read_metrics(tmp_path / EVENTS_FILE)
    assert {name: line[name] for name in ("event", "sign", "step", "value")} == {
        "event": "health",
        "sign": "kl",
        "step": 3,
        "value": 1.5,
    }
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    JsonlTracker(tmp_path, resumed_step=2).close()
    assert read_metrics(tmp_path / EVENTS_FILE) == []


def test_wandb_offline_writes_a_run_that_holds_the_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()  # it reads the environment once a process, and another test may have been first
    tracker = WandbTracker(project="p", group=None, name="tried", directory=tmp_path, config={"lr": 1e-5})
    group = tracker.run.group
    tracker.log(1, {"reward/mean": 0.25})
    tracker.event(SIGN)
    tracker.close()
    wandb.teardown()  # as at the end of a process: only then is it certain that wandb's service has written its file
    (recorded,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"reward/mean" in recorded.read_bytes()
    assert group.startswith("tried-"), "a group is made from the name"


def test_tensorboard_s_files_hold_the_steps(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tracker = TensorBoardTracker(tmp_path)
    tracker.log(1, {"reward/mean": 0.25})
    tracker.log(2, {"reward/mean": 0.5})
    tracker.event(SIGN)
    tracker.close()
    read = accumulators.EventAccumulator(str(tmp_path)).Reload()
    assert [(point.step, point.value) for point in read.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]


def test_tensorboard_shows_steps_that_a_resumed_run_trains_again_once(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for steps, reward in ((range(1, 6), 0.25), (range(4, 7), 0.5)):
        tracker = TensorBoardTracker(tmp_path)
        for step in steps:
            tracker.log(step, {"reward/mean": reward})
        tracker.close()
        # The reader goes by the files' names, which hold the second at which each was made.
        for path in tmp_path.glob("events.*"):
            path.rename(tmp_path / f"{steps[0]}.{path.name.replace('events', 'earlier')}.tfevents")
    read = accumulators.EventAccumulator(str(tmp_path)).Reload()
    found = [(point.step, point.value) for point in read.Scalars("reward/mean")]
    assert found == [(1, 0.25), (2, 0.25), (3, 0.25), (4, 0.5), (5, 0.5), (6, 0.5)]


def test_tensorboard_that_is_asked_for_and_missing_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in ("torch.utils.tensorboard", "torch.utils.tensorboard.writer"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(TrainerError, match="pip install tensorboard"):
        TensorBoardTracker(tmp_path)


def test_with_use_trackio_steps_settings_and_signs_go_to_a_run_that_a_resume_continues(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trackio = RecordedTrackio()
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    monkeypatch.setenv("TRACKIO_PROJECT", "mine")
    config = TrainingConfig(model_name="m", use_trackio=True, name="tried", run_dir=tmp_path / "tried-1")
    opened = run_trackers(config)
    opened.open()
    trackers = opened.at(None)
    trackers.log(1, {"reward/mean": 0.25})
    trackers.event(SIGN)
    trackers.close()
    kinds = [kind for kind, _ in trackio.calls]
    assert kinds == ["init", "log", "alert", "finish"]
    begun = trackio.calls[0][1]
    assert (begun["project"], begun["name"], begun["group"]) == ("mine", "tried-1", "tried")
    assert begun["resume"] == "allow"
    assert begun["config"]["run_dir"] == str(tmp_path / "tried-1")
    assert trackio.calls[1][1] == {"reward/mean": 0.25, "step": 1}
    assert SIGN.advice in trackio.calls[2][1]["text"]
    assert trackio.calls[2][1]["step"] == SIGN.step, "trackio would name the next one"


def test_the_real_trackio_keeps_steps_signs_and_one_run_over_a_resume(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("trackio")
    program = (
        "import sys; from pathlib import Path; from example_trainer.monitoring.trackers import TrackioTracker\n"
        "from example_trainer.monitoring.health import HealthEvent; step = int(sys.argv[1])\n"
        "tracker = TrackioTracker(name='tried-1', group='tried', config={'path': Path('x')})\n"
        "tracker.log(step, {'reward/mean': 0.5, 'train/kl': float('nan')})\n"
        "tracker.event(HealthEvent(sign='kl', step=step, value=2.0, message='m', advice='a'))\n"
        "tracker.close()\n"
    )
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path), "TRACKIO_PROJECT": "mine"}
    for step in ("3", "4"):
        subprocess.run([sys.executable, "-c", program, step], env=environment, check=True, capture_output=True)
    with closing(sqlite3.connect(tmp_path / "mine.db")) as kept:
        steps = kept.execute("SELECT step FROM metrics ORDER BY step").fetchall()
        signs = kept.execute("SELECT title, step FROM alerts ORDER BY step").fetchall()
        runs = kept.execute("SELECT COUNT(DISTINCT run_id) FROM metrics").fetchone()
    assert steps == [(3,), (4,)]
    assert signs == [("kl", 3), ("kl", 4)]
    assert runs == (1,)


def test_trackio_that_is_missing_or_does_not_begin_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(TrainerError, match="--use-trackio needs trackio: pip install trackio"):
        TrackioTracker(name="a", group="b", config={})
    failing = RecordedTrackio()
    monkeypatch.setattr(failing, "init", lambda **_: (_ for _ in ()).throw(RuntimeError("no\nlogin")))
    monkeypatch.setitem(sys.modules, "trackio", failing)
    with pytest.raises(TrainerError, match=r"did not start a run \(no login\)"):
        TrackioTracker(name="a", group="b", config={})
