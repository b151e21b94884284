"""`--master-weights none` in shared mode: the optimizer steps exactly the tensors that the server reads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from example_trainer.config import TrainingConfig
from example_trainer.errors import CheckpointError, ProofFailed, PublishFailed
from example_trainer.modeling.optimizers import OptimizerSettings, make_optimizer
from example_trainer.state import Phases, Progress
from example_trainer.step.post_step import PostStep
from example_trainer.weight_protocol.client import ServerClient
from example_trainer.weights import logprob_parity
from example_trainer.weights.shared_vllm import SharedVllmBridge
from example_trainer.weights.testing import config_of

TOKENS = torch.arange(3, 43).view(2, 20)
NONE = {"master_weights": "none"}


@pytest.fixture(autouse=True)
def _short_probe(monkeypatch):
    """Shorten the probe, as a CPU is slow with bf16; the proof's own tests have it whole."""
    monkeypatch.setattr(logprob_parity, "_PROMPT_LENGTHS", (4, 33))
    monkeypatch.setattr(logprob_parity, "_OUTPUTS_PER_PROMPT", 2)


@pytest.fixture
def in_place(shared):
    """A function that starts a fake server and a trainer without masters, the first version published."""

    def start(family="qwen2", *, dtype="float32", **settings):
        fake, bridge = shared(family, dtype=dtype, policy=NONE, **settings)
        policy = bridge.prepare()
        bridge.publish(1)
        return fake, bridge, policy

    return start


def optimizer_of(policy, name="adamw", lr=1e-3):
    return make_optimizer(policy.masters.values(), OptimizerSettings(name=name, lr=lr))


def backward(policy):
    with policy.autocast():
        logits = policy.module(input_ids=TOKENS).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), TOKENS[:, 1:].flatten())
    loss.backward()
    policy.collect_gradients()
    return loss.item()


def step(policy, optimizer):
    loss = backward(policy)
    with policy.changing():
        optimizer.step()
    optimizer.zero_grad()
    return loss


def copy_of(policy):
    return {name: master.detach().clone() for name, master in policy.masters.items()}


@pytest.mark.parametrize(("family", "name"), [("qwen2-tied", "adamw"), ("phi3", "adamw_8bit"), ("gpt2", "adafactor")])
def test_every_optimizer_learns_in_the_served_tensors_themselves(in_place, family, name):
    """R22: there is no second copy, each step is part of a publish, and both sides still agree."""
    fake, bridge, policy = in_place(family, dtype="bfloat16")
    assert policy.is_served
    assert {master.dtype for master in policy.masters.values()} == {torch.bfloat16}
    optimizer = optimizer_of(policy, name, lr=5e-3)
    losses = []
    for version in range(2, 6):
        losses.append(step(policy, optimizer))
        assert fake.server.header.state().torn
        assert bridge.publish(version).version == fake.server.policy_version == version
    assert losses[-1] < losses[0] - 0.1
    assert policy.is_served
    bridge._check.proven.clear()
    step(policy, optimizer)
    bridge.publish(6)  # proves the logprobs of both sides again


def test_nothing_is_served_while_the_optimizer_writes(in_place):
    fake, bridge, policy = in_place()
    seen = []

    class Watched(torch.optim.SGD):
        def step(self):
            seen.append((fake.server.fence.publishing, fake.server.header.state().torn))
            super().step()

    step(policy, Watched(policy.masters.values(), lr=0.1))
    assert seen == [(True, True)]
    assert fake.server.policy_version == 1
    bridge.publish(2)
    assert (fake.server.policy_version, fake.server.header.state().torn) == (2, False)


def test_a_checkpoint_of_the_views_is_whole_and_loading_it_makes_no_second_copy(in_place):
    fake, bridge, policy = in_place()
    kept = {name: tensor.clone() for name, tensor in policy.checkpoint_tensors().items()}
    assert all(tensor.is_contiguous() for tensor in policy.checkpoint_tensors().values())
    step(policy, optimizer_of(policy))
    bridge.publish(2)
    assert any(not torch.equal(kept[name], tensor) for name, tensor in policy.checkpoint_tensors().items())
    policy.load_masters(kept)
    assert fake.server.header.state().torn, "loading writes what is served, so it lies within a publish too"
    bridge.publish(3)
    assert policy.is_served
    assert all(torch.equal(kept[name], tensor) for name, tensor in policy.checkpoint_tensors().items())


def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_written(in_place):
    fake, _, policy = in_place()
    before = copy_of(policy)
    with pytest.raises(CheckpointError, match="lacks 1 trained"):
        policy.load_masters(dict(list(before.items())[1:]))
    with pytest.raises(CheckpointError, match="shape"):
        policy.load_masters({name: weight[:1] for name, weight in before.items()})
    assert not fake.server.header.state().torn
    assert not fake.server.fence.publishing


