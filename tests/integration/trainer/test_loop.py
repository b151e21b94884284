"""The loop with a real broker: order of the actions after a step, resume, stops, steps without signal."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_pre_hook

from example_trainer.api import BrokerSession
from example_trainer.checkpointing import list_checkpoints, read_state
from example_trainer.testing import RolloutThread, Sampler, ServingBridge
from example_trainer.training import Learner

from .conftest import GROUP_SIZE, Workbench, even_tokens, hold_version_2

VOLATILE = ("time/", "perf/", "sync/", "timestamp", "policy_version")


def comparable(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if not name.startswith(VOLATILE)} for line in lines]


def weights_at(directory: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(directory / f"checkpoint-{step}" / "model.safetensors")


def run_live(bench: Workbench, **settings: Any) -> list[dict[str, Any]]:
    """Train on rollouts sampled from the published weights, as they come."""
    config = bench.config(training_steps=20, batch_size=16, lr=1e-2, importance_sampling="truncated", **settings)
    bridge = bench.bridge()
    sampler = Sampler(bench.model, seed=1)
    with RolloutThread(bench.url, bridge, sampler, even_tokens, group_size=GROUP_SIZE) as rollouts:
        assert bench.trainer(config, bridge).run()
    assert rollouts.error is None
    return bench.metrics(config)


def tail_reward(lines: list[dict[str, Any]]) -> float:
    return sum(line["reward/mean"] for line in lines[-3:]) / 3


def test_a_policy_learns_from_its_own_rollouts_and_stays_aligned_with_its_sampler(bench: Workbench) -> None:
    lines = run_live(bench, overlap_publish=True, keep_versions=6)
    assert lines[0]["reward/mean"] < 0.65
    assert tail_reward(lines) > 0.9
    assert all(line["alignment/tokens"] > 0 for line in lines if not line["train/skipped"])
    assert max(line.get("alignment/diff_max", 0.0) for line in lines) < 1e-4
    assert max(line.get("alignment/diff_abs_mean", 0.0) for line in lines) < 5e-6


def run_in_step(bench: Workbench, **settings: Any) -> list[dict[str, Any]]:
    """Train on batches that are each sampled from the version just published, at any speed of the machine."""
    place = bench.directory / str(settings["name"])
    config = bench.config(training_steps=10, batch_size=16, lr=1e-2, run_dir=place, **settings)
    bridge, sampler = bench.bridge(), Sampler(bench.model, seed=1)
    with RolloutThread(
        bench.url, bridge, sampler, even_tokens, group_size=GROUP_SIZE, groups_per_version=16 // GROUP_SIZE
    ) as rollouts:
        assert bench.trainer(config, bridge).run()
    assert rollouts.error is None
    return bench.metrics(config)


def test_the_control_with_shuffled_advantages_does_not_learn(bench: Workbench) -> None:
    """Both runs begin with the same batch; the control may learn less than a quarter of the possible gain."""
    real = run_in_step(bench, name="real")
    control = run_in_step(bench, name="control", shuffle_advantages=True)
    start = real[0]["reward/mean"]
    assert control[0]["reward/mean"] == start
    gain = tail_reward(real) - start
    assert gain > 0.4
    assert abs(tail_reward(control) - start) < 0.25 * gain


def test_r25_a_run_that_broke_off_and_was_resumed_equals_the_uninterrupted_one(
    bench: Workbench, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from atropos_api.testing import served_broker

    groups = bench.record_groups(12)
    settings: dict[str, Any] = {
        "training_steps": 6,
        "checkpoint_interval": 2,
        "warmup_steps": 5,
        "overlap_publish": True,
    }
    bench.submit(groups)
    whole = bench.config(run_dir=tmp_path / "whole", **settings)
    assert bench.trainer(whole, bench.bridge()).run()

    with served_broker() as url:
        again = Workbench(url=url, model=tiny_model, directory=tmp_path)
        again.submit(groups)
        broken = again.config(run_dir=tmp_path / "broken", **settings)
        dying = again.bridge()
        publish = dying.publish
        monkeypatch.setattr(dying, "publish", lambda v: publish(v) if v < 6 else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            again.trainer(broken, dying).run()
        assert [path.name for path in list_checkpoints(broken.checkpoint_root)] == ["checkpoint-2", "checkpoint-4"]
        resumed = broken.model_copy(update={"resume": "auto"})
        bridge = again.bridge()
        assert again.trainer(resumed, bridge).run()
        again.close()
        assert bridge.published[0][0] > 5  # versions go on above the highest ever announced

    for step in (2, 4, 6):
        left, right = weights_at(tmp_path / "whole", step), weights_at(tmp_path / "broken", step)
        assert all(torch.equal(left[name], right[name]) for name in left)
    lines = bench.metrics(broken)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    drop = {
        "staleness/mean",
        "staleness/max",
        "alignment/tokens",
        "alignment/diff_mean",
        "alignment/diff_abs_mean",
        "alignment/diff_max",
    }  # recorded rollouts name version 1, whose weights only the first attempt held
    for left, right in zip(comparable(bench.metrics(whole)), comparable(lines), strict=True):
        assert {k: v for k, v in left.items() if k not in drop} == {k: v for k, v in right.items() if k not in drop}


@pytest.mark.parametrize("overlap", [False, True])
def test_r2_each_step_publishes_announces_checkpoints_and_commits_in_that_order(
    bench: Workbench, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    lock = threading.Lock()

    def note(event: str) -> None:
        with lock:
            events.append(event)

    def spy(owner: type, name: str, label: Any) -> None:
        original = getattr(owner, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            note(label(args))
            return result

        monkeypatch.setattr(owner, name, call)

    spy(ServingBridge, "publish", lambda args: f"publish {args[0]}")
    spy(BrokerSession, "announce_policy", lambda args: f"announce {args[0]}")
    spy(BrokerSession, "commit", lambda args: f"commit {args[0]}")
    spy(Learner, "_clip_gradients", lambda _: "backward")
    monkeypatch.setattr(
        "example_trainer.step.save.save_checkpoint",
        lambda root, state, *_, **__: note(f"checkpoint {state.step}") or root,
    )
    config = bench.config(training_steps=3, checkpoint_interval=1, overlap_publish=overlap)
    bench.submit(bench.record_groups(6))
    assert bench.trainer(config, bench.bridge(publish_seconds=0.2)).run()
    for step in (1, 2, 3):
        version = step + 1
        order = [f"publish {version}", f"announce {version}", f"checkpoint {step}", f"commit {step}"]
        assert [event for event in events if event in order] == order
    assert len([event for event in events if event.startswith("publish")]) == 4
    if overlap:  # the backward of batch 2 ended while the weights of step 1 were still being published
        assert events.index("publish 2") > [at for at, event in enumerate(events) if event == "backward"][1]


def test_an_overlapped_publish_has_ended_before_the_weights_move(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge = bench.bridge(publish_seconds=0.2)
    seen: list[int] = []

    def watch(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        seen.append(bridge.highest_version())

    hook = register_optimizer_step_pre_hook(watch)
    try:
        bench.submit(bench.record_groups(8))
        assert bench.trainer(bench.config(overlap_publish=True), bridge).run()
    finally:
        hook.remove()
    assert seen == [1, 2, 3, 4]


def test_r34_steps_without_signal_count_and_are_committed_but_publish_nothing(
    bench: Workbench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.submit(bench.record_groups(12, reward=lambda _: 1.0))
    config, bridge = bench.config(training_steps=6), bench.bridge()
    with caplog.at_level(logging.WARNING):
        assert bench.trainer(config, bridge).run()
    assert [version for version, _ in bridge.published] == [1]
    assert [line["train/skipped"] for line in bench.metrics(config)] == [1.0] * 6
    assert caplog.text.count("flat reward") == 1
    state = read_state(config.checkpoint_root / "latest")
    assert (state.step, state.updates, state.policy_version) == (6, 0, 1)


def test_r13_without_checkpoints_on_the_way_each_step_is_committed(bench: Workbench) -> None:
    bench.submit(bench.record_groups(8))
    config = bench.config(checkpoint_interval=0)
    trainer = bench.trainer(config, bench.bridge())
    assert trainer.run()
    assert [path.name for path in list_checkpoints(config.checkpoint_root)] == ["checkpoint-4"]
    assert trainer.progress.committed == 4


def test_a_checkpoint_loads_with_transformers_and_says_what_it_covers(bench: Workbench) -> None:
    from transformers import AutoModelForCausalLM

    bench.submit(bench.record_groups(8))
    config = bench.config(checkpoint_interval=2)
    bridge = bench.bridge()
    assert bench.trainer(config, bridge).run()
    state = read_state(config.checkpoint_root / "checkpoint-4")
    assert (state.step, state.batch, state.updates, state.policy_version) == (4, 4, 4, 5)
    assert (config.checkpoint_root / "latest").readlink() == Path("checkpoint-4")
    loaded = AutoModelForCausalLM.from_pretrained(config.checkpoint_root / "latest")
    assert bridge.served is not None
    for name, weight in bridge.served[1].items():
        assert torch.equal(loaded.state_dict()[name], weight)


def test_a_stop_ends_after_the_step_with_a_checkpoint_that_a_resume_goes_on_from(bench: Workbench) -> None:
    bench.submit(bench.record_groups(8))
    config, bridge = bench.config(), bench.bridge()
    stopping = bench.trainer(config, bridge, should_stop=lambda: len(bridge.published) > 2)
    assert not stopping.run()
    assert [path.name for path in list_checkpoints(config.checkpoint_root)] == ["checkpoint-2"]
    resumed = config.model_copy(update={"resume": "auto"})
    assert bench.trainer(resumed, bench.bridge()).run()
    assert [line["step"] for line in bench.metrics(config)] == [1, 2, 3, 4]


def test_r24_an_evaluation_that_holds_the_policy_keeps_its_version_until_it_lets_go(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are trained meanwhile; the last one waits, as its weights would otherwise never be served."""
    held = hold_version_2(bench, monkeypatch, seconds=2.0)
    bench.submit(bench.record_groups(8))
    bridge = bench.bridge()
    started = time.monotonic()
    assert bench.trainer(bench.config(training_steps=4), bridge).run()
    assert time.monotonic() - started >= 2.0
    assert [line["policy_version"] for line in bench.metrics(bench.config())] == [2, 2, 2, 3]
    assert len(held) == 1


