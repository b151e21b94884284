"""R38a: a null among overrides crashes three of four known trainers; none is delivered, from any contract or form."""

import pytest

OVERRIDES = [None, {"set_advantage_to_zero": True}]
DELIVERED = [{}, {"set_advantage_to_zero": True}]


@pytest.mark.parametrize("asked", ["json", "columns"])
@pytest.mark.parametrize("sent", ["json", "columns", "v0"])
def test_r38a_a_null_is_delivered_as_an_empty_object(scene, sent, asked):
    env = scene.register_v1().environment_id
    scene.begin(batch_size=2)
    if sent == "v0":
        assert scene.post(1, 2, overrides=OVERRIDES) == {"status": "received"}
    else:
        scene.send(env, 1, size=2, form=sent, overrides=OVERRIDES)
    assert scene.get_batch(1, asked).groups[0].overrides == DELIVERED
    scene.restart()
    assert scene.get_batch(1, asked).groups[0].overrides == DELIVERED


@pytest.mark.parametrize("sent", ["json", "columns", "v0"])
def test_r38a_a_trainer_of_the_atropos_contract_sees_none_either(scene, sent):
    env = scene.register_v1().environment_id
    scene.register(batch_size=2)
    if sent == "v0":
        scene.post(1, 2, overrides=OVERRIDES)
    else:
        scene.send(env, 1, size=2, form=sent, overrides=OVERRIDES)
    assert scene.http.get("/batch").json()["batch"][0]["overrides"] == DELIVERED
    assert scene.http.get("/latest_example").json()["overrides"] == DELIVERED
