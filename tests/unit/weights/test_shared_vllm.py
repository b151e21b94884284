"""The shared bridge with a server of vLLM's layout and protocol, in real shared memory."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from example_trainer.errors import CannotShare, ProofFailed, PublishFailed, ServerUnavailable
from example_trainer.serving.problems import Problem
from example_trainer.weight_protocol.client import ServerClient
from example_trainer.weights.testing import FakeServer

TOKENS = torch.arange(3, 43).view(2, 20)
BEGIN = {"drain_seconds": 0.0, "in_flight": "drain"}


def train_one_step(policy, learning_rate=0.05):
    optimizer = torch.optim.SGD(policy.masters.values(), lr=learning_rate)
    with policy.autocast():
        logits = policy.module(input_ids=TOKENS).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), TOKENS[:, 1:].flatten())
    loss.backward()
    policy.collect_gradients()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def served_equals_masters(policy):
    return all(torch.equal(policy.served[name], master.to(policy.dtype)) for name, master in policy.masters.items())


@pytest.mark.parametrize("family", ["qwen2", "qwen2-tied", "llama", "gpt2", "phi3"])
@pytest.mark.parametrize("forward", ["views", "masters"])
def test_attach_prove_train_publish(shared, family, forward):
    fake, bridge = shared(family, forward_weights=forward)
    policy = bridge.prepare()
    assert bridge.needs_publish()
    first = bridge.publish(1)
    assert (first.version, fake.server.policy_version) == (1, 1)
    assert not bridge.needs_publish()
    before = {name: view.clone() for name, view in policy.served.items()}
    train_one_step(policy)
    assert all(torch.equal(policy.served[name], before[name]) for name in before), "only a publish writes"
    bridge.publish(2)
    assert served_equals_masters(policy)
    assert any(not torch.equal(policy.served[name], before[name]) for name in before)
    assert fake.server.header.state().version == 2


@pytest.mark.parametrize("forward", ["views", "masters"])
def test_bf16_is_served_from_fp32_masters(shared, forward):
    _, bridge = shared("llama", dtype="bfloat16", forward_weights=forward, policy={"dtype": "float32"})
    policy = bridge.prepare()
    bridge.publish(1)
    train_one_step(policy)
    bridge.publish(2)
    assert policy.dtype == torch.bfloat16
    assert {master.dtype for master in policy.masters.values()} == {torch.float32}
    assert served_equals_masters(policy)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("steps_per_publish", [1, 4])
def test_r36_several_steps_a_batch_are_one_publish_with_the_same_losses_in_both_forms(shared, steps_per_publish, dtype):
    """Forward from the masters gives the losses that the forward from freshly published views gives."""
    _, in_views = shared("llama", dtype=dtype, forward_weights="views")
    views_policy = in_views.prepare()
    in_views.publish(1)
    views_losses = []
    for version in range(2, 2 + 2 * steps_per_publish):
        views_losses.append(train_one_step(views_policy))
        in_views.publish(version)

    fake, in_masters = shared("llama", dtype=dtype, forward_weights="masters")
    masters_policy = in_masters.prepare()
    in_masters.publish(1)
    masters_losses = []
    for batch in range(2):
        masters_losses += [train_one_step(masters_policy) for _ in range(steps_per_publish)]
        in_masters.publish(2 + batch)
    assert masters_losses == views_losses
    assert sum(path.endswith("publish/end") for path, _ in fake.server.requests) == 3


def test_frozen_layers_exist_once_and_are_never_written(shared):
    _, bridge = shared("llama", forward_weights="masters", policy={"train_layer_indices": "1"})
    policy = bridge.prepare()
    frozen = dict(policy.module.named_parameters())["model.layers.0.mlp.up_proj.weight"]
    assert frozen.data_ptr() == policy.served["model.layers.0.mlp.up_proj.weight"].data_ptr()
    bridge.publish(1)
    before = {name: view.clone() for name, view in policy.served.items()}
    train_one_step(policy)
    bridge.publish(2)
    changed = {name for name in before if not torch.equal(before[name], policy.served[name])}
    assert changed
    assert all(name.startswith("model.layers.1.") for name in changed)


def test_r27_a_restarted_server_gets_the_current_masters_before_anything_else(shared):
    fake, bridge = shared("qwen2", forward_weights="views")
    policy = bridge.prepare()
    bridge.publish(1)
    train_one_step(policy)
    bridge.publish(2)
    trained = {name: master.detach().clone() for name, master in policy.masters.items()}
    fake.restart()
    assert bridge.needs_publish()
    bridge.publish(3)
    assert fake.server.policy_version == 3
    assert all(torch.equal(policy.served[name], trained[name]) for name in trained)
    assert not bridge.needs_publish()
    train_one_step(policy)  # the module reads the new tensors
    bridge.publish(4)
    assert served_equals_masters(policy)


def test_r27_a_server_that_comes_back_with_another_model_is_refused(shared, monkeypatch):
    fake, bridge = shared("qwen2")
    bridge.prepare()
    bridge.publish(1)
    fake.restart()
    monkeypatch.setattr(fake.server.manifest, "model", "another")
    with pytest.raises(CannotShare, match="another"):
        bridge.publish(2)


@pytest.mark.parametrize("lost", ["request", "answer"])
def test_r41_whichever_exchange_is_lost_the_publish_gets_through_with_the_weights_it_was_given(shared, lost):
    fake, bridge = shared("qwen2", lease_seconds=20.0)
    policy = bridge.prepare()
    bridge.publish(1)
    exchanges = ["/bridge/publish/begin", "/bridge/publish/end", "/bridge/info", "/generate"]
    for version, path in enumerate(exchanges, 2):
        train_one_step(policy)
        fake.server.lost[path] = lost
        if path == "/generate":
            bridge._check.proven.clear()
        started = time.monotonic()
        assert bridge.publish(version).version == fake.server.policy_version == version
        assert time.monotonic() - started < 10, "no step waits for the end of a lease"
        assert fake.server.lost == {}
        assert served_equals_masters(policy)
        assert not fake.server.fence.paused


def test_r41_a_renewal_that_is_lost_does_not_let_a_long_write_lapse(shared):
    fake, bridge = shared("qwen2", lease_seconds=2.0)  # renewed each third of it: machines at work take 0.6 s for that
    policy = bridge.prepare()
    bridge.publish(1)
    write = policy.write_served

    def slowly():
        fake.server.lost["/bridge/publish/renew"] = "request"
        time.sleep(2.5)
        write()

    policy.write_served = slowly
    assert bridge.publish(2).version == 2
    assert fake.server.header.state().version == 2
    assert sum(path.endswith("publish/begin") for path, _ in fake.server.requests) == 2, "one for each version"


def test_r41_where_the_end_is_lost_for_longer_than_the_lease_the_same_publish_counts(shared, monkeypatch):
    """The server has resumed by itself, under the version in the header."""
    fake, bridge = shared("qwen2", lease_seconds=0.2)
    policy = bridge.prepare()
    bridge.publish(1)
    train_one_step(policy)
    end, asked = ServerClient.end_publish, []

    def cut_off(self, publish_id, version, **more):
        asked.append(publish_id)
        if len(asked) == 1:
            bridge._attached.client.renew_publish = lambda _: None
            fake.server.wait_until_lapsed()
            raise ServerUnavailable("the network is down")
        return end(self, publish_id, version, **more)

    monkeypatch.setattr(ServerClient, "end_publish", cut_off)
    assert bridge.publish(2).version == fake.server.policy_version == 2
    assert served_equals_masters(policy)
    assert len(set(asked)) == 1


def test_r41_a_server_whose_engine_does_not_go_on_at_once_is_asked_again(shared, monkeypatch):
    fake, bridge = shared("qwen2")
    bridge.prepare()
    bridge.publish(1)
    fake.server.engine.failing.add("resume")
    end, ends = FakeServer._end, []

    async def recover_at_the_third(self, body):
        ends.append(body)
        if len(ends) == 3:
            self.engine.failing.clear()
        return await end(self, body)

    monkeypatch.setattr(FakeServer, "_end", recover_at_the_third)
    assert bridge.publish(2).version == fake.server.policy_version == 2
    assert ends == [ends[0]] * 3


def test_r41_a_resume_by_hand_in_the_middle_of_a_publish_does_not_break_it(shared):
    fake, bridge = shared("qwen2")
    policy = bridge.prepare()
    bridge.publish(1)
    write = policy.write_served

    def meanwhile():
        fake.server.answer("/bridge/resume", {})
        write()
        fake.server.answer("/bridge/resume", {})

    policy.write_served = meanwhile
    bridge.publish(2)
    assert sum(path.endswith("publish/begin") for path, _ in fake.server.requests) == 2, "one for each version"
    assert served_equals_masters(policy)


def test_r41_a_second_trainer_begins_once_the_publish_of_the_first_which_died_has_lapsed(shared):
    fake, bridge = shared("qwen2")
    policy = bridge.prepare()
    bridge.publish(1)
    dying = ServerClient(fake.url)
    dying.begin_publish("d" * 32, lease_seconds=1.0, drain_seconds=0.0, in_flight="drain")
    fake.server.header.begin_write(2)
    next(iter(policy.served.values())).zero_()
    assert bridge.publish(3).version == 3
    assert served_equals_masters(policy)
    assert not fake.server.fence.torn
    dying.close()


def test_r26_a_trainer_that_dies_mid_publish_leaves_torn_weights_that_a_whole_publish_mends(shared):
    fake, bridge = shared("qwen2")
    policy = bridge.prepare()
    bridge.publish(1)
    fake.server.answer("/bridge/publish/begin", BEGIN | {"lease_seconds": 0.05})
    fake.server.header.begin_write(2)
    next(iter(policy.served.values())).zero_()
    fake.server.wait_until_lapsed()
    assert fake.server.answer("/generate", {"prompt": {"prompt_token_ids": [1]}, "max_tokens": 1})[0] == 503
    assert bridge.needs_publish()
    assert bridge.highest_version() == 2
    bridge.publish(3)
    assert served_equals_masters(policy)
    assert not fake.server.header.state().torn


def test_a_publish_whose_lease_lapsed_before_the_write_is_begun_again(shared, monkeypatch):
    fake, bridge = shared("qwen2", lease_seconds=0.1)
    policy = bridge.prepare()
    bridge.publish(1)
    begin = ServerClient.begin_publish

    def stand_still_once(self, *arguments, **settings):
        fence = begin(self, *arguments, **settings)
        if not renewing:
            fake.server.wait_until_lapsed()
            renewing.append(True)
            monkeypatch.setattr(ServerClient, "renew_publish", renew)
        return fence

    renew, renewing = ServerClient.renew_publish, []
    monkeypatch.setattr(ServerClient, "renew_publish", lambda *_: None)
    monkeypatch.setattr(ServerClient, "begin_publish", stand_still_once)
    train_one_step(policy)
    assert bridge.publish(2).version == 2
    assert served_equals_masters(policy)


def test_a_version_that_is_not_new_is_refused_and_the_fence_is_lifted(shared):
    fake, bridge = shared("qwen2")
    bridge.prepare()
    bridge.publish(5)
    with pytest.raises(PublishFailed, match="not above 5"):
        bridge.publish(4)
    assert not fake.server.fence.publishing
    assert bridge.highest_version() == 5


def test_an_unauthorised_publish_is_reported_at_once(shared, monkeypatch):
    _, bridge = shared("qwen2")
    bridge.prepare()

    async def refuse(*_):
        raise Problem(401, "token-needed", "the bridge token is wrong")

    monkeypatch.setattr(FakeServer, "_begin", refuse)
    with pytest.raises(PublishFailed, match="token is wrong"):
        bridge.publish(1)


@pytest.mark.parametrize("forward", ["views", "masters"])
@pytest.mark.parametrize("fault", ["wrong slice", "tensor left out"])
def test_the_proof_stops_a_run_whose_publish_misses_weights(shared, forward, fault):
    _, bridge = shared("qwen2", forward_weights=forward)
    policy = bridge.prepare()
    name = "model.layers.0.self_attn.k_proj.weight"
    if fault == "wrong slice":
        policy.served[name] = policy.served["model.layers.0.self_attn.q_proj.weight"][: len(policy.served[name])]
    else:
        policy.served[name] = policy.served[name].clone()
    with torch.no_grad():
        for master in policy.masters.values():
            master.mul_(1.2)
    with pytest.raises(ProofFailed, match="max|q_proj" if forward == "masters" else "k_proj"):
        bridge.publish(1)


def test_the_proof_stops_a_run_whose_server_stamps_another_version(shared, monkeypatch):
    _, bridge = shared("qwen2")
    bridge.prepare()

    async def end_as_seven(self, body):
        self.header.begin_write(7)
        self.header.end_write(7)
        return dict(await self.fence.end(body["publish_id"], 7))

    monkeypatch.setattr(FakeServer, "_end", end_as_seven)
    with pytest.raises(ProofFailed, match="7"):
        bridge.publish(1)


def test_masters_on_the_host_train_and_publish_as_those_beside_the_model_do(shared):
    served = []
    for where in ("host", "fp32"):
        _, bridge = shared("qwen2", policy={"master_weights": where})
        policy = bridge.prepare()
        bridge.publish(1)
        for version in (2, 3):
            train_one_step(policy)
            bridge.publish(version)
        assert {master.device.type for master in policy.masters.values()} == {"cpu"}
        assert served_equals_masters(policy)
        served.append({name: view.clone() for name, view in policy.served.items()})
    assert all(torch.equal(served[0][name], served[1][name]) for name in served[0])


def test_the_lease_is_renewed_while_a_long_copy_runs(shared):
    fake, bridge = shared("qwen2", lease_seconds=0.15)
    policy = bridge.prepare()
    bridge.publish(1)
    slow = policy.served

    class SlowViews(dict):
        def __getitem__(self, name):
            time.sleep(0.02)
            return slow[name]

    policy.served = SlowViews()
    bridge.publish(2)
    assert sum(path.endswith("publish/renew") for path, _ in fake.server.requests) >= 3


def test_a_publish_writes_no_file(shared):
    _, bridge = shared("qwen2")
    bridge.prepare()
    bridge.publish(1)
    written = _bytes_written()
    for version in range(2, 7):
        bridge.publish(version)
    assert (_bytes_written() - written) / 5 < 100_000, "a publish is requests and memory only"


def _bytes_written() -> int:
    with Path("/proc/self/io").open() as file:
        return next(int(line.split()[1]) for line in file if line.startswith("wchar"))


def test_no_shared_memory_is_left_behind(shared):
    fake, bridge = shared("qwen2")
    bridge.prepare()
    fake.restart()
    assert len(list(Path("/dev/shm").glob(f"*{fake.server.boot_id}*"))) == 2
    fake.server.stop()
    assert not list(Path("/dev/shm").glob(f"*{fake.server.boot_id}*"))
    fake.server = fake.start()


def test_a_row_flipped_in_bf16_is_found_by_the_proof_though_its_logprobs_might_pass(shared, monkeypatch):
    _, bridge = shared("qwen2", forward_weights="masters", dtype="bfloat16")
    policy = bridge.prepare()
    end = FakeServer._end

    async def flip(self, body):
        policy.served["model.layers.0.mlp.down_proj.weight"][3].neg_()
        return await end(self, body)

    monkeypatch.setattr(FakeServer, "_end", flip)
    with pytest.raises(ProofFailed, match="down_proj"):
        bridge.publish(1)
