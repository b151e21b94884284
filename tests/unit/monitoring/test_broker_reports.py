"""Reports to the broker never cost training anything: not when it is slow, gone, or takes none."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from atropos_api.client import BrokerClient, BrokerRefused, BrokerUnreachable
from atropos_api.common.files import RecentLines
from atropos_api.testing import make_group, make_memory_app, serve_in_thread
from atropos_api.wire import EnvironmentRequest, RunRequest
from atropos_api.wire.reports import GroupValues, RunReport, SampleValues, TokenReport
from example_trainer.monitoring import broker_reports
from example_trainer.monitoring.broker_reports import RecordedBatch, RunReporter
from example_trainer.monitoring.health import HealthEvent


class Broker:
    """Takes reports as `answer` says, and remembers them."""

    def __init__(self, answer: Callable[[], None] = lambda: None) -> None:
        self.answer = answer
        self.reports: list[RunReport] = []
        self.tokens: list[tuple[int, TokenReport]] = []
        self.calls = 0

    def report_run(self, run_id: str, report: RunReport) -> None:
        self.calls += 1
        self.answer()
        self.reports.append(report)

    def report_tokens(self, run_id: str, number: int, report: TokenReport) -> None:
        self.answer()
        self.tokens.append((number, report))

    def close(self) -> None:
        pass

    @property
    def steps(self) -> list[int]:
        return [step.step for report in self.reports for step in report.steps]


def until(holds: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def sign(step: int) -> HealthEvent:
    return HealthEvent(sign="kl", step=step, value=2.0, message="KL 2.00", advice="lower --lr")


def recorded(number: int) -> RecordedBatch:
    values = SampleValues(positions=[1], advantages=[0.5], logprobs=[-0.25], entropies=[0.1])
    group = GroupValues(group=0, samples=[values, None])
    return RecordedBatch(number=number, values=[group], groups=[make_group(2, 3)], places=[4], texts={"1": "a"})


def test_each_step_sign_and_batch_is_sent_once() -> None:
    broker = Broker()
    reporter = RunReporter(broker)
    reporter.begin("r", 1)
    for step in range(1, 51):
        reporter.log(step, {"reward/mean": 0.5, "grpo/max_ratio": float("inf")})
    reporter.event(sign(7))
    reporter.record(lambda: recorded(50))
    reporter.close()
    assert broker.steps == list(range(1, 51))
    assert broker.reports[0].steps[0].values == {"reward/mean": 0.5}
    assert [one.step for report in broker.reports for one in report.signs] == [7]
    assert [number for number, _ in broker.tokens] == [50]


def test_while_the_broker_is_away_logging_returns_at_once_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_reports, "REPORT_SECONDS", 0.05)
    away = threading.Event()

    def answer() -> None:
        if not away.is_set():
            raise BrokerUnreachable("nothing answers")

    broker = Broker(answer)
    reporter = RunReporter(broker)
    reporter.begin("r", 1)
    began = time.process_time()
    for step in range(1, 301):
        reporter.log(step, {"a": 1.0})
    assert time.process_time() - began < 1.0
    until(lambda: broker.calls > 1)
    away.set()
    until(lambda: broker.steps == list(range(1, 301)))
    reporter.close()
    assert broker.steps == list(range(1, 301))


def test_a_broker_that_accepts_no_reports_gets_no_more() -> None:
    def answer() -> None:
        raise BrokerRefused({"type": "https://x/not-found"}, 404)

    broker = Broker(answer)
    reporter = RunReporter(broker)
    reporter.begin("r", 1)
    for step in range(1, 20):
        reporter.log(step, {"a": 1.0})
        until(lambda: not reporter._steps)
    reporter.close()
    assert broker.calls == 1


def test_a_broker_that_hangs_delays_no_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_reports, "CLOSE_SECONDS", 0.2)
    hang = threading.Event()
    reporter = RunReporter(Broker(lambda: hang.wait(30) and None))
    reporter.begin("r", 1)
    reporter.log(1, {"a": 1.0})
    began = time.monotonic()
    reporter.close()
    assert time.monotonic() - began < 10.0
    hang.set()


def test_a_reporter_that_never_began_can_be_closed() -> None:
    RunReporter(Broker()).close()


def test_recorded_batches_are_lines_in_the_run_directory_even_without_a_broker(tmp_path: Path) -> None:
    def answer() -> None:
        raise BrokerUnreachable("nothing answers")

    path = tmp_path / "trained.jsonl"
    reporter = RunReporter(Broker(answer), record=RecentLines(path, keep=10, most_bytes=10**6))
    reporter.begin("r", 1)
    reporter.record(lambda: recorded(3))
    until(path.exists)
    reporter.close()
    (line,) = map(json.loads, path.read_text().splitlines())
    assert (line["number"], line["run_id"], line["texts"]) == (3, "r", {"1": "a"})
    assert line["groups"][0]["group"] == 4, "its index in the whole batch, not in the rank's part"
    assert line["groups"][0]["samples"][0]["advantages"] == [0.5]
    assert line["groups"][0]["fields"]["tokens"] == [[0, 1, 2], [3, 4, 5]]


def test_what_cannot_be_recorded_is_left_out_and_the_rest_goes_on() -> None:
    def fail() -> RecordedBatch:
        raise RuntimeError("no tokenizer")

    broker = Broker()
    reporter = RunReporter(broker)
    reporter.begin("r", 1)
    reporter.record(fail)
    reporter.log(1, {"a": 1.0})
    reporter.close()
    assert broker.steps == [1]


def test_phases_in_progress_are_part_of_each_report() -> None:
    broker = Broker()
    reporter = RunReporter(broker, world_size=2)
    reporter.begin("r", 1)
    reporter.phases.step = 4
    with reporter.phases.during("train"), reporter.phases.during("publish"):
        reporter.log(3, {"a": 1.0})
        until(lambda: broker.reports)
    reporter.close()
    activity = broker.reports[0].activity
    assert activity is not None
    assert (activity.step, sorted(activity.phases), activity.world_size) == (4, ["publish", "train"], 2)
    assert reporter.phases.seconds() == {}


def test_a_real_broker_shows_what_a_reporter_sent() -> None:
    app = make_memory_app()
    with serve_in_thread(app) as url, BrokerClient(url) as client:
        run = client.begin_run(RunRequest(name="r", batch_size=2, max_token_length=9, num_steps=3))
        client.register_environment(EnvironmentRequest(name="e", group_size=2, max_token_length=9))
        client.submit(0, [make_group(2, 3)], idempotency_key="a")
        client.get_batch(1, run_id=run.run_id, epoch=run.epoch)
        reporter = RunReporter(BrokerClient(url, retry_seconds=0.0))
        reporter.begin(run.run_id, run.epoch)
        reporter.log(1, {"reward/mean": 0.5})
        reporter.record(lambda: recorded(1))
        until(lambda: app.context.broker.recent.get(run.run_id, 1).reports)  # type: ignore[union-attr]
        reporter.close()
        status = client.status()
    assert status["run"]["metrics_step"] == 1
    assert status["trainers"][0]["run_id"] == run.run_id
