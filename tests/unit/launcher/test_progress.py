"""The view shows the state from the run's files and servers, as lines or as one panel, at little cost."""

from __future__ import annotations

import errno
import io
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from atropos_api.common.cliconfig import ConfigError
from example_trainer.commands import top
from example_trainer.launcher.progress import KEPT_ROWS, SILENCE_SECONDS, Endpoint, Feed, Snapshot, silent_environments
from example_trainer.launcher.run_file import read_settings
from example_trainer.launcher.views import LastingView, LiveView, PlainView, make_view, render, sparkline
from example_trainer.monitoring.trackers import MetricsTail


class _Broker(BaseHTTPRequestHandler):
    epoch = 1

    def do_GET(self) -> None:
        run = {"run_id": "r", "epoch": self.epoch}
        status = {"run": run, "environments": [{"name": "e"}], "queue": {"sequences": 64}}
        body = json.dumps(status if self.path == "/v1/status" else {}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def broker_url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Broker)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def snapshot(run_dir: Path) -> Snapshot:
    return Snapshot(name="demo", run_dir=run_dir, total_steps=4, started_at=time.time())


def write_rows(path: Path, *steps: int) -> None:
    with path.open("a") as handle:
        for step in steps:
            handle.write(
                json.dumps({"step": step, "reward/mean": step / 4, "time/step": 0.25, "timestamp": time.time()}) + "\n"
            )


