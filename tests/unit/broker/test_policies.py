"""The name of a policy: runs, batches and groups carry it, and no run trains on groups of another policy's."""

import json

import msgspec
import pytest

from atropos_api.broker.status import describe_status
from atropos_api.errors import InvalidGroup, InvalidRequest
from atropos_api.testing import make_group
from atropos_api.wire import PolicyUpdate
from atropos_api.wire.group_json import check_group, decode_fields


def checked(policy, ident=1):
    group = make_group(4, 2, first_token=ident * 1000, policy=policy)
    return check_group(decode_fields(msgspec.json.encode(group)), env_id=0)


def test_a_run_trains_the_policy_that_it_names_or_the_default(broker):
    assert broker.begin().policy == "default"
    assert broker.begin(name="other", policy="student").policy == "student"


def test_a_resumed_run_keeps_its_policy(broker):
    broker.begin(policy="student")
    with pytest.raises(InvalidRequest, match="trains the policy 'student', not 'default'"):
        broker.begin(resume=True)
    assert broker.begin(resume=True, policy="student").policy == "student"
    broker.restart()
    assert broker.inner.state.runs.require_open().policy == "student"


def test_groups_of_the_runs_policy_and_of_none_are_trained_others_refused(broker):
    broker.begin(policy="student")
    env = broker.register()
    broker.inner.submit(env, [checked("student", 1), checked(None, 2)])
    assert broker.batch(1) == [1, 2]
    with pytest.raises(InvalidGroup, match="the open run trains the policy 'student', got default") as caught:
        broker.inner.submit(env, [checked("student", 3), checked("default", 4)])
    assert caught.value.field == "groups[1].policy"
    assert broker.inner.state.queue.groups == 0, "the request is refused as a whole"


def test_groups_that_waited_for_a_run_join_one_of_their_policy_alone(broker):
    env = broker.register()
    broker.inner.submit(env, [checked("teacher", 1), checked("student", 2), checked(None, 3)])
    broker.begin(policy="student")
    assert broker.batch(1) == [2, 3]
    broker.restart()
    stored = [json.loads(body).get("policy") for body in broker.inner.read_bodies(broker.inner.state.batches[1])]
    assert stored == ["student", None]
    assert broker.inner.state.queue.groups == 0


def test_the_age_of_the_published_policy_is_by_the_brokers_clock(broker):
    """The page subtracts it from the broker's time, and the clock of a trainer's host may be hours ahead or behind."""
    broker.begin()
    broker.inner.update_policy(PolicyUpdate(run_id=broker.info.run_id, version=1, step=0, published_at=99_999.0))
    broker.now += 5
    status = describe_status(broker.inner)
    assert status.time - status.run.published_at == 5
