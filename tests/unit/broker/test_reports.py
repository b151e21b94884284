"""Metrics of steps are kept for as long as people look at them, and cost a bounded amount of room."""

import pytest

from atropos_api.broker import reports
from atropos_api.broker.reports import RunMetrics
from atropos_api.errors import InvalidRequest
from atropos_api.store.memory import MemoryLedger
from atropos_api.wire.reports import StepMetrics


def step(number, **values):
    return StepMetrics(step=number, time=float(number), values=values or {"a": float(number)})


def read(metrics, run_id="r"):
    parts = 1
    while metrics.read_part(run_id):
        parts += 1
    return metrics.table(run_id), parts


def test_steps_reported_before_and_after_the_table_was_read_are_in_it_once():
    metrics = RunMetrics(MemoryLedger())
    metrics.take("r", [step(1), step(2)], known_runs=["r"])
    table, _ = read(metrics)
    metrics.take("r", [step(2), step(3, a=3.0, b=1.0)], known_runs=["r"])
    assert table.steps.tolist() == [1, 2, 3]
    assert table.latest() == {"a": 3.0, "b": 1.0}
    assert metrics.last_step("r") == 3


def test_a_new_process_finds_the_steps_of_the_last(monkeypatch):
    monkeypatch.setattr(reports, "ROWS_A_READ", 10)
    ledger = MemoryLedger()
    RunMetrics(ledger).take("r", [step(number) for number in range(1, 36)], known_runs=["r"])
    metrics = RunMetrics(ledger)
    table, parts = read(metrics)
    assert (len(table), parts) == (35, 4)
    assert table.column("a").tolist() == [float(number) for number in range(1, 36)]


def test_steps_that_come_while_a_table_is_read_are_in_it(monkeypatch):
    monkeypatch.setattr(reports, "ROWS_A_READ", 10)
    metrics = RunMetrics(MemoryLedger())
    metrics.take("r", [step(number) for number in range(1, 21)], known_runs=["r"])
    assert metrics.read_part("r")
    metrics.take("r", [step(5, a=50.0), step(21)], known_runs=["r"])
    table, _ = read(metrics)
    assert table.steps.tolist() == list(range(1, 22))
    assert table.column("a")[4] == 50.0


def test_a_resumed_run_loses_the_steps_that_it_trains_again():
    metrics = RunMetrics(MemoryLedger())
    metrics.take("r", [step(number) for number in range(1, 6)], known_runs=["r"])
    read(metrics)
    metrics.drop_after("r", 3)
    assert read(metrics)[0].steps.tolist() == [1, 2, 3]


def test_the_oldest_steps_and_the_oldest_runs_are_forgotten(monkeypatch):
    for name, value in (("MOST_STEPS", 50), ("TRIM_EVERY", 10), ("MOST_RUNS", 3), ("MOST_TABLES", 2)):
        monkeypatch.setattr(reports, name, value)
    ledger = MemoryLedger()
    metrics = RunMetrics(ledger)
    for number in range(1, 101):
        metrics.take("a", [step(number)], known_runs=["a"])
    steps = read(metrics, "a")[0].steps
    assert steps[-1] == 100
    assert 50 <= len(steps) <= 60
    for run in "bcd":
        metrics.take(run, [step(1)], known_runs=list("abcd"))
        read(metrics, run)
    assert not metrics.has("a")
    assert sorted(ledger.metric_names()) == ["b", "c", "d"]
    assert len(metrics._tables) <= 3


def test_an_old_run_that_is_resumed_is_not_forgotten_for_newer_ones(monkeypatch):
    monkeypatch.setattr(reports, "MOST_RUNS", 3)
    ledger = MemoryLedger()
    metrics = RunMetrics(ledger)
    for run in ("b", "c", "d", "a", "a"):
        metrics.take(run, [step(1)], known_runs=list("abcd"))
    assert read(metrics, "a")[0].latest() == {"a": 1.0}
    assert sorted(ledger.metric_names()) == ["a", "c", "d"]


def test_a_run_has_a_bounded_number_of_names(monkeypatch):
    monkeypatch.setattr(reports, "MOST_NAMES", 3)
    metrics = RunMetrics(MemoryLedger())
    metrics.take("r", [step(1, a=1.0, b=1.0)], known_runs=["r"])
    with pytest.raises(InvalidRequest, match="4 names of metrics, and 3 are allowed"):
        metrics.take("r", [step(2, c=1.0, d=1.0)], known_runs=["r"])
    assert read(metrics)[0].steps.tolist() == [1]


def test_large_tables_leave_the_memory_and_are_read_again_when_they_are_looked_at(monkeypatch):
    monkeypatch.setattr(reports, "MOST_TABLE_BYTES", 1)
    metrics = RunMetrics(MemoryLedger())
    for run in "abc":
        metrics.take(run, [step(1), step(2)], known_runs=list("abc"))
    for run in "abcab":
        assert read(metrics, run)[0].steps.tolist() == [1, 2]
        assert list(metrics._tables) == [run]
