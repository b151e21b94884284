"""R24: only its holder can renew or release a hold."""

import pytest

from atropos_api.errors import UnknownHold
from atropos_api.wire.messages import HoldRequest


@pytest.mark.parametrize("part", [slice(0), slice(1), slice(-1), slice(1, None)])
def test_a_hold_is_released_and_renewed_by_its_whole_id_alone(broker, part):
    broker.begin()
    hold_id = broker.inner.holds.hold(HoldRequest(seconds=60)).hold_id
    for call in (broker.inner.holds.release, lambda id_: broker.inner.holds.hold(HoldRequest(seconds=1, hold_id=id_))):
        with pytest.raises(UnknownHold):
            call(hold_id[part])
    assert broker.inner.policy_state().held_seconds == 60
    broker.inner.holds.release(hold_id)
    assert broker.inner.policy_state().held_seconds == 0


def test_a_hold_that_ran_out_is_not_renewed(broker):
    broker.begin()
    hold_id = broker.inner.holds.hold(HoldRequest(seconds=60)).hold_id
    broker.now += 60
    with pytest.raises(UnknownHold):
        broker.inner.holds.hold(HoldRequest(seconds=60, hold_id=hold_id))


@pytest.mark.parametrize("back_seconds", [0.0, 5.0, 86_400.0])
def test_a_hold_lasts_no_longer_because_the_clock_was_set_back_while_the_broker_was_down(broker, back_seconds):
    broker.begin()
    hold_id = broker.inner.holds.hold(HoldRequest(seconds=60)).hold_id
    broker.now += 20 - back_seconds
    broker.restart()
    assert broker.inner.policy_state().held_seconds == min(60, 40 + back_seconds)
    broker.now += 30
    broker.inner.holds.hold(HoldRequest(seconds=60, hold_id=hold_id))
    broker.restart()
    assert broker.inner.policy_state().held_seconds == 60, "it was renewed"
    broker.now += 60
    assert broker.inner.policy_state().held_seconds == 0


def test_nor_does_a_hold_of_a_run_that_was_closed_when_the_broker_came_back(broker):
    broker.begin()
    broker.inner.holds.hold(HoldRequest(seconds=60))
    broker.begin(name="other")
    broker.now -= 86_400
    broker.restart()
    broker.begin(resume=True)
    assert broker.inner.policy_state().held_seconds == 60