def test_r26_a_trainer_that_ends_after_a_step_and_before_its_publish_leaves_torn_weights(in_place):
    fake, bridge, policy = in_place(lease_seconds=0.2)
    saved = copy_of(policy)
    step(policy, optimizer_of(policy))
    bridge.close()
    fake.server.wait_until_lapsed()
    assert fake.server.answer("/generate", {"prompt": {"prompt_token_ids": [1]}, "max_tokens": 1})[0] == 503

    config = config_of(fake.url, fake.server.manifest.model, drain_seconds=0.0, **NONE)
    second = SharedVllmBridge(config)
    resumed = second.prepare()
    assert second.needs_publish()
    resumed.load_masters(saved)
    second.publish(7)
    assert not fake.server.header.state().torn
    assert resumed.is_served
    assert all(torch.equal(resumed.served[name], weight) for name, weight in saved.items())
    second.close()


def test_r27_a_restarted_server_gets_the_weights_as_they_are_now(in_place):
    fake, bridge, policy = in_place()
    optimizer = optimizer_of(policy)
    step(policy, optimizer)
    bridge.publish(2)
    trained = copy_of(policy)
    fake.restart()
    assert bridge.needs_publish()
    bridge.publish(3)
    assert policy.is_served
    assert all(torch.equal(policy.served[name], weight) for name, weight in trained.items())
    step(policy, optimizer)  # the optimizer's own tensors have moved to the new server's memory
    bridge.publish(4)
    assert any(not torch.equal(policy.served[name], weight) for name, weight in trained.items())


def test_r27_a_server_that_restarts_between_step_and_publish_gets_what_was_stepped(in_place):
    fake, bridge, policy = in_place()
    step(policy, optimizer_of(policy))
    stepped = copy_of(policy)
    fake.restart()
    bridge.publish(2)
    assert fake.server.policy_version == 2
    assert policy.is_served
    assert all(torch.equal(policy.served[name], weight) for name, weight in stepped.items())


def test_r27_on_a_gpu_the_weights_are_gone_with_the_server(in_place, monkeypatch):
    fake, bridge, _ = in_place()
    fake.restart()
    monkeypatch.setattr("example_trainer.weights.attachment.Attachment.device", torch.device("cuda"))
    with pytest.raises(PublishFailed, match="--resume auto"):
        bridge.publish(2)


def test_a_lease_that_lapses_in_the_middle_of_a_step_leaves_torn_weights_until_the_publish(in_place, monkeypatch):
    fake, bridge, policy = in_place(lease_seconds=0.1)
    backward(policy)
    with monkeypatch.context() as standing_still:
        standing_still.setattr(ServerClient, "renew_publish", lambda *_: None)
        with policy.changing():
            fake.server.wait_until_lapsed()
            optimizer_of(policy).step()
    stepped = copy_of(policy)
    assert fake.server.fence.torn
    bridge.publish(2)
    assert (fake.server.policy_version, fake.server.fence.torn) == (2, False)
    assert all(torch.equal(policy.served[name], weight) for name, weight in stepped.items())


def test_weights_of_another_model_at_the_server_are_replaced_before_anything_is_trained(in_place, tiny_family):
    fake, bridge, policy = in_place()
    base = copy_of(policy)
    step(policy, optimizer_of(policy, lr=0.1))
    bridge.publish(2)
    config = config_of(fake.url, tiny_family("qwen2"), drain_seconds=0.0, **NONE)
    second = SharedVllmBridge(config)
    fresh = second.prepare()
    assert fresh.is_served
    assert fake.server.header.state().torn
    second.publish(second.highest_version() + 1)
    assert all(torch.equal(fresh.served[name], weight) for name, weight in base.items())
    second.close()


@pytest.mark.parametrize("masters", ["fp32", "none"])
def test_a_write_outside_of_a_publish_is_found_at_the_next_one(shared, masters):
    """The sync proof without masters checks that the tensors have not changed since they were stamped."""
    _, bridge = shared(policy={"master_weights": masters}, sync_check="every")
    policy = bridge.prepare()
    bridge.publish(1)
    bridge.publish(2)
    with torch.no_grad():
        policy.served["model.layers.0.mlp.up_proj.weight"][1].neg_()
    with pytest.raises(ProofFailed, match="outside of a publish"):
        bridge.publish(3)


@pytest.mark.parametrize(("masters", "asked"), [("none", 3), ("fp32", 0)])
def test_a_step_that_changes_what_is_served_waits_for_an_evaluation_that_holds_the_policy(masters, asked):
    """After the step no more could be sampled for it: the fence stays up until its publish."""
    held = iter([5.0, 3.0, 0.0])
    answers = []

    def held_seconds(_=0.0):
        answers.append(next(held))
        return answers[-1]

    config = TrainingConfig(model_name="m", weight_bridge_mode="shared_vllm", master_weights=masters)
    post_step = PostStep(
        config,
        Progress(),
        learner=None,
        alignment=None,
        session=SimpleNamespace(held_seconds=held_seconds),
        bridge=None,
        phases=Phases(),
        should_stop=lambda: False,
    )
    post_step.wait()
    post_step.wait()  # before a second update of the same step, which could no longer be held back
    assert len(answers) == asked
