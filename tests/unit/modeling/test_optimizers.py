"""Optimizers step as documented or refuse; bf16 weights are rounded without bias; the schedule."""

from __future__ import annotations

import builtins
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from example_trainer.config import TrainingConfig
from example_trainer.errors import OptimizerUnavailable
from example_trainer.modeling import optimizers
from example_trainer.modeling.optimizers import (
    LearningRate,
    OptimizerSettings,
    StochasticRounding,
    learning_rate,
    load_state,
    make_optimizer,
    optimizer_settings,
    round_stochastically,
    rounding_noise,
    set_lr,
)

NAMES = ["adamw", "adamw_8bit", "adafactor"]


def run(name: str, weight: torch.Tensor, gradients: list[torch.Tensor], *, seed: int = 0, lr: float) -> torch.Tensor:
    """Return the weight after a step for each gradient, in the weight's dtype."""
    parameter = torch.nn.Parameter(weight.clone())
    settings = OptimizerSettings(name=name, lr=lr, weight_decay=0.0, seed=seed)
    optimizer = make_optimizer([parameter], settings)
    for gradient in gradients:
        parameter.grad = gradient.to(weight.dtype)
        optimizer.step()
    return parameter.detach().float()


def steady_gradients(shape: tuple[int, int], steps: int) -> list[torch.Tensor]:
    base = torch.randn(shape)
    return [base + 0.3 * torch.randn(shape) for _ in range(steps)]


