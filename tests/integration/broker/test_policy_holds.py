"""R24: an evaluation that needs one version asks the trainer to publish no other, and learns whether it did."""

import concurrent.futures
import time

import httpx
import pytest

from atropos_api.client import BrokerClient, BrokerRefused, RunSuperseded
from atropos_api.testing import served_broker
from atropos_api.wire import EnvironmentRequest, PolicyUpdate, RunRequest


@pytest.fixture
def client():
    with served_broker() as url, BrokerClient(url, retry_seconds=1.0) as client:
        yield client


@pytest.fixture
def run(client):
    return client.begin_run(RunRequest(name="run", batch_size=4, max_token_length=64, num_steps=9))


def publish(client, run, version):
    update = PolicyUpdate(run_id=run.run_id, version=version, step=version, published_at=time.time())
    return client.update_policy(update)


def test_the_trainer_is_told_of_a_hold_before_and_after_it_publishes(client, run):
    assert publish(client, run, 1).held_seconds == 0
    hold = client.hold_policy(60, reason="eval of step 1")
    assert (hold.policy_version, hold.kept) == (1, True)
    assert 50 < client.get_policy().held_seconds <= 60
    assert 50 < publish(client, run, 2).held_seconds <= 60
    assert client.status()["counters"]["publishes_while_held_total"] == 1
    assert client.release_policy(hold.hold_id).kept is False


def test_a_released_hold_says_that_the_version_was_kept(client, run):
    publish(client, run, 1)
    hold = client.hold_policy(60)
    # A step that changed no weights does not change the version.
    client.update_policy(PolicyUpdate(run_id=run.run_id, version=1, step=2, published_at=time.time()))
    assert client.release_policy(hold.hold_id).kept is True
    assert client.get_policy().held_seconds == 0


def test_waiting_for_the_policy_ends_when_the_last_hold_is_released(client, run):
    first, second = client.hold_policy(60), client.hold_policy(60)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.get_policy, run_id=run.run_id, epoch=run.epoch, wait_seconds=20.0)
        client.release_policy(first.hold_id)
        time.sleep(0.2)
        assert not waiting.done()
        client.release_policy(second.hold_id)
        assert waiting.result(timeout=3).held_seconds == 0


def test_a_hold_ends_by_itself_unless_it_is_renewed(client, run):
    hold = client.hold_policy(0.3)
    assert client.hold_policy(0.8, hold_id=hold.hold_id).hold_id == hold.hold_id
    started = time.monotonic()
    assert client.get_policy(wait_seconds=10.0).held_seconds == 0
    assert 0.4 < time.monotonic() - started < 3
    for late in (lambda: client.hold_policy(1, hold_id=hold.hold_id), lambda: client.release_policy(hold.hold_id)):
        with pytest.raises(BrokerRefused, match="may have changed since") as caught:
            late()
        assert (caught.value.status, caught.value.kind) == (404, "unknown-hold")


def test_a_hold_answers_to_its_whole_id_alone(client, run):
    """If a prefix were accepted, a client could release the holds of other evaluations."""
    hold = client.hold_policy(60)
    whole = hold.hold_id
    for other in (whole[:-1], whole[:1], whole + "x", whole.swapcase(), whole[::-1]):
        for call in (
            lambda other=other: client.release_policy(other),
            lambda other=other: client.hold_policy(1, hold_id=other),
        ):
            with pytest.raises(BrokerRefused, match="no hold has this id"):
                call()
    assert client.get_policy().held_seconds > 50
    assert client.release_policy(whole).hold_id == whole


@pytest.mark.parametrize("seconds", [600.1, 0, -1, 1e300])
def test_no_hold_is_longer_than_ten_minutes(client, run, seconds):
    with pytest.raises(BrokerRefused, match="seconds") as caught:
        client.hold_policy(seconds)
    assert caught.value.status == 422


def test_a_hold_needs_a_run_and_ends_with_it(client):
    with pytest.raises(BrokerRefused, match="no run is open"):
        client.hold_policy(60)
    client.begin_run(RunRequest(name="a", batch_size=4, max_token_length=64, num_steps=9))
    client.hold_policy(60)
    client.begin_run(RunRequest(name="b", batch_size=4, max_token_length=64, num_steps=9, take_over=True))
    assert client.get_policy().held_seconds == 0


def test_all_callers_see_the_hold_but_not_its_id(client, run):
    environment = client.register_environment(EnvironmentRequest(name="e", group_size=4, max_token_length=9))
    assert environment.pacing.policy_held_seconds == 0
    hold = client.hold_policy(60, reason="gsm8k")
    assert client.heartbeat(environment.environment_id).policy_held_seconds > 50
    text = httpx.get(f"{client.url}/v1/status").text
    assert '"reason":"gsm8k"' in text
    assert hold.hold_id not in text
    assert "atropos_policy_held_seconds 5" in httpx.get(f"{client.url}/metrics").text


def test_an_operator_ends_all_holds_at_once(client, run):
    client.hold_policy(60)
    client.hold_policy(60)
    assert httpx.delete(f"{client.url}/v1/policy/hold").status_code == 204
    assert client.get_policy().held_seconds == 0


def test_a_superseded_trainer_learns_it_from_the_policy(client, run):
    client.begin_run(RunRequest(name="run", batch_size=4, max_token_length=64, num_steps=9, resume=True))
    with pytest.raises(RunSuperseded):
        client.get_policy(run_id=run.run_id, epoch=run.epoch)
