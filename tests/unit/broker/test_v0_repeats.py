"""R9: repeats without a key are recognised; the test calls the rules and decides if an answer arrived."""

import msgspec
import pytest

from atropos_api.broker import Broker, BrokerSettings
from atropos_api.broker.v0 import AtroposContract
from atropos_api.errors import QueueFull
from atropos_api.store.memory import MemoryBodyLog, MemoryLedger
from atropos_api.testing import make_group
from atropos_api.wire import EnvironmentRequest, columns_groups
from atropos_api.wire.columns_check import check_submission
from atropos_api.wire.group_json import check_group, decode_fields


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store():
    return MemoryLedger(), MemoryBodyLog()


@pytest.fixture
def legacy(store, clock):
    return open_legacy(store, clock)


def open_legacy(store, clock):
    return AtroposContract(Broker(*store, settings=BrokerSettings(dedup_window=30.0), clock=clock))


def fields(ident=1, env_id=0):
    return decode_fields(msgspec.json.encode(make_group(4, first_token=ident * 100, env_id=env_id)))


def send(legacy, *, answered, env_id=0):
    taken = legacy.take([fields(env_id=env_id)])
    legacy.settle(taken, arrived=answered)
    return taken.duplicates


def test_a_repeat_after_a_lost_answer_is_taken_once(legacy):
    assert send(legacy, answered=False) == 0
    assert send(legacy, answered=True) == 1
    assert send(legacy, answered=True) == 0
    assert legacy._state.queue.groups == 2


def test_a_repeat_whose_answer_is_lost_too_is_a_repeat_once_more(legacy):
    assert [send(legacy, answered=False) for _ in range(3)] == [0, 1, 1]
    assert send(legacy, answered=True) == 1
    assert send(legacy, answered=True) == 0


def test_equal_bytes_after_an_answer_are_another_group(legacy):
    assert [send(legacy, answered=True) for _ in range(3)] == [0, 0, 0]


def test_equal_bytes_of_another_environment_are_another_group(legacy):
    send(legacy, answered=False, env_id=0)
    assert send(legacy, answered=True, env_id=1) == 0


def test_after_the_window_equal_bytes_are_another_group(legacy, clock):
    send(legacy, answered=False)
    clock.now += 31
    assert send(legacy, answered=True) == 0


def test_a_crash_between_write_and_answer_makes_the_repeat_recognised_afterwards(legacy, store, clock):
    send(legacy, answered=True)
    # The group is taken and written, then the process is killed before its answer is sent.
    legacy.take([fields(2)])
    revived = open_legacy(store, clock)
    assert revived.take([fields(2)]).duplicates == 1
    assert revived.take([fields(2)]).duplicates == 0
    assert revived._state.queue.groups == 3


def send_one(legacy, ident, *, answered=True):
    taken = legacy.take([fields(ident)])
    legacy.settle(taken, arrived=answered)
    return taken.duplicates


@pytest.mark.parametrize("kills", [1, 2, 5])
def test_a_repeat_is_known_after_any_number_of_crashes_that_came_before_it(legacy, store, clock, kills):
    """R9: others' submissions, answered meanwhile, do not make the repeat a new group."""
    legacy.take([fields(1)])
    for ident in range(2, 2 + kills):
        legacy = open_legacy(store, clock)
        send_one(legacy, 10 * ident)
        send_one(legacy, 10 * ident + 1)
    revived = open_legacy(store, clock)
    assert [send_one(revived, 1) for _ in range(2)] == [1, 0]


def test_after_an_orderly_end_equal_bytes_of_what_was_answered_are_another_group(legacy, store, clock):
    send_one(legacy, 1)
    send_one(legacy, 2, answered=False)
    send_one(legacy, 3)
    legacy._broker.close()
    revived = open_legacy(store, clock)
    assert [send_one(revived, ident) for ident in (1, 3, 2)] == [0, 0, 1]


def test_a_lost_answer_is_remembered_over_a_crash_and_its_groups_may_be_trained_on_meanwhile(legacy, store, clock):
    send_one(legacy, 1, answered=False)
    send_one(legacy, 2)
    legacy._broker.batches.drop([group for lane in legacy._state.queue.lanes for group in lane], "reset")
    revived = open_legacy(store, clock)
    assert [send_one(revived, ident) for ident in (1, 2, 1)] == [1, 0, 0]


def test_a_repeat_whose_answer_a_crash_took_is_one_once_more(legacy, store, clock):
    send_one(legacy, 1, answered=False)
    legacy.take([fields(1)])
    # A record of another caller is written while the repeat is not answered.
    send_one(legacy, 2)
    revived = open_legacy(store, clock)
    assert [send_one(revived, 1) for _ in range(2)] == [1, 0]


def test_what_was_answered_or_is_too_old_is_not_remembered(legacy, store, clock):
    send_one(legacy, 1, answered=False)
    send_one(legacy, 2, answered=False)
    send_one(legacy, 1)
    clock.now += 31
    send_one(legacy, 3)
    found = store[0].load()
    assert (found.unanswered, found.expected) == ([3], {})


def test_equal_groups_of_one_submission_are_each_known_again(legacy, store, clock):
    legacy.settle(legacy.take([fields(1), fields(1)]), arrived=False)
    revived = open_legacy(store, clock)
    assert [send_one(revived, 1) for _ in range(3)] == [1, 1, 0]


def checked(form, ident=1):
    group = make_group(4, first_token=ident * 100)
    if form == "columns":
        return check_submission(columns_groups.encode_submission(0, [group]))[1]
    return [check_group(decode_fields(msgspec.json.encode(group)), env_id=0)]


def submit(broker, groups, *, answered):
    submitted = broker.take(0, groups)
    broker.settle(submitted, arrived=answered)
    return submitted.answer.accepted, submitted.answer.duplicates


@pytest.fixture(params=["json", "columns"])
def form(request):
    return request.param


def open_broker(store, clock):
    broker = Broker(*store, settings=BrokerSettings(dedup_window=30.0), clock=clock)
    broker.register_environment(EnvironmentRequest(name="env", group_size=4, max_token_length=64))
    return broker


def test_a_v1_submission_without_a_key_is_known_again_if_its_answer_was_lost(store, clock, form):
    broker = open_broker(store, clock)
    assert submit(broker, checked(form), answered=False) == (1, 0)
    assert submit(broker, checked(form, 2), answered=True) == (1, 0)
    assert submit(broker, checked(form), answered=False) == (0, 1)
    assert submit(broker, checked(form), answered=True) == (0, 1)
    assert submit(broker, checked(form), answered=True) == (1, 0)
    assert broker.state.counters.groups_duplicate_total == 2


def test_a_v1_submission_whose_answer_a_crash_took_is_known_again(store, clock, form):
    broker = open_broker(store, clock)
    submit(broker, checked(form), answered=True)
    broker.take(0, checked(form, 2))
    revived = open_broker(store, clock)
    assert submit(revived, checked(form, 2), answered=True) == (0, 1)
    assert submit(revived, checked(form, 2), answered=True) == (1, 0)


def test_repeats_among_groups_that_could_not_be_taken_stay_repeats(store, clock, form):
    broker = open_broker(store, clock)
    submit(broker, checked(form), answered=False)
    roomy = broker.state.settings
    broker.state.settings = roomy.model_copy(update={"max_queued_sequences": 4})
    with pytest.raises(QueueFull):
        broker.take(0, checked(form) + checked(form, 2))
    broker.state.settings = roomy
    assert submit(broker, checked(form) + checked(form, 2), answered=True) == (1, 1)