def cosine(left: torch.Tensor, right: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(left.flatten(), right.flatten(), dim=0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_moves_weights_and_carries_its_state_over(name: Any, dtype: torch.dtype) -> None:
    def make(weight: torch.Tensor) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
        parameter = torch.nn.Parameter(weight.clone())
        return parameter, make_optimizer([parameter], OptimizerSettings(name=name, lr=1e-2))

    torch.manual_seed(0)
    # With the same gradient twice, the moments of an optimizer without its state would give the same step.
    start, gradient, next_gradient = (torch.randn(64, 64, dtype=dtype) for _ in range(3))
    parameter, optimizer = make(start)
    parameter.grad = gradient.clone()
    optimizer.step()
    assert not torch.equal(parameter, start)
    copy, resumed = make(parameter.detach())
    resumed.load_state_dict(deepcopy(optimizer.state_dict()))
    for each, stepper in ((parameter, optimizer), (copy, resumed)):
        each.grad = next_gradient.clone()
        stepper.step()
    assert torch.equal(parameter, copy)


@pytest.mark.parametrize("name", NAMES)
def test_the_rate_is_absolute_so_that_matrices_of_zeros_move_as_far_as_others(name: str) -> None:
    """An adapter's second matrix starts at zero; a rate relative to its size would leave it there."""
    gradient = torch.randn(64, 64)
    moved = run(name, torch.zeros(64, 64), [gradient], lr=1e-2)
    assert moved.abs().mean().item() == pytest.approx(1e-2, rel=0.5)
    assert (moved.sign() == -gradient.sign()).float().mean() > 0.99


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_betas_and_eps_are_those_of_adams_formula(name: Any) -> None:
    """The gradients are 1 and 0, and the matrix small enough for exact states, so both moments are known."""
    config = TrainingConfig(
        model_name="m", optimizer=name, lr=0.1, adam_beta1=0.8, adam_beta2=0.6, adam_eps=0.5, weight_decay=0.0
    )
    parameter = torch.nn.Parameter(torch.zeros(4, 4))
    optimizer = make_optimizer([parameter], optimizer_settings(config))
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert parameter[0, 0].item() == pytest.approx(-0.1 / 1.5, rel=1e-5)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    first, second = 0.2 * 0.8 / (1 - 0.8**2), 0.4 * 0.6 / (1 - 0.6**2)
    assert parameter[0, 0].item() == pytest.approx(-0.1 / 1.5 - 0.1 * first / (second**0.5 + 0.5), rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_matrices_decay_while_norms_and_biases_do_not(name: Any) -> None:
    matrix, norm = torch.nn.Parameter(torch.ones(64, 64)), torch.nn.Parameter(torch.ones(64))
    optimizer = make_optimizer([norm, matrix], OptimizerSettings(name=name, lr=0.1, weight_decay=0.5))
    matrix.grad, norm.grad = torch.zeros_like(matrix), torch.zeros_like(norm)
    optimizer.step()
    torch.testing.assert_close(matrix.detach(), torch.full_like(matrix, 0.95))
    assert torch.equal(norm, torch.ones(64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_steps_with_the_decay_and_epsilon_of_its_own_options(name: Any, dtype: torch.dtype) -> None:
    """Torch stores them beside the state, and a resume went on with those of the run before."""

    def make(**settings: Any) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
        parameter = torch.nn.Parameter(torch.ones(64, 64, dtype=dtype))
        parameter.grad = torch.ones_like(parameter)
        return parameter, make_optimizer([parameter], OptimizerSettings(name=name, lr=0.1, **settings))

    _, before = make(weight_decay=0.0)
    matrix, resumed = make(weight_decay=0.5, eps=1.0)
    load_state(resumed, deepcopy(before.state_dict()))
    resumed.step()
    step = 0.1 if name == "adafactor" else 0.05  # a gradient of 1 over its own size, in Adam plus epsilon
    torch.testing.assert_close(matrix.float().mean(), torch.tensor(0.95 - step), atol=2e-3, rtol=0)


def test_a_missing_bitsandbytes_is_an_error_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "bitsandbytes":
            raise ImportError("No module named 'bitsandbytes'")
        return original(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(OptimizerUnavailable, match="pip install bitsandbytes"):
        make_optimizer([torch.nn.Parameter(torch.zeros(2))], OptimizerSettings(name="adamw_8bit", lr=1.0))


def test_a_bitsandbytes_without_a_kernel_for_the_device_is_refused_before_the_first_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import bitsandbytes

    def fail(*_: Any, **__: Any) -> None:
        raise NotImplementedError("no 8-bit kernel")

    monkeypatch.setattr(bitsandbytes.functional, "optimizer_update_8bit_blockwise", fail)
    with pytest.raises(OptimizerUnavailable, match=r"cannot step on cpu .no 8-bit kernel.*--optimizer adamw"):
        make_optimizer([torch.nn.Parameter(torch.zeros(2))], OptimizerSettings(name="adamw_8bit", lr=1.0))


def test_states_of_the_8bit_optimizer_take_a_byte_each() -> None:
    parameter = torch.nn.Parameter(torch.randn(64, 256))
    optimizer = make_optimizer([parameter], OptimizerSettings(name="adamw_8bit", lr=1e-2))
    parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    states = [value for value in optimizer.state[parameter].values() if torch.is_tensor(value)]
    assert sum(state.numel() * state.element_size() for state in states) < 2.3 * parameter.numel()


MODULE = """
import torch
from example_trainer.modeling.optimizers import OptimizerSettings

def momentum(groups, settings):
    return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.betas[0])

def of_one_group(groups, settings):
    return torch.optim.SGD(groups[:1], lr=settings.lr)

class Counting(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.0, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * group["count"] * parameter.grad

def counting(groups, settings):
    return Counting([parameter for group in groups for parameter in group["params"]])

def of_no_arguments():
    return None

def no_optimizer(groups, settings):
    return len(groups)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's with optimizers, on the path."""
    name = f"own_optimizers_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_of_the_users_own_steps_with_the_settings_and_bf16_is_rounded_stochastically(
    own: str, dtype: torch.dtype
) -> None:
    config = TrainingConfig(model_name="m", optimizer=f"{own}:momentum", lr=0.5, adam_beta1=0.5, weight_decay=0.0)
    parameter = torch.nn.Parameter(torch.zeros(4, 4, dtype=dtype))
    optimizer = make_optimizer([parameter], optimizer_settings(config))
    assert isinstance(optimizer, StochasticRounding) == (dtype == torch.bfloat16)
    for _ in range(2):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert torch.equal(parameter.detach(), torch.full_like(parameter, -0.5 * (1.0 + 1.5)))


def test_an_optimizer_of_ones_own_may_make_groups_of_its_own_and_is_stepped_once_a_step(
    own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights in bf16 are stepped in parts, which an optimizer that counts by group would take for steps."""
    monkeypatch.setattr(optimizers, "CHUNK_ELEMENTS", 4)
    settings = OptimizerSettings(name=f"{own}:counting", lr=1.0)
    parameters = [torch.nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for size in (8, 8)]
    optimizer = make_optimizer([*parameters, torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))], settings)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    set_lr(optimizer, 0.5)
    optimizer.step()
    assert torch.equal(parameters[1].detach(), torch.full_like(parameters[1], -0.5)), "rate and step count"


def test_an_optimizer_in_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import torch\n\n\ndef plain(groups, settings):\n    return torch.optim.SGD(groups, lr=settings.lr)\n"
    (tmp_path / "my_optimizers_beside_the_run_file.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    name = "my_optimizers_beside_the_run_file:plain"
    optimizer = make_optimizer([torch.nn.Parameter(torch.zeros(2))], OptimizerSettings(name=name, lr=1.0))
    assert isinstance(optimizer, torch.optim.SGD)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("missing", r"cannot be imported: .*missing.*PYTHONPATH"),
        ("of_no_arguments", r"fails on a small matrix: TypeError.*docs/reference/library.md"),
        ("no_optimizer", r"fails on a small matrix: AttributeError"),
        ("of_one_group", r"leaves parameters unchanged; let it step all"),
    ],
)
def test_an_optimizer_that_does_not_work_is_refused_in_one_line_that_names_it(
    own: str, function: str, said: str
) -> None:
    with pytest.raises(OptimizerUnavailable, match=f"--optimizer {own}:{function} {said}") as raised:
        make_optimizer([torch.nn.Parameter(torch.zeros(2))], OptimizerSettings(name=f"{own}:{function}", lr=1.0))
    assert "\n" not in str(raised.value)


def test_an_optimizer_of_the_users_own_is_refused_for_weights_that_are_sharded_over_ranks() -> None:
    with pytest.raises(ValueError, match="--world-size 2: --optimizer mine:momentum would step a rank's rows"):
        TrainingConfig(model_name="m", weight_bridge_mode="none", world_size=2, optimizer="mine:momentum")
    TrainingConfig(model_name="m", weight_bridge_mode="lora_only", world_size=2, optimizer="mine:momentum")


def test_a_name_that_is_not_an_optimizer_lists_those_there_are() -> None:
    with pytest.raises(ValueError, match="adam is not an optimizer; use one of adamw, adamw_8bit, adafactor, or pack"):
        TrainingConfig(model_name="m", optimizer="adam")


def test_rounding_is_to_either_neighbour_and_right_on_average() -> None:
    values = torch.tensor([1.0 + 0.25 * 2**-7, -(1.0 + 0.25 * 2**-7), 1.5, 0.0, float("inf")]).repeat(20_000, 1)
    noise = rounding_noise(values.shape, values.device, torch.Generator().manual_seed(0))
    rounded = round_stochastically(values, noise).float()
    assert set(rounded[:, 0].tolist()) == {1.0, 1.0 + 2**-7}
    assert rounded[:, 0].mean().item() == pytest.approx(1.0 + 0.25 * 2**-7, abs=1e-4)
    assert rounded[:, 1].mean().item() == pytest.approx(-(1.0 + 0.25 * 2**-7), abs=1e-4)
    assert rounded[:, 2:].unique(dim=0).tolist() == [[1.5, 0.0, float("inf")]]


def test_the_noise_follows_seed_and_step_and_nothing_else() -> None:
    torch.manual_seed(0)
    weight, gradients = (torch.randn(64, 64) * 0.02).bfloat16(), steady_gradients((64, 64), 3)
    first = run("adamw", weight, gradients, seed=1, lr=1e-4)
    torch.manual_seed(99)
    assert torch.equal(run("adamw", weight, gradients, seed=1, lr=1e-4), first)
    assert not torch.equal(run("adamw", weight, gradients, seed=2, lr=1e-4), first)


def test_bf16_weights_stepped_at_a_small_rate_go_where_fp32_ones_go() -> None:
    """With 20 seeds, ten steps at 1e-6 and updates of about the weights' spacing, the cosine is at least 0.98."""
    torch.manual_seed(0)
    weight = (torch.randn(256, 256) * 1e-3).bfloat16()
    gradients = steady_gradients((256, 256), 10)
    exact = run("adamw", weight.float(), gradients, lr=1e-6) - weight.float()
    runs = [run("adamw", weight, gradients, seed=seed, lr=1e-6) - weight.float() for seed in range(20)]
    assert cosine(sum(runs, torch.zeros(256, 256)), exact) >= 0.98


def test_updates_far_below_the_spacing_are_kept_on_average_where_nearest_rounding_loses_them() -> None:
    torch.manual_seed(0)
    weight = (torch.randn(256, 256) * 0.02).bfloat16()
    gradients = steady_gradients((256, 256), 10)
    exact = run("adamw", weight.float(), gradients, lr=1e-6) - weight.float()

    def progress(update: torch.Tensor) -> float:
        return float((update * exact).sum() / exact.square().sum())

    for seed in range(5):
        assert progress(run("adamw", weight, gradients, seed=seed, lr=1e-6) - weight.float()) == pytest.approx(
            1.0, abs=0.05
        )
    nearest = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([nearest], lr=1e-6, weight_decay=0.0)
    for gradient in gradients:
        nearest.grad = gradient.bfloat16()
        optimizer.step()
    assert progress(nearest.detach().float() - weight.float()) < 0.1


def test_large_models_are_stepped_in_parts_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> list[torch.Tensor]:
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(64, 64).bfloat16()) for _ in range(5)]
        optimizer = make_optimizer(parameters, OptimizerSettings(name="adamw", lr=1e-3))
        assert isinstance(optimizer, StochasticRounding)
        for parameter in parameters[:4]:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        return [parameter.detach() for parameter in parameters]

    whole = step()
    monkeypatch.setattr("example_trainer.modeling.optimizers.CHUNK_ELEMENTS", 5_000)
    assert all(torch.equal(left, right) for left, right in zip(whole, step(), strict=True))


def test_every_weight_is_rounded_once_where_a_tensor_is_rounded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("example_trainer.modeling.optimizers.PIECE_ELEMENTS", 10)
    torch.manual_seed(0)
    start = [torch.randn(7, 3), torch.randn(3, 8).t(), torch.randn(25), torch.randn(())]
    rounded = [torch.nn.Parameter(values.bfloat16()) for values in start]
    exact = [torch.nn.Parameter(parameter.detach().float()) for parameter in rounded]
    for left, right in zip(rounded, exact, strict=True):
        right.grad = torch.ones_like(right)
        left.grad = right.grad.bfloat16()
    settings = OptimizerSettings(name="adamw", lr=0.1)
    make_optimizer(rounded, settings).step()
    make_optimizer(exact, settings).step()
    for left, right in zip(rounded, exact, strict=True):
        assert (left.float() - right).abs().max() <= right.abs().max() * 2**-7, "within the spacing of bf16"


def test_warmup_is_linear_from_zero_and_then_constant() -> None:
    assert [LearningRate(peak=1.0, warmup_steps=4).at(update) for update in (1, 2, 4, 9)] == [0.25, 0.5, 1.0, 1.0]
    assert LearningRate(peak=1.0).at(1) == 1.0


def test_linear_and_cosine_fall_from_the_peak_to_one_step_before_zero() -> None:
    linear = LearningRate(peak=1.0, schedule="linear", total_steps=4)
    assert [linear.at(update) for update in (1, 2, 3, 4, 5, 9)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    after_warmup = LearningRate(peak=2.0, warmup_steps=2, schedule="linear", total_steps=5)
    assert [after_warmup.at(update) for update in (1, 2, 3, 4, 5)] == [1.0, 2.0, 1.5, 1.0, 0.5]
    cosine = LearningRate(peak=1.0, schedule="cosine", total_steps=4)
    assert [cosine.at(update) for update in (1, 3, 4)] == pytest.approx([1.0, 0.5, 0.5 - 0.5**1.5])


def test_a_run_s_schedule_counts_every_optimizer_step() -> None:
    rate = learning_rate(TrainingConfig(model_name="m", training_steps=5, mini_batches=2, lr_schedule="linear", lr=1.0))
    assert rate.at(10) == pytest.approx(0.1)


def test_the_rate_reaches_every_parameter_group() -> None:
    optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)], lr=1.0)
    set_lr(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
