"""R14: a run may count its batches in groups; then sizes need not add up."""

import msgspec
import pytest

from atropos_api.errors import InvalidRequest, UnusableGroupSize
from atropos_api.http.request import decode_body
from atropos_api.wire import RunRequest


def test_a_batch_of_groups_is_the_oldest_ones_whatever_their_sizes(broker):
    env = broker.register(group_size=5)
    broker.begin(batch_size=3, unit="groups")
    for ident, size in ((1, 5), (2, 1), (3, 7), (4, 2)):
        assert broker.send(env, ident, size=size).buffered == 0
    assert broker.batch(1) == [1, 2, 3]
    assert broker.batch(2) is None


def test_no_size_is_refused_or_called_unpackable_where_groups_are_counted(broker):
    broker.begin(batch_size=3, unit="groups")
    env = broker.register(group_size=7)
    broker.send(env, 1, size=11)
    assert broker.counters.groups_unpackable_total == 0
    broker.begin(name="other", batch_size=3)
    with pytest.raises(UnusableGroupSize, match="groups of 7 are larger than a batch of 3"):
        broker.register(group_size=7)


def test_minima_are_shares_of_the_groups(broker):
    small = broker.register("small", 1, min_batch_allocation=0.5)
    large = broker.register("large", 8)
    broker.begin(batch_size=4, unit="groups")
    broker.send(large, 1, 2, 3, 4, size=8)
    broker.send(small, 5, 6, size=1)
    assert broker.batch(1) == [1, 2, 5, 6]


def test_room_is_counted_in_groups_and_reported_in_sequences(broker):
    env = broker.register(group_size=5)
    broker.begin(batch_size=2, unit="groups", max_staleness=0)
    pacing = broker.inner.heartbeat(env)
    assert (pacing.batch_size, pacing.room_sequences) == (10, 10)
    assert broker.send(env, 1, size=5).pacing.room_sequences == 5
    pacing = broker.send(env, 2, size=3).pacing
    assert (pacing.outstanding_sequences, pacing.room_sequences) == (8, 0)


def test_environments_of_the_atropos_contract_are_told_the_batch_in_sequences(broker):
    broker.begin(batch_size=2, unit="groups")
    env = broker.register(group_size=5)
    assert broker.legacy.status.batch_sequences(broker.inner.state.runs.open) == 10
    broker.send(env, 1, 2, 3, size=3)
    # Three groups wait, whatever their sizes.
    assert broker.legacy.status.status_env(env).queue_size == 3


def test_resuming_in_another_unit_dissolves_batches_that_no_longer_fit(broker):
    env = broker.register()
    broker.begin(batch_size=8)
    broker.send(env, 1, 2, 3)
    assert broker.batch(1) == [1, 2]
    broker.begin(batch_size=2, unit="groups", resume=True)
    assert sorted(broker.inner.state.batches) == [1]
    broker.begin(batch_size=3, unit="groups", resume=True)
    assert sorted(broker.inner.state.batches) == []
    assert broker.batch(1) == [1, 2, 3]


def test_the_unit_outlives_a_restart(broker):
    env = broker.register()
    broker.begin(batch_size=2, unit="groups")
    broker.send(env, 1, 2, size=3)
    broker.restart()
    assert broker.batch(1) == [1, 2]


def test_another_unit_is_refused_by_name():
    body = msgspec.json.encode({"name": "r", "batch_size": 1, "max_token_length": 1, "num_steps": 1, "unit": "tokens"})
    with pytest.raises(InvalidRequest, match="unit"):
        decode_body(body, RunRequest)
