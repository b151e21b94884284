"""R24: a hold is its holder's alone."""

import pytest

from atropos_api.errors import UnknownHold
from atropos_api.wire.messages import HoldRequest


@pytest.mark.parametrize("part", [slice(0), slice(1), slice(-1), slice(1, None)])
def test_a_hold_is_released_and_renewed_by_its_whole_id_alone(desk, part):
    desk.begin()
    hold_id = desk.broker.holds.hold(HoldRequest(seconds=60)).hold_id
    for call in (desk.broker.holds.release, lambda id_: desk.broker.holds.hold(HoldRequest(seconds=1, hold_id=id_))):
        with pytest.raises(UnknownHold):
            call(hold_id[part])
    assert desk.broker.policy_state().held_seconds == 60
    desk.broker.holds.release(hold_id)
    assert desk.broker.policy_state().held_seconds == 0


def test_a_hold_that_ran_out_is_not_renewed(desk):
    desk.begin()
    hold_id = desk.broker.holds.hold(HoldRequest(seconds=60)).hold_id
    desk.now += 60
    with pytest.raises(UnknownHold):
        desk.broker.holds.hold(HoldRequest(seconds=60, hold_id=hold_id))
