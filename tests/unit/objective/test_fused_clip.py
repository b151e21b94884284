"""Ratio, clip and minimum as one compiled kernel give what plain operations give, or plain operations stay."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from example_trainer.config import TrainingConfig
from example_trainer.model import load_policy
from example_trainer.modeling import kernels
from example_trainer.modeling.loading import policy_options
from example_trainer.objective.losses import LossInputs, LossSettings, loss_terms
from example_trainer.objective.objective import Objective
from example_trainer.step.train_step import make_train_step

COMPILE = torch.compile
CPU = torch.device("cpu")

# torch warns when it traces and when it imports its own compiler; where warnings are errors, that ends the trace.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]


def loss_and_gradient(settings: LossSettings, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    logprobs = torch.randn(count, generator=generator).requires_grad_()
    inputs = LossInputs(
        logprobs=logprobs,
        entropies=torch.ones(count),
        rollout_logprobs=logprobs.detach() + torch.randn(count, generator=generator),
        advantages=torch.randn(count, generator=generator),
        sequences=torch.arange(count) // 5,
    )
    losses = loss_terms(inputs, settings)["policy"]
    return losses.detach(), torch.autograd.grad(losses.sum(), logprobs)[0]


def fused(**settings: Any) -> LossSettings:
    objective = Objective(LossSettings(**settings))
    objective.fuse_clip(CPU)
    return objective.settings


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang")), reason="no C++ compiler")
@pytest.mark.parametrize(
    "settings", [{}, {"loss_type": "dapo", "clip_eps_high": 0.28, "dual_clip": None}, {"loss_type": "gspo"}]
)
def test_the_compiled_clip_gives_the_losses_and_gradients_of_plain_operations(settings: dict[str, Any]) -> None:
    compiled = fused(**settings)
    assert compiled.fused_clip is not None
    for count in (1, 40, 333):
        for found, plain in zip(
            loss_and_gradient(compiled, count), loss_and_gradient(LossSettings(**settings), count), strict=True
        ):
            assert torch.allclose(found, plain, atol=1e-6)


@pytest.mark.parametrize(
    "settings", [{"loss_type": "cispo"}, {"importance_sampling": "truncated"}, {"own_loss": loss_terms}]
)
def test_other_losses_are_not_replaced_by_the_compiled_clip(settings: dict[str, Any]) -> None:
    assert fused(**settings).fused_clip is None


def test_a_run_with_compiled_kernels_has_the_compiled_clip(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are made as for a compiler, which then does not run."""
    monkeypatch.setattr(torch, "compile", partial(COMPILE, backend="aot_eager"))
    monkeypatch.setattr(kernels.shutil, "which", lambda name: name)
    for chosen in ("compile", "eager"):
        settings = {"model_name": str(tiny_model), "dtype": "float32", "device": "cpu", "kernels": chosen}
        config = TrainingConfig.model_validate({**settings, "optimizer": "adamw", "seq_len": 64})
        step = make_train_step(config, load_policy(policy_options(config)))
        assert (step.learner.objective.settings.fused_clip is not None) == (chosen == "compile")


def test_a_compiled_clip_that_differs_or_fails_is_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(clip: Any, **_: Any) -> Any:
        return lambda logs, advantages: clip(logs, advantages) * 1.001

    def failing(clip: Any, **_: Any) -> Any:
        return _fail

    for compiler, said in ((wrong, "it differs from plain operations"), (failing, "is not compiled: no compiler here")):
        monkeypatch.setattr(torch, "compile", compiler)
        assert fused().fused_clip is None
        assert said in caplog.messages[-1]


def _fail(*_: Tensor) -> Tensor:
    raise RuntimeError("no compiler here\nand much else")