def test_r43_a_checkpoint_names_the_version_its_weights_are_and_none_where_their_publish_was_put_off(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: dict[int, dict[str, torch.Tensor]] = {}
    publish = ServingBridge.publish

    def publish_and_keep(self: ServingBridge, version: int) -> Any:
        report = publish(self, version)
        assert self.served is not None
        served[version] = self.served[1]
        return report

    monkeypatch.setattr(ServingBridge, "publish", publish_and_keep)
    monkeypatch.setattr(ServingBridge, "should_publish", lambda _, steps: steps >= 2)
    bench.submit(bench.record_groups(8))
    config = bench.config(checkpoint_interval=1, keep_last=4)
    assert bench.trainer(config, bench.bridge()).run()
    checkpoints = [path for path in list_checkpoints(config.checkpoint_root) if path.name != "latest"]
    named = {path.name: read_state(path).policy_version for path in checkpoints}
    assert len(named) == 4
    assert sorted(version for version in named.values() if version is not None) == [2, 3]
    for path in checkpoints:
        saved = load_file(path / "model.safetensors")
        same = [v for v, weights in served.items() if all(torch.equal(saved[name], weights[name]) for name in saved)]
        assert same == [named[path.name]] if named[path.name] else same == []


def test_several_epochs_publish_once_a_batch(bench: Workbench) -> None:
    bench.submit(bench.record_groups(4))
    bridge = bench.bridge()
    trainer = bench.trainer(bench.config(training_steps=2, epochs_per_batch=4), bridge)
    assert trainer.run()
    assert [version for version, _ in bridge.published] == [1, 2, 3]
    assert read_state(trainer.config.checkpoint_root / "latest").updates == 8


def test_a_server_that_lost_its_policy_gets_it_again_while_a_batch_is_awaited(bench: Workbench) -> None:
    bridge = bench.bridge()
    config = bench.config(training_steps=1)
    stop = threading.Event()
    trainer = bench.trainer(config, bridge, should_stop=stop.is_set)
    thread = threading.Thread(target=trainer.run)
    thread.start()
    try:
        while not bridge.published:
            stop.wait(0.01)
        bridge.lose_server()
        for _ in range(500):
            if len(bridge.published) > 1:
                break
            stop.wait(0.02)
    finally:
        stop.set()
        thread.join(20)
    assert [version for version, _ in bridge.published] == [1, 2]


def test_rare_publishes_do_not_starve_the_environments(bench: Workbench) -> None:
    config = bench.config(training_steps=5, vllm_restart_interval=100, checkpoint_interval=100)
    bridge = bench.bridge()
    sampler = Sampler(bench.model, seed=1)
    with RolloutThread(bench.url, bridge, sampler, even_tokens, group_size=GROUP_SIZE, batches_ahead=2) as rollouts:
        assert bench.trainer(config, bridge).run()
    assert rollouts.error is None
