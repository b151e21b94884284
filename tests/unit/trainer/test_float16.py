"""Training in float16: the loss scale, optimizer steps that overflow, and whole runs in each way of asking for it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from example_trainer.config import TrainingConfig
from example_trainer.data import TrainingBatch
from example_trainer.errors import TrainingDiverged, WrongDtype
from example_trainer.model import load_policy
from example_trainer.modeling.layout_choice import choose_layout
from example_trainer.modeling.loading import PolicyOptions
from example_trainer.modeling.loss_scale import INITIAL_SCALE, LossScale
from example_trainer.modeling.optimizers import make_optimizer, optimizer_settings
from example_trainer.objective.objective import make_objective
from example_trainer.testing import make_tiny_model
from example_trainer.training import Learner

from .flag_harness import USUAL, FlagHarness, TrainedRun
from .test_training import make_batch, weights_of

TOO_LARGE = 2.0**30
"""A scale at which every gradient of the tiny model overflows."""


def make_learner(model: Path, *, scale: LossScale | None = None, dtype: str = "float16", **settings: Any) -> Learner:
    config = TrainingConfig.model_validate(
        {"model_name": str(model), "dtype": dtype, "optimizer": "adamw", "lr": 1e-3, "seq_len": 64, **settings}
    )
    policy = load_policy(PolicyOptions(model_name=str(model), dtype=dtype, device="cpu"))
    optimizer = make_optimizer(policy.masters.values(), optimizer_settings(config))
    objective, layout = make_objective(config, policy), choose_layout(policy)
    learner = Learner(policy, optimizer, config, objective=objective, layout=layout)
    learner.loss_scale = scale or learner.loss_scale
    return learner


def with_advantages(batch: TrainingBatch, factor: float) -> TrainingBatch:
    return replace(batch, targets=replace(batch.targets, advantages=batch.targets.advantages * factor))


def gradients_after(learner: Learner, batch: TrainingBatch) -> torch.Tensor:
    training = learner.begin(batch)
    learner.accumulate(training, training.mini_batches[0])
    return torch.cat([m.grad.flatten() for m in learner.policy.masters.values() if m.grad is not None])


@pytest.mark.parametrize("chance_of_overflow", [0.0, 0.1, 0.6])
def test_the_scale_moves_as_torch_s_own_scaler_moves_it(chance_of_overflow: float) -> None:
    random = torch.Generator().manual_seed(3)
    ours = LossScale(growth_interval=5)
    parameter = torch.nn.Parameter(torch.ones(1))
    theirs: Any = torch.amp.GradScaler("cpu", growth_interval=5)
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    theirs.scale(torch.zeros(1))
    for _ in range(100):
        overflows = bool(torch.rand(1, generator=random) < chance_of_overflow)
        parameter.grad = torch.full((1,), torch.inf if overflows else 1.0)
        theirs.unscale_(optimizer)
        theirs.update()
        if overflows:
            ours.overflowed()
        else:
            ours.stepped()
        assert ours.scale == theirs.get_scale()
    assert torch.amp.GradScaler("cpu").get_scale() == INITIAL_SCALE


def test_another_checkpoint_can_be_the_reference_of_a_policy_in_float16(tiny_model: Path, tmp_path: Path) -> None:
    """Its weights are only read, although a policy in float16 must otherwise be loaded with masters."""
    reference = make_tiny_model(tmp_path / "reference", seed=7)
    learner = make_learner(tiny_model, kl_coef=0.1, ref_model=str(reference))
    batch = make_batch(tiny_model)
    prepared = learner.objective.prepare(batch.rows, batch.targets, learner.score)
    with learner.policy.with_weights(make_learner(reference).policy.snapshot()):
        expected = learner.score(batch.rows, batch.targets)
    assert prepared.reference_logprobs is not None
    torch.testing.assert_close(prepared.reference_logprobs, expected)


def test_gradients_too_small_for_float16_reach_the_masters(tiny_model: Path) -> None:
    tiny = with_advantages(make_batch(tiny_model), 1e-6)
    exact = gradients_after(make_learner(tiny_model, dtype="float32", max_grad_norm=0.0), tiny)
    scaled = gradients_after(make_learner(tiny_model, max_grad_norm=0.0), tiny)
    plain = gradients_after(make_learner(tiny_model, max_grad_norm=0.0, scale=LossScale(1.0)), tiny)
    assert (plain == 0).float().mean() > 0.5, "otherwise the scale has no effect here"
    assert (scaled - exact).norm() < 0.02 * exact.norm()


def test_the_norm_is_measured_and_clipped_after_the_scale_is_divided_out(tiny_model: Path) -> None:
    batch = make_batch(tiny_model)
    exact = make_learner(tiny_model, dtype="float32").train(batch).metrics["train/grad_norm"]
    bounded = make_learner(tiny_model, max_grad_norm=exact / 10)
    assert bounded.train(batch).metrics["train/grad_norm"] == pytest.approx(exact, rel=0.02)
    total = sum(float(m.grad.square().sum()) for m in bounded.policy.masters.values() if m.grad is not None)
    assert total**0.5 == pytest.approx(exact / 10, rel=1e-3)


def test_a_step_that_overflows_is_left_out_counted_and_halves_the_scale(tiny_model: Path) -> None:
    learner = make_learner(tiny_model, scale=LossScale(TOO_LARGE), warmup_steps=4)
    before, batch = weights_of(learner), make_batch(tiny_model)
    result = learner.train(batch)
    assert (result.updates, learner.updates) == (0, 0)
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(learner).items())
    counted = {name: result.metrics.get(f"train/{name}") for name in ("skipped_steps", "loss_scale", "nonfinite")}
    assert counted == {"skipped_steps": 1.0, "loss_scale": TOO_LARGE / 2, "nonfinite": 0.0}
    assert "train/grad_norm" not in result.metrics
    for _ in range(30):
        result = learner.train(batch)
        if result.updates:
            break
    assert result.metrics["train/lr"] == pytest.approx(0.25e-3), "the schedule counts steps that were taken"
    assert result.metrics["train/skipped_steps"] == 0.0
    assert not all(torch.equal(weight, before[name]) for name, weight in weights_of(learner).items())


def test_of_several_steps_a_batch_only_those_that_overflow_are_left_out(tiny_model: Path) -> None:
    learner, batch = make_learner(tiny_model, mini_batches=2, epochs_per_batch=12), make_batch(tiny_model)
    learner.loss_scale = LossScale(TOO_LARGE)
    result = learner.train(batch)
    skipped = result.metrics["train/skipped_steps"]
    assert 1 <= skipped < 24
    assert result.updates == learner.updates == 24 - skipped
    assert result.metrics["train/loss_scale"] == TOO_LARGE / 2**skipped
    assert 0.0 < result.metrics["train/grad_norm"] < 100.0


def test_a_scale_at_which_every_gradient_rounds_to_0_grows(tiny_model: Path) -> None:
    learner = make_learner(tiny_model, scale=LossScale(1.0, growth_interval=2))
    tiny = with_advantages(make_batch(tiny_model), 1e-12)
    results = [learner.train(tiny) for _ in range(2)]
    assert [(each.updates, each.metrics["train/loss_scale"]) for each in results] == [(0, 1.0), (0, 2.0)]


def test_a_loss_that_is_not_finite_is_not_the_scale_s_fault(tiny_model: Path) -> None:
    learner, batch = make_learner(tiny_model, max_nonfinite_steps=2), make_batch(tiny_model)
    result = learner.train(with_advantages(batch, float("inf")))
    assert result.metrics["train/nonfinite"] == 1.0
    assert (result.metrics["train/skipped_steps"], result.metrics["train/loss_scale"]) == (0.0, INITIAL_SCALE)
    with pytest.raises(TrainingDiverged, match="range of float16, so use --dtype bfloat16"):
        learner.train(with_advantages(batch, float("inf")))


def test_gradients_that_overflow_at_any_scale_end_the_run(tiny_model: Path) -> None:
    learner = make_learner(tiny_model, scale=LossScale(2.0), max_nonfinite_steps=2, max_grad_norm=0.0)
    huge = with_advantages(make_batch(tiny_model), 1e9)
    assert learner.train(huge).metrics["train/skipped_steps"] == 1.0
    assert learner.train(huge).metrics["train/nonfinite"] == 1.0
    with pytest.raises(TrainingDiverged, match="2 optimizer steps in a row"):
        learner.train(huge)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_dtypes_have_no_scale_and_no_such_metrics(tiny_model: Path, dtype: str) -> None:
    learner = make_learner(tiny_model, dtype=dtype)
    assert learner.loss_scale is None
    assert not {"train/skipped_steps", "train/loss_scale"} & learner.train(make_batch(tiny_model)).metrics.keys()


@pytest.fixture(scope="module")
def half_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, stored in float16."""
    from transformers import AutoModelForCausalLM

    directory = tmp_path_factory.mktemp("half")
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float16).save_pretrained(directory)
    return directory


