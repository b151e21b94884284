"""R14: a run may count its batches in groups; then sizes need not add up to anything."""

import msgspec
import pytest

from atropos_api.errors import InvalidRequest, UnusableGroupSize
from atropos_api.http.request import decode_body
from atropos_api.wire import RunRequest


def test_a_batch_of_groups_is_the_oldest_ones_whatever_their_sizes(desk):
    env = desk.register(group_size=5)
    desk.begin(batch_size=3, unit="groups")
    for ident, size in ((1, 5), (2, 1), (3, 7), (4, 2)):
        assert desk.send(env, ident, size=size).buffered == 0
    assert desk.batch(1) == [1, 2, 3]
    assert desk.batch(2) is None


def test_no_size_is_refused_or_called_unpackable_where_groups_are_counted(desk):
    desk.begin(batch_size=3, unit="groups")
    env = desk.register(group_size=7)
    desk.send(env, 1, size=11)
    assert desk.counters.groups_unpackable_total == 0
    desk.begin(name="other", batch_size=3)
    with pytest.raises(UnusableGroupSize, match="groups of 7 are larger than a batch of 3"):
        desk.register(group_size=7)


def test_minima_are_shares_of_the_groups(desk):
    small = desk.register("small", 1, min_batch_allocation=0.5)
    large = desk.register("large", 8)
    desk.begin(batch_size=4, unit="groups")
    desk.send(large, 1, 2, 3, 4, size=8)
    desk.send(small, 5, 6, size=1)
    assert desk.batch(1) == [1, 2, 5, 6]


def test_room_is_reckoned_in_groups_and_told_in_sequences(desk):
    env = desk.register(group_size=5)
    desk.begin(batch_size=2, unit="groups", max_staleness=0)
    pacing = desk.broker.heartbeat(env)
    assert (pacing.batch_size, pacing.room_sequences) == (10, 10)
    assert desk.send(env, 1, size=5).pacing.room_sequences == 5
    pacing = desk.send(env, 2, size=3).pacing
    assert (pacing.outstanding_sequences, pacing.room_sequences) == (8, 0)


def test_environments_of_the_atropos_contract_are_told_the_batch_in_sequences(desk):
    desk.begin(batch_size=2, unit="groups")
    env = desk.register(group_size=5)
    assert desk.legacy.status.batch_sequences(desk.broker.state.runs.open) == 10
    desk.send(env, 1, 2, 3, size=3)
    # Three groups wait, whatever they hold.
    assert desk.legacy.status.status_env(env).queue_size == 3


def test_resuming_in_another_unit_dissolves_batches_that_no_longer_fit(desk):
    env = desk.register()
    desk.begin(batch_size=8)
    desk.send(env, 1, 2, 3)
    assert desk.batch(1) == [1, 2]
    desk.begin(batch_size=2, unit="groups", resume=True)
    assert sorted(desk.broker.state.batches) == [1]
    desk.begin(batch_size=3, unit="groups", resume=True)
    assert sorted(desk.broker.state.batches) == []
    assert desk.batch(1) == [1, 2, 3]


def test_the_unit_outlives_a_restart(desk):
    env = desk.register()
    desk.begin(batch_size=2, unit="groups")
    desk.send(env, 1, 2, size=3)
    desk.restart()
    assert desk.batch(1) == [1, 2]


def test_another_unit_is_refused_by_name():
    body = msgspec.json.encode({"name": "r", "batch_size": 1, "max_token_length": 1, "num_steps": 1, "unit": "tokens"})
    with pytest.raises(InvalidRequest, match="unit"):
        decode_body(body, RunRequest)