def test_a_row_still_being_written_is_left_for_the_next_look(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read() == []
    path.write_text('{"step": 1}\n{"st')
    assert tail.read() == [{"step": 1}]
    with path.open("a") as handle:
        handle.write('ep": 2}\n')
    assert tail.read() == [{"step": 2}]


def test_rows_of_an_earlier_attempt_can_be_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_rows(path, 1, 2)
    tail = MetricsTail(path, from_end=True)
    write_rows(path, 3)
    assert [row["step"] for row in tail.read()] == [3]


def test_a_file_that_another_host_has_just_replaced_is_read_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS the read of the former file fails then; it ended the launch, and with it the run."""
    path = tmp_path / "metrics.jsonl"
    write_rows(path, 1)
    tail = MetricsTail(path)

    def stale(*_: object) -> object:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", stale)
        assert tail.read() == []
    assert [row["step"] for row in tail.read()] == [1]


def test_of_a_run_of_days_the_newest_steps_are_kept_and_those_trained_again_are_replaced(tmp_path: Path) -> None:
    state = snapshot(tmp_path)
    for step in range(1, 5 * KEPT_ROWS):
        state.add([{"step": step, "reward/mean": float(step)}])
    assert (len(state.rows), state.step) == (KEPT_ROWS, 5 * KEPT_ROWS - 1)
    state.add([{"step": state.step - 2, "reward/mean": 0.0}])
    assert [row["reward/mean"] for row in state.rows[-2:]] == [float(state.step - 1), 0.0]


def test_milestones_are_reached_as_servers_answer(tmp_path: Path, broker_url: str) -> None:
    state = snapshot(tmp_path)
    state.milestones = dict.fromkeys(["broker", "vllm", "trainer", "environment"])
    tail = MetricsTail(tmp_path / "metrics.jsonl")
    silent = Endpoint("http://127.0.0.1:9")
    Feed(state, metrics=tail, broker=silent, servers={"vllm": [Endpoint(broker_url), silent]}).poll()
    assert set(state.milestones.values()) == {None}, "of several servers the last one counts"
    feed = Feed(state, metrics=tail, broker=Endpoint(broker_url), servers={"vllm": [Endpoint(broker_url)]})
    feed.poll()
    assert None not in state.milestones.values()
    feed.close()


def test_the_trainer_of_the_launch_before_is_not_the_one_that_is_awaited(tmp_path: Path, broker_url: str) -> None:
    state = snapshot(tmp_path)
    state.milestones = dict.fromkeys(["broker", "trainer"])
    tail = MetricsTail(tmp_path / "metrics.jsonl")
    feed = Feed(state, metrics=tail, broker=Endpoint(broker_url), knows_run=True)
    for epoch, ready in ((1, False), (1, False), (2, True)):
        _Broker.epoch, feed._asked_at = epoch, 0.0
        feed.poll()
        assert (state.milestones["trainer"] is not None) == ready
    feed.close()


def test_a_trained_step_shows_that_the_trainer_was_ready_though_no_broker_says_so(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    state = Snapshot(name="r", run_dir=tmp_path, total_steps=3, started_at=0.0, milestones={"trainer": None})
    feed = Feed(state, metrics=MetricsTail(metrics), broker=Endpoint("http://127.0.0.1:9"))
    feed.poll()
    assert state.milestones == {"trainer": None}
    metrics.write_text('{"step": 1}\n')
    feed.poll()
    assert state.milestones["trainer"] is not None


def test_without_a_terminal_each_step_is_one_line(tmp_path: Path) -> None:
    out = io.StringIO()
    view = make_view("auto", out)
    assert isinstance(view, PlainView)
    state = snapshot(tmp_path)
    state.status = {"queue": {"sequences": 64}}
    write_rows(tmp_path / "metrics.jsonl", 1, 2)
    state.rows = MetricsTail(tmp_path / "metrics.jsonl").read()
    view.update(state, state.rows)
    view.update(state, ())
    lines = [line for line in out.getvalue().splitlines() if "step " in line]
    assert len(lines) == 2
    assert "step 2/4  reward 0.500  step 0.25 s  queue 64" in lines[1]


SIGN = {"event": "health", "sign": "kl", "step": 2, "value": 3.0, "message": "diverging KL", "advice": "lower --lr"}


@pytest.mark.parametrize(("term", "view"), [("xterm", LiveView), ("dumb", PlainView)])
def test_a_terminal_that_cannot_redraw_gets_lines(
    monkeypatch: pytest.MonkeyPatch, term: str, view: type[LiveView | PlainView]
) -> None:
    """In a shell of Emacs, which says TERM=dumb, the panel was shown once, at the end of the run."""
    monkeypatch.setenv("TERM", term)
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as terminal:
        assert isinstance(make_view("auto", terminal), view)
        assert type(top.make_view("text", terminal)).__name__ == view.__name__
    os.close(ours)


def test_a_sign_of_trouble_is_shown_once_with_its_advice_by_lines_and_panel(tmp_path: Path) -> None:
    state, out = snapshot(tmp_path), io.StringIO()
    (tmp_path / "events.jsonl").write_text(json.dumps(SIGN) + "\n{}\n")
    write_rows(tmp_path / "metrics.jsonl", 1, 2)
    rows, events = MetricsTail(tmp_path / "metrics.jsonl"), MetricsTail(tmp_path / "events.jsonl")
    feed = Feed(state, metrics=rows, events=events, broker=Endpoint("http://127.0.0.1:9"))
    view = PlainView(out)
    for _ in range(2):
        view.update(state, feed.poll())
    said = "sign of trouble at step 2: diverging KL; lower --lr"
    assert out.getvalue().count(said) == 1
    console = Console(width=120, file=io.StringIO(), force_terminal=False)
    with console.capture() as capture:
        console.print(render(state))
    assert said in capture.get()


def test_as_json_each_milestone_step_sign_and_phase_is_one_object_on_a_line(tmp_path: Path) -> None:
    state, out = snapshot(tmp_path), io.StringIO()
    view = make_view("json", out)
    state.milestones = {"broker": 5.0, "vllm": None}
    state.page_url, state.phase, state.signs = "http://127.0.0.1:8000/", "training", [SIGN]
    write_rows(tmp_path / "metrics.jsonl", 1, 2)
    state.rows = MetricsTail(tmp_path / "metrics.jsonl").read()
    view.update(state, state.rows)
    view.update(state, ())
    state.rows, state.status = [], DROPPING
    view.update(state, ())
    view.close()
    found = [json.loads(line) for line in out.getvalue().splitlines()]
    kinds = [one["event"] for one in found]
    assert kinds == ["milestone", "page", "step", "step", "health", "phase", "dropped"]
    assert found[0] == {"event": "milestone", "name": "broker", "timestamp": 5.0}
    assert [one["reward/mean"] for one in found if one["event"] == "step"] == [0.25, 0.5]
    assert found[4] == SIGN
    assert "every score is 0" in found[6]["dropped"][0]


def test_a_quiet_view_shows_nothing(tmp_path: Path) -> None:
    state, out = snapshot(tmp_path), io.StringIO()
    state.phase = "training"
    view = make_view("quiet", out)
    view.update(state, [{"step": 1}])
    view.close()
    assert out.getvalue() == ""


@pytest.mark.parametrize("choice", ["plain", "live", "json"])
def test_an_output_that_cannot_be_written_ends_no_run(
    tmp_path: Path, choice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full:
        view = LastingView(make_view(choice, full), full)
        for _ in range(2):
            view.update(snapshot(tmp_path), [{"step": 1, "reward/mean": 0.5}])
        view.close()
    told = capsys.readouterr().err
    assert told.count("the output cannot be written (No space left on device); the run goes on") == 1


def test_an_output_that_is_not_read_blocks_no_launcher_and_gets_its_rows_later(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 1000)
    with open(reading, "rb") as reader, open(writing, "w") as out:  # noqa: PTH123 - they are descriptors
        os.set_blocking(writing, True)
        view = LastingView(make_view("plain", out), out)
        for step in (1, 2):
            view.update(snapshot(tmp_path), [{"step": step, "reward/mean": 0.5}])
        os.set_blocking(reading, False)
        while reader.read(1000):
            pass
        view.update(snapshot(tmp_path), [{"step": 3, "reward/mean": 0.5}])
        shown = reader.read().decode()
    assert [line.split()[3] for line in shown.splitlines() if " step " in line] == ["1/4", "2/4", "3/4"]


def test_progress_is_shown_in_one_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ways = {"auto": [], "quiet": ["--quiet"], "json": ["--json"], "plain": ["--progress", "plain"]}
    for view, flags in ways.items():
        assert read_settings(["--config", "demo", *flags]).trainer.view == view
    with pytest.raises(ConfigError, match="--quiet and --json are different ways to show the progress"):
        read_settings(["--config", "demo", "--quiet", "--json"])
    with pytest.raises(ConfigError, match="--json and --progress are different"):
        read_settings(["--config", "demo", "--json", "--progress", "live"])


def test_the_panel_shows_steps_reward_and_phase(tmp_path: Path) -> None:
    state = snapshot(tmp_path)
    state.milestones = {"broker": time.time(), "vllm": None}
    write_rows(tmp_path / "metrics.jsonl", 1, 2, 3)
    state.rows = MetricsTail(tmp_path / "metrics.jsonl").read()
    state.phase = "training"
    state.status = {"flow": {"diagnosis": {"finding": {"severity": "slow", "headline": "rollouts are slower"}}}}
    console = Console(width=120, file=io.StringIO(), force_terminal=False)
    with console.capture() as capture:
        console.print(render(state))
    text = capture.get()
    for part in ("demo", "step 3/4", "▃▅▆", "vllm starting", "training", "0.750", "rollouts are slower"):
        assert part in text


def test_both_views_name_the_page_once_the_programs_are_planned(tmp_path: Path) -> None:
    state, out = snapshot(tmp_path), io.StringIO()
    view = PlainView(out)
    view.update(state, ())
    assert "page" not in out.getvalue()
    state.page_url = "http://127.0.0.1:8000/"
    view.update(state, ())
    view.update(state, ())
    assert out.getvalue().count("page for a browser: http://127.0.0.1:8000/\n") == 1
    state.token_file, with_token = tmp_path / "broker-token", io.StringIO()
    PlainView(with_token).update(state, ())
    assert (
        f"page for a browser: http://127.0.0.1:8000/ (its token is in {tmp_path}/broker-token)" in with_token.getvalue()
    )
    state.token_file = None
    console = Console(width=120, file=io.StringIO(), force_terminal=False)
    with console.capture() as capture:
        console.print(render(state))
    assert "http://127.0.0.1:8000/" in capture.get()


class _Statuses(Endpoint):
    """A broker that lists environments by their silence in seconds; one that has left has a minus before it."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:9")
        self.quiet: dict[str, float] = {}

    def get_json(self, path: str) -> dict[str, Any]:
        rows = [
            {"name": name, "quiet_seconds": abs(quiet), "connected": 0 <= quiet <= SILENCE_SECONDS}
            for name, quiet in self.quiet.items()
        ]
        return {"environments": rows}


