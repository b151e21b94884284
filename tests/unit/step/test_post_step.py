"""The post-step of a trainer that is told to stop while its server is gone."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from atropos_api.client import BrokerRefused, BrokerUnreachable
from atropos_api.client.calls import RunSuperseded
from example_trainer.config import TrainingConfig
from example_trainer.errors import BatchTimeout, PublishFailed, RanksFailed, ServerExited, WaitStopped, WaitTimedOut
from example_trainer.state import Phases, Progress
from example_trainer.step import post_step as module
from example_trainer.step.post_step import PostStep
from example_trainer.trainers import Trainer
from example_trainer.training import Gradients, Learner
from example_trainer.weights.base import PublishReport


class Calls:
    """A broker session and a bridge that note what is asked of them."""

    info = SimpleNamespace(run_id="r", max_staleness=None)

    def __init__(self, failure):
        self.made, self._failure = [], failure

    def publish(self, version):
        self.made.append(("publish", version))
        raise self._failure

    def announce_policy(self, *_):
        self.made.append("announce")

    def commit(self, step):
        self.made.append(("commit", step))

    def held_seconds(self, *_):
        return 0.0

    def should_publish(self, _):
        return True


@pytest.fixture
def make(tmp_path, monkeypatch):
    """A function that returns a post-step and the calls that it makes, if a publish ends with this error."""

    def made(failure, hears=True, **settings):
        calls = Calls(failure)
        monkeypatch.setattr(module, "save_from_all_ranks", lambda *_: calls.made.append("save"))
        learner = SimpleNamespace(
            policy=SimpleNamespace(device=torch.device("cpu")),
            objective=SimpleNamespace(state=dict),
            ranks=SimpleNamespace(on_main=lambda call: call(), world_size=1, have_heard=lambda _: hears),
            updates=1,
            loss_scale=None,
        )
        post_step = PostStep(
            TrainingConfig(model_name="m", run_dir=tmp_path, **settings),
            Progress(step=1, weights_step=1),
            learner=learner,
            alignment=SimpleNamespace(published=lambda _: None),
            session=calls,
            bridge=calls,
            phases=Phases(),
            should_stop=lambda: True,
        )
        return post_step, calls.made

    return made


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_weights_that_reach_no_server_before_a_stop_are_in_a_committed_checkpoint(make, overlaps):
    settings = {"weight_bridge_mode": "shared_vllm", "overlap_publish": overlaps}
    post_step, made = make(WaitStopped("told to stop while waiting for the server"), **settings)
    post_step.start(1)
    post_step.finish(finished=False)
    assert made == [("publish", 1), "save", ("commit", 1)], "no version is announced that nothing serves"


def test_a_checkpoint_knows_the_step_that_changed_the_weights_last(make):
    post_step, _ = make(None, weight_bridge_mode="shared_vllm")
    post_step._progress.step = 3
    assert (post_step._state().step, post_step._state().weights_step) == (3, 1)


def test_a_publish_that_fails_ends_the_run(make):
    post_step, made = make(PublishFailed("wrong weights"), weight_bridge_mode="shared_vllm")
    with pytest.raises(PublishFailed):
        post_step.start(1)
    assert made == [("publish", 1)]


def test_a_publish_is_announced_with_its_own_step_though_a_batch_without_signal_has_ended_meanwhile(make):
    """Such a batch waits for no publish. The version counted as one step newer, and after a crash as orphaned."""
    post_step, _ = make(None, weight_bridge_mode="shared_vllm", overlap_publish=True)
    released, announced = threading.Event(), []

    def publish(version):
        assert released.wait(10)
        return PublishReport(version=version, seconds=0.0)

    post_step._bridge.publish = publish
    post_step._session.announce_policy = lambda version, step, *_: announced.append((version, step))
    post_step.start(1)
    post_step._progress.step = 2
    released.set()
    post_step.join()
    assert announced == [(1, 1)]


NO_MORE = [
    BatchTimeout("no environment filled batch 2"),
    BrokerUnreachable("nothing answers"),
    BrokerRefused({"type": "https://atropos/problems/unknown-run", "detail": "no run r"}, 404),
    BrokerRefused({"detail": "Bad Gateway of a proxy"}, 502),
    RanksFailed("rank 0 has failed", ends_batches=True),
]


@pytest.mark.parametrize("error", NO_MORE, ids=lambda error: type(error).__name__)
def test_the_steps_of_a_run_whose_broker_is_gone_are_kept(make, error):
    """With --checkpoint-interval 0 all of them were lost, though the trainer had their weights."""
    post_step, made = make(None, weight_bridge_mode="shared_vllm", checkpoint_interval=0)
    for _ in range(2):  # it may have been written already
        with pytest.raises(type(error)):
            training_that_ends_with(error, post_step).train()
    assert made == ["save"]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("error", [PublishFailed("no answer"), WaitTimedOut("no server"), ServerExited("it ended")])
def test_the_steps_of_a_run_whose_inference_server_is_gone_are_kept(make, error, overlaps):
    """With --checkpoint-interval 0 all of them were lost, though the trainer had their weights."""
    settings = {"weight_bridge_mode": "shared_vllm", "overlap_publish": overlaps}
    post_step, made = make(error, checkpoint_interval=0, **settings)

    def train():
        post_step.start(1)
        post_step.wait()

    trainer = training_that_ends_with(error, post_step)
    trainer._train = train
    with pytest.raises(type(error)):
        trainer.train()
    assert made == [("publish", 1), "save"], "nothing is committed: a resume gets the batches that are not covered"


@pytest.mark.parametrize("settings", [{"master_weights": "none"}, {"train_layer_indices": "0-1"}])
def test_weights_that_existed_in_the_memory_of_a_lost_server_alone_are_not_written(make, settings):
    """Those of layers that are not trained are in no other place either."""
    post_step, made = make(None, weight_bridge_mode="shared_vllm", **settings)
    post_step._learner.policy.device = torch.device("cuda")
    with pytest.raises(WaitTimedOut):
        training_that_ends_with(WaitTimedOut("no server"), post_step).train()
    assert made == []


@pytest.mark.parametrize(("error", "hears"), [(RanksFailed("rank 0 has failed"), True), (NO_MORE[1], False)])
def test_no_rank_writes_its_part_of_a_checkpoint_that_the_others_do_not_write(make, error, hears):
    """It would wait for them until the time limit of an exchange."""
    post_step, made = make(None, hears=hears, weight_bridge_mode="none", checkpoint_interval=0)
    with pytest.raises(type(error)):
        training_that_ends_with(error, post_step).train()
    assert made == []


def test_the_weights_of_a_run_that_another_trainer_has_taken_over_are_not_written(make):
    post_step, made = make(None, weight_bridge_mode="shared_vllm")
    superseded = RunSuperseded({"type": "https://atropos/problems/run-superseded"}, 409)
    with pytest.raises(RunSuperseded):
        training_that_ends_with(superseded, post_step).train()
    assert made == []


def training_that_ends_with(error, post_step):
    def train():
        raise error

    trainer = Trainer.__new__(Trainer)
    trainer._train, trainer._post_step, trainer._tracker = train, post_step, SimpleNamespace(close=lambda: None)
    return trainer


@contextmanager
def waited_for_in_vain():
    raise WaitStopped("told to stop")
    yield


def test_an_update_that_waits_for_the_server_until_a_stop_has_changed_nothing():
    """Without masters the fence is set before the first weight changes: there a stop ends the run like any other."""
    learner = Learner.__new__(Learner)
    learner.policy, learner.updates = SimpleNamespace(changing=waited_for_in_vain), 3
    with pytest.raises(WaitStopped):
        learner.apply(Gradients(torch.zeros(1), torch.zeros(1), norm=1.0))
    assert learner.updates == 3
    trainer = Trainer.__new__(Trainer)
    trainer.config, trainer.progress = SimpleNamespace(training_steps=5), Progress(step=1)
    trainer._make_feed = lambda: SimpleNamespace(close=lambda: None)
    trainer._step = lambda *_: waited_for_in_vain().__enter__()
    assert trainer._train() is False
