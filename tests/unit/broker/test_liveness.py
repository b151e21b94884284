"""The liveness snapshot from incremental counts equals a count of all environments."""

import random

import pytest

from atropos_api.broker import Broker
from atropos_api.broker.environments import Environments, measure_liveness
from atropos_api.broker.state import SteadyClock
from atropos_api.store.directory import open_directory
from atropos_api.store.memory import MemoryBodyLog, MemoryLedger
from atropos_api.wire.messages import EnvironmentRequest, RunRequest

TIMEOUT = 60.0


def request_of(randomness):
    return EnvironmentRequest(
        name=f"env {randomness.randrange(12)}",
        group_size=randomness.choice([1, 4, 8]),
        max_token_length=randomness.choice([64, 2048]),
        weight=randomness.choice([-1.0, 0.0, 1.0, 2.5]),
        min_batch_allocation=randomness.choice([None, 0.25]),
    )


@pytest.mark.parametrize("seed", range(20))
def test_counting_when_something_changes_is_counting_always(seed):
    randomness = random.Random(seed)
    environments, now = Environments(MemoryLedger(), []), 0.0
    for _ in range(300):
        now += randomness.choice([0.0, 1.0, 20.0, 61.0])
        rows = list(environments)
        event = randomness.randrange(6)
        if event == 0 or not rows:
            environments.register(request_of(randomness), now)
        elif event == 1:
            environments.disconnect(randomness.choice(rows).environment_id)
        elif event == 2 and randomness.randrange(10) == 0:
            environments.disconnect_all()
        else:
            environments.touch(randomness.choice(rows), now, "run")
        found, wanted = environments.liveness(now, TIMEOUT), measure_liveness(list(environments), now, TIMEOUT)
        assert (found.alive, found.connected_sizes) == (wanted.alive, wanted.connected_sizes)
        assert (found.token_share, found.allocated) == (wanted.token_share, wanted.allocated)
        assert (found.largest_size, found.most_batches_offpolicy) == (
            wanted.largest_size,
            wanted.most_batches_offpolicy,
        )


@pytest.mark.parametrize("hours", [-5, 5])
def test_a_step_of_the_machines_clock_neither_ends_nor_stretches_liveness(hours):
    wall, monotonic = 1e9, 50.0
    clock = SteadyClock(lambda: wall, lambda: monotonic)
    assert clock() == 1e9
    broker = Broker(MemoryLedger(), MemoryBodyLog(), clock=clock, monotonic=lambda: monotonic)
    broker.begin_run(RunRequest(name="run", batch_size=8, max_token_length=64, num_steps=0))
    broker.register_environment(EnvironmentRequest(name="env", group_size=4, max_token_length=64))
    wall += hours * 3600
    monotonic += broker.settings.environment_timeout - 1
    assert len(broker.state.alive_environments()) == 1
    monotonic += 2
    assert broker.state.alive_environments() == []


def test_a_broker_keeps_such_a_clock_unless_it_is_given_another():
    assert isinstance(Broker(MemoryLedger(), MemoryBodyLog()).state.clock, SteadyClock)


def test_reading_the_store_again_forgets_no_sign_of_life(tmp_path):
    """Otherwise an environment's weight and minimum would not count, and a second process would get its name."""
    now = 0.0
    broker = Broker(*open_directory(tmp_path, fsync="never", fresh=False), clock=lambda: now)
    first, second = (EnvironmentRequest(name="e", process=one, group_size=4, max_token_length=9) for one in "ab")
    environment_id = broker.register_environment(first).environment_id
    now += 10 * TIMEOUT
    with broker.state.environments.waiting("a"):
        broker.heartbeat(environment_id, "a")
        broker.rebuild()
        assert [row.name for row in broker.state.alive_environments()] == ["e"]
        assert broker.register_environment(second).display_name == "e_1"
    broker.rebuild()
    assert broker.register_environment(second).display_name == "e_1"
    broker.close()