def looks(tmp_path: Path, *quiet: dict[str, float], knows_run: bool = False) -> Iterator[Snapshot]:
    """Yield the snapshot after each look at the broker."""
    state, broker = snapshot(tmp_path), _Statuses()
    state.milestones = dict.fromkeys(["broker", "environment"])
    feed = Feed(state, metrics=MetricsTail(tmp_path / "none"), broker=broker, knows_run=knows_run)
    for broker.quiet in quiet:
        feed._asked_at = 0.0
        feed.poll()
        yield state
    feed.close()


def test_an_environment_that_fell_silent_is_named_until_it_calls_and_one_that_has_left_is_not(tmp_path: Path) -> None:
    found = [
        silent_environments(state)
        for state in looks(
            tmp_path,
            {"a": 0.5, "b": 0.1, "left": 0.2},
            {"a": 1.0, "b": 59.0, "left": -1.0},
            {"a": 2.0, "b": 90.0, "left": -90.0},
            {"a": 3.0, "b": 0.1, "left": -91.0},
        )
    ]
    assert found == [[], [], ["b"], []]


def test_environments_of_an_earlier_run_are_neither_awaited_nor_silent(tmp_path: Path) -> None:
    found = [
        (silent_environments(state), state.milestones["environment"] is not None)
        for state in looks(
            tmp_path,
            {"before": 5.0, "the same": 5.0},
            {"before": 59.0, "the same": 59.0},
            {"before": 90.0, "the same": 0.5},
            {"before": 900.0, "the same": 61.0},
            knows_run=True,
        )
    ]
    assert found == [([], False), ([], False), ([], True), (["the same"], True)]


