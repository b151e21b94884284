"""Curves keep what a reader looks for: a spike survives any reduction, and a table is what was put into it."""

import numpy as np
import pytest

from atropos_api.page.series import MetricTable, min_max_indices, reduced


def table_of(values, *, name="reward/mean"):
    table = MetricTable()
    for step, value in enumerate(values, 1):
        put(table, step, float(step), {name: value})
    return table


def put(table, step, time, values):
    table.name_columns([*table.names, *(name for name in values if name not in table.names)])
    table.put(step, time, np.array([values.get(name, np.nan) for name in table.names]))


def test_a_spike_of_one_step_is_among_a_thousand_points_of_a_hundred_thousand_steps():
    steps = np.arange(1, 100_001)
    for place in (0, 1, 12_345, 99_998, 99_999):
        for spike in (-50.0, 50.0):
            values = np.sin(steps / 500.0)
            values[place] = spike
            chosen = min_max_indices(steps, values, 1000)
            assert len(chosen) <= 1000
            assert place in chosen
            assert {0, 99_999} <= set(chosen.tolist())
            assert np.all(np.diff(chosen) > 0)


@pytest.mark.parametrize("points", [1, 2, 3, 10])
def test_few_points_are_the_ends_and_the_extremes(points):
    steps, values = np.arange(1, 101), np.linspace(0.0, 1.0, 100)
    values[40] = 9.0
    chosen = min_max_indices(steps, values, points)
    assert {0, 99, 40} <= set(chosen.tolist())
    assert len(chosen) <= max(points, 4)


def test_steps_with_gaps_keep_the_extremes_of_each_span_of_steps():
    steps = np.concatenate([np.arange(1, 501), np.arange(90_000, 90_500)])
    values = np.zeros(1000)
    values[750] = 1.0
    assert 750 in min_max_indices(steps, values, 100)


def test_a_short_series_is_shown_whole_and_without_the_steps_that_lack_it():
    table = MetricTable()
    put(table, 1, 1.0, {"a": 1.0})
    put(table, 2, 2.0, {"b": 5.0})
    put(table, 3, 3.0, {"a": 2.0, "b": 6.0})
    assert reduced(table, ["a", "b", "c"], 100) == {"a": ([1, 3], [1.0, 2.0]), "b": ([2, 3], [5.0, 6.0])}
    assert reduced(table, ["a"], 100, first=2) == {"a": ([3], [2.0])}
    assert reduced(table, ["a"], 100, last=2) == {"a": ([1], [1.0])}
    assert table.latest() == {"a": 2.0, "b": 6.0}


def test_a_step_that_is_put_again_replaces_the_first_and_one_in_between_finds_its_place():
    table = table_of([1.0, 2.0, 3.0])
    put(table, 2, 9.0, {"reward/mean": 7.0})
    put(table, 10, 9.0, {"reward/mean": 10.0})
    put(table, 5, 9.0, {"reward/mean": 5.0})
    assert table.steps.tolist() == [1, 2, 3, 5, 10]
    assert table.column("reward/mean").tolist() == [1.0, 7.0, 3.0, 5.0, 10.0]
    table.drop(2, 5)
    assert table.steps.tolist() == [1, 10]
    assert len(table) == 2


def test_a_table_grows_beyond_its_first_capacity():
    table = table_of(range(2000))
    assert len(table) == 2000
    assert table.column("reward/mean")[-1] == 1999.0
    assert table.last_step == 2000


def test_a_stored_step_without_a_value_shifts_no_other():
    table = MetricTable()
    table.name_columns(["a"])
    full = [(step, 0.0, np.array([float(step)], dtype="<f8").tobytes()) for step in (2, 3)]
    table.extend([(1, 0.0, b""), *full])
    assert reduced(table, ["a"], 100) == {"a": ([2, 3], [2.0, 3.0])}
