"""The choice of groups equals that of trying every subset."""

from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import given, settings

from atropos_api.broker.packing import can_fill, choose_groups


@dataclass
class Row:
    seq: int
    env_id: int
    size: int


@dataclass
class Lane:
    env_id: int
    size: int
    rows: list

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        return iter(self.rows)


def brute_force(rows, target, minima):
    best = None
    for picks in range(1 << len(rows)):
        subset = [row for place, row in enumerate(rows) if picks >> place & 1]
        if sum(row.size for row in subset) != target:
            continue
        if any(sum(row.size for row in subset if row.env_id == env) < need for env, need in minima.items()):
            continue
        order = [row.seq for row in subset]
        best = order if best is None or order < best else best
    return best


groups = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1, 2, 3, 4, 6])), max_size=10)


@settings(max_examples=400)
@given(
    groups=groups, target=st.integers(1, 14), minima=st.dictionaries(st.integers(0, 2), st.integers(1, 5), max_size=2)
)
def test_the_oldest_exact_subset_that_meets_the_minima_is_chosen(groups, target, minima):
    rows = [Row(seq, env, size) for seq, (env, size) in enumerate(groups)]
    keys = sorted({(row.env_id, row.size) for row in rows})
    lanes = [Lane(env, size, [row for row in rows if (row.env_id, row.size) == (env, size)]) for env, size in keys]
    chosen = choose_groups(lanes, target, minima)
    expected = brute_force(rows, target, minima)
    assert (None if chosen is None else [row.seq for row in chosen]) == expected


@settings(max_examples=300)
@given(sizes=st.sets(st.integers(1, 9), max_size=3), target=st.integers(1, 30), containing=st.integers(1, 9))
def test_a_size_is_called_unpackable_exactly_when_no_sum_uses_it(sizes, target, containing):
    def reachable(missing):
        return missing == 0 or any(missing >= size and reachable(missing - size) for size in {*sizes, containing})

    possible = target >= containing and reachable(target - containing)
    assert can_fill(sizes, target, containing=containing) == possible


def test_a_choice_from_many_thousands_costs_as_little_as_from_few():
    import time

    def seconds(count):
        lanes = [Lane(env, size, [Row(n * 2 + env, env, size) for n in range(count)]) for env, size in ((0, 3), (1, 4))]
        started = time.perf_counter()
        for _ in range(5):
            choose_groups(lanes, 128, {})
        return time.perf_counter() - started

    assert seconds(50_000) < 10 * seconds(50) + 0.05