def test_a_float16_checkpoint_without_masters_is_refused_before_it_is_loaded(half_model: Path) -> None:
    options = PolicyOptions(model_name=str(half_model), dtype="auto", device="cpu", master_weights="none")
    with pytest.raises(WrongDtype, match=r"--dtype auto: .* is served as float16, whose scaled gradients need fp32"):
        load_policy(options)


def test_a_checkpoint_of_a_dtype_that_nothing_serves_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64).save_pretrained(tmp_path)
    with pytest.raises(WrongDtype, match="stored as float64, which is not served"):
        load_policy(PolicyOptions(model_name=str(tmp_path), dtype="auto", device="cpu"))
    assert load_policy(PolicyOptions(model_name=str(tmp_path), dtype="float32", device="cpu")).dtype == torch.float32


WAYS = {"flag": ("float16", None), "auto": ("auto", None), "accelerate": (None, "fp16")}
"""`--dtype` and $ACCELERATE_MIXED_PRECISION, by the way of asking for float16."""
MODES = {
    "none": "--weight-bridge-mode none",
    "lora_only": "--weight-bridge-mode lora_only --lora-dropout 0",
    "shared_vllm": "--weight-bridge-mode shared_vllm",
}
FORMS = {
    "published beside the next batch": "--weight-bridge-mode shared_vllm --overlap-publish --mini-batches 2",
    "masters in host memory": "--weight-bridge-mode none --master-weights host",
    "8-bit states": "--weight-bridge-mode none --optimizer adamw_8bit",
    "adafactor": "--weight-bridge-mode none --optimizer adafactor",
    "a base in 4 bits": "--weight-bridge-mode lora_restart --load-in-4bit --lora-dropout 0",
}
_WITHOUT_DTYPE = USUAL[2:]


