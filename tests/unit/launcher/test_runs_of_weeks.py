"""The launcher keeps little of a run in memory however long the run is, and reads its files a line at a time."""

from __future__ import annotations

import errno
import io
import json
import os
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from example_trainer.launcher.progress import KEPT_SIGNS, Snapshot
from example_trainer.launcher.views import MOST_HELD_ROWS, LastingView, PlainView, make_view
from example_trainer.monitoring import trackers
from example_trainer.monitoring.trackers import MetricsTail, read_row


def snapshot(run_dir: Path) -> Snapshot:
    return Snapshot(name="demo", run_dir=run_dir, total_steps=4, started_at=0.0)


def test_of_the_signs_of_a_run_of_days_the_newest_are_kept_and_each_is_shown_once(tmp_path: Path) -> None:
    sign = {"event": "health", "sign": "kl", "value": 3.0, "message": "diverging KL", "advice": "lower --lr"}
    state, out = snapshot(tmp_path), io.StringIO()
    view = PlainView(out)
    for step in range(1, KEPT_SIGNS + 4):
        state.add_signs([{**sign, "step": step}])
        view.update(state, ())
    assert (len(state.signs), state.sign_count) == (KEPT_SIGNS, KEPT_SIGNS + 3)
    assert [kept["step"] for kept in (state.signs[0], state.signs[-1])] == [4, KEPT_SIGNS + 3]
    state.add_signs([{**sign, "step": 9000}, {**sign, "step": 9001}])
    view.update(state, ())
    shown = [int(line.split("at step ")[1].split(":")[0]) for line in out.getvalue().splitlines() if "sign" in line]
    assert shown == [*range(1, KEPT_SIGNS + 4), 9000, 9001]


def test_of_the_steps_that_wait_for_an_output_which_is_never_read_the_newest_are_kept(tmp_path: Path) -> None:
    """A pager that shows the first page held the steps of days in the launcher's memory."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 1000)
    with open(reading, "rb"), open(writing, "w") as out:  # noqa: PTH123 - they are descriptors
        view, state = LastingView(make_view("plain", out), out), snapshot(tmp_path)
        for step in range(MOST_HELD_ROWS + 10):
            view.update(state, [{"step": step, "reward/mean": 0.5}])
        assert [view._held[0]["step"], view._held[-1]["step"]] == [10, MOST_HELD_ROWS + 9]


def test_the_rows_of_a_file_take_little_more_memory_than_their_values(tmp_path: Path) -> None:
    """The steps of a run of weeks took five times as much, gigabytes, for its summary."""
    path, names, count = tmp_path / "metrics.jsonl", [f"the/name-of-metric-{one}" for one in range(100)], 300
    path.write_text((json.dumps(dict.fromkeys(names, 0.5)) + "\n") * count)
    tracemalloc.start()
    try:
        assert len(MetricsTail(path).read()) == count
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10_000 * count


def test_rows_of_a_file_that_breaks_off_come_once_and_of_a_replaced_one_only_newer_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "timestamp": float(step)}) + "\n" for step in range(1, 6)]
    path.write_text("".join(lines[:2]))
    tail = MetricsTail(path)
    assert [row["step"] for row in tail.read()] == [1, 2]
    (tmp_path / "new").write_text("".join(lines))
    (tmp_path / "new").replace(path)

    def break_off(line: bytes) -> dict[str, Any] | None:
        if b'"step": 4' in line:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return read_row(line)

    with monkeypatch.context() as patched:
        patched.setattr(trackers, "read_row", break_off)
        assert [row["step"] for row in tail.read()] == [3]
    assert [row["step"] for row in tail.read()] == [4, 5]