def test_a_sparkline_keeps_to_its_scale() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([-1.0, 1.0]) == "▁█"
    assert sparkline([]) == ""


def test_watching_costs_less_than_a_hundredth_of_a_core(tmp_path: Path, broker_url: str) -> None:
    """It reads ten times in a second, and the broker once; the measure is CPU time of this thread."""
    state = snapshot(tmp_path)
    feed = Feed(state, metrics=MetricsTail(tmp_path / "metrics.jsonl"), broker=Endpoint(broker_url))
    write_rows(tmp_path / "metrics.jsonl", *range(1, 40))
    feed.poll()
    before = time.thread_time()
    for _ in range(10):
        feed.poll()
    assert time.thread_time() - before < 0.01
    feed.close()


DROPPING = {
    "environments": [
        {
            "name": "gsm8k",
            "latest_drop": {"explanation": "96 groups collected, all dropped: every score is 0"},
            "dropped_groups": {"equal-scores": 96},
        },
        {"name": "fine", "latest_drop": None},
        {"name": "begins", "latest_drop": {"explanation": "1 group"}, "dropped_groups": {"failed": 1}},
        {"name": "of an older broker"},
    ],
    "dropped_groups": {"equal-scores": 96},
}


def test_while_no_step_is_made_the_view_repeats_why_groups_are_dropped(tmp_path: Path) -> None:
    state, out = snapshot(tmp_path), io.StringIO()
    state.status = DROPPING
    view = PlainView(out)
    view.update(state, ())
    view.update(state, ())
    assert out.getvalue().count("gsm8k: 96 groups collected, all dropped: every score is 0") == 1
    assert "begins" not in out.getvalue()
    console = Console(width=120, file=io.StringIO(), force_terminal=False)
    with console.capture() as capture:
        console.print(render(state))
    assert "gsm8k: 96 groups collected, all dropped" in capture.get()


def test_while_steps_are_made_dropped_groups_are_a_figure(tmp_path: Path) -> None:
    state, out = snapshot(tmp_path), io.StringIO()
    state.status = DROPPING
    state.rows = [{"step": 1, "timestamp": time.time()}]
    PlainView(out).update(state, state.rows)
    assert "dropped 96" in out.getvalue()
    assert "gsm8k" not in out.getvalue()


def test_what_an_environment_or_a_model_wrote_gives_no_command_to_the_terminal(tmp_path: Path) -> None:
    told = "\x1b]0;title\x07\x1b[2J\rstep 9/9\u202e"
    state, out = snapshot(tmp_path), io.StringIO()
    drop = {"name": "e", "dropped_groups": {"failed": 96}, "latest_drop": {"explanation": f"failed: {told}"}}
    finding = {"severity": "slow", "headline": f"A group lacks 1 of 8 rollouts: {told}"}
    silent: dict[str, Any] = {"name": f"mine {told}", "quiet_seconds": 2 * SILENCE_SECONDS}
    state.status = {"environments": [drop, silent], "flow": {"diagnosis": {"finding": finding}}}
    state.callers = {silent["name"]}
    state.phase = ", ".join(silent_environments(state))
    PlainView(out).update(state, ())
    state.rows = [{"step": 1}]
    console = Console(width=400, file=io.StringIO(), force_terminal=False)
    with console.capture() as capture:
        console.print(render(state))
    for shown in (out.getvalue(), capture.get()):
        assert "failed: " in shown
        assert "mine " in shown
        assert not any(mark in shown for mark in "\x1b\x07\r\u202e")
    assert "lacks 1 of 8" in capture.get()