@pytest.fixture(scope="module")
def harness(half_model: Path, tmp_path_factory: pytest.TempPathFactory) -> FlagHarness:
    assert USUAL[0] == "--dtype"
    directory = tmp_path_factory.mktemp("float16")
    return FlagHarness(half_model, half_model, directory, usual=_WITHOUT_DTYPE, batches=5, served_dtype="float16")


def train_five_steps(harness: FlagHarness, *flags: str) -> TrainedRun:
    seen = harness.run("--training-steps", "5", *flags)
    assert seen.code == 0, seen.log
    assert seen.policy is not None
    assert seen.policy.dtype == torch.float16
    assert {master.dtype for master in seen.policy.masters.values()} == {torch.float32}
    assert [row["train/loss_scale"] for row in seen.rows] == [INITIAL_SCALE] * 5
    assert sum(row["train/skipped_steps"] + row["train/nonfinite"] for row in seen.rows) == 0
    assert seen.policy.has_adapter or seen.moved_from(harness.start) > 0
    return seen


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", MODES)
def test_a_float16_checkpoint_trains_five_steps(
    harness: FlagHarness, way: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, precision = WAYS[way]
    if precision is not None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    asked = [] if dtype is None else ["--dtype", dtype]
    seen = train_five_steps(harness, *MODES[mode].split(), *asked)
    assert "not --dtype" not in seen.log
    if mode == "shared_vllm":
        assert sum(path.endswith("publish/end") for path, _ in seen.recorded.served) == 6
        assert "agree on version 1" in seen.log


@pytest.mark.parametrize("form", FORMS)
def test_float16_goes_with_every_optimizer_and_place_of_the_masters(harness: FlagHarness, form: str) -> None:
    train_five_steps(harness, *FORMS[form].split(), "--dtype", "float16")


def test_a_server_of_another_dtype_is_said_and_its_dtype_trained(half_model: Path, tmp_path: Path) -> None:
    harness = FlagHarness(half_model, half_model, tmp_path, usual=_WITHOUT_DTYPE)
    seen = harness.run("--weight-bridge-mode", "shared_vllm", "--dtype", "float16")
    assert seen.policy is not None
    assert seen.policy.dtype == torch.float32
    assert "serves float32, so that is trained, not --dtype float16" in seen.log


@pytest.fixture
def large_scale(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set a first scale at which some gradients overflow, and which soon grows again."""
    made = classmethod(lambda _, dtype: LossScale(2.0**21, growth_interval=2) if dtype == torch.float16 else None)
    monkeypatch.setattr(LossScale, "of", made)
    return


@pytest.mark.usefixtures("large_scale")
def test_a_left_out_step_publishes_nothing_and_goes_on(half_model: Path, tmp_path: Path) -> None:
    harness = FlagHarness(half_model, half_model, tmp_path, usual=_WITHOUT_DTYPE, batches=5, served_dtype="float16")
    seen = harness.run("--training-steps", "5", "--dtype", "float16", "--weight-bridge-mode", "shared_vllm")
    skipped = [row["train/skipped_steps"] == 1.0 for row in seen.rows]
    assert True in skipped
    assert False in skipped
    announced = seen.recorded.of("announce")
    assert [step for _, step in announced] == [0, 1, 2, 3, 4, 5]
    versions = [version for version, _ in announced]
    assert [later == before for before, later in itertools.pairwise(versions)] == skipped


@pytest.mark.usefixtures("large_scale")
def test_a_resumed_run_has_the_weights_and_the_scale_of_one_that_was_not_stopped(
    half_model: Path, tmp_path: Path
) -> None:
    harness = FlagHarness(half_model, half_model, tmp_path, usual=_WITHOUT_DTYPE, batches=5)
    run = ("--dtype", "float16", "--training-steps", "5", "--epochs-per-batch", "2", "--checkpoint-interval", "1")
    whole = harness.run(*run)
    scales = [row["train/loss_scale"] for row in whole.rows]
    assert len(set(scales)) > 2, "the scale has to fall and to grow"
    for step in range(1, 5):
        resumed = harness.run(*run, "--resume", str(whole.directory / f"checkpoint-{step}"))
        assert [row["train/loss_scale"] for row in resumed.rows if row["step"] > step] == scales[step:]
        assert resumed.same_weights(whole)
