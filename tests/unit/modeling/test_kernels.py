"""Kernels for the learner's elementwise work compute what plain operations compute, or are refused.

On a CPU torch.compile needs a C++ compiler, so that tests which compile are skipped where there is none. Most of them
compile no kernels: the graphs are made, and run operation by operation (the backend `aot_eager`).
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from example_trainer.errors import KernelsUnusable
from example_trainer.model import load_policy
from example_trainer.modeling import kernels
from example_trainer.modeling.kernels import install_kernels
from example_trainer.modeling.layout_choice import choose_layout
from example_trainer.modeling.loading import PolicyOptions
from example_trainer.modeling.logprobs import PLAIN_PASSES, HeadPasses, head_of, token_logprobs
from example_trainer.modeling.lora import AdapterOptions
from example_trainer.modeling.micro_batches import Row, forward_hidden, pack_rows
from example_trainer.modeling.policy import Policy

from .conftest import labels_of, make_rows

COMPILE = torch.compile
CPU = torch.device("cpu")

# torch warns when it traces and when it imports its own compiler; where warnings are errors, that ends the trace.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang")), reason="no C++ compiler, which torch.compile needs on a CPU"
)


@pytest.fixture
def graphs_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs and their gradients are made as for a compiler, which then does not run."""
    monkeypatch.setattr(torch, "compile", partial(COMPILE, backend="aot_eager"))
    monkeypatch.setattr(kernels.shutil, "which", lambda name: name)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def load(path: Path, **options: Any) -> Policy:
    return load_policy(PolicyOptions(model_name=str(path), **{"dtype": "float32", "device": "cpu", **options}))


def train_on(policy: Policy, rows: list[Row], layout: Any, passes: HeadPasses | None) -> tuple[Tensor, Tensor]:
    """Return logprobs and gradients of one forward and backward."""
    labels = labels_of(rows)
    (micro,) = pack_rows(rows, 1 << 20, device=CPU, layout=layout)

    def score(module: Any) -> Tensor:
        at, (weight, bias) = micro.target_index, head_of(module)
        ones, states = torch.ones(len(at)), forward_hidden(module, micro)
        logprobs, entropies = token_logprobs(
            states, weight, micro.hidden_index, labels[at], ones, bias=bias, passes=passes
        )
        return logprobs + 0.1 * entropies

    values = policy.compute(score)
    values.mean().backward()
    policy.collect_gradients()
    gradients = torch.cat([each.grad.float().flatten() for each in policy.masters.values() if each.grad is not None])
    policy.drop_gradients()
    return values.detach(), gradients


def apart(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    return max(float((one - other).norm() / other.norm()) for one, other in zip(found, wanted, strict=True))


@needs_compiler
def test_compiled_layers_and_head_give_the_values_and_gradients_of_plain_operations(tiny_model: Path) -> None:
    policy = load(tiny_model)
    layout = choose_layout(policy)
    batches = [make_rows(seed=seed, groups=groups) for seed, groups in ((0, 3), (1, 5))]
    wanted = [train_on(policy, rows, layout, None) for rows in batches]
    passes = install_kernels(policy, "compile", layout)
    assert passes is not None
    for rows, plain in zip(batches, wanted, strict=True):
        assert apart(train_on(policy, rows, layout, passes), plain) < 1e-5


@needs_compiler
def test_the_compiled_head_computes_what_plain_operations_do_at_a_vocabulary_of_150_000() -> None:
    """Values and gradients within 1e-5 of the largest; both are as far from fp64's, as the CPU orders sums."""
    torch.manual_seed(0)
    tokens, vocabulary, width = 120, 150_000, 64
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = (torch.randn(vocabulary, width) * 3 / width**0.5).requires_grad_()
    index, temperatures = torch.arange(tokens), torch.linspace(0.7, 1.3, tokens)
    labels = torch.randint(vocabulary, (tokens,))
    compiled, plain = (
        token_logprobs(hidden, weight, index, labels, temperatures, passes=passes)  # several chunks
        for passes in (kernels.compiled_passes(), None)
    )
    whole = (hidden.double() @ weight.double().t() / temperatures[:, None]).log_softmax(1)
    exact = whole.gather(1, labels[:, None]).squeeze(1), -(whole.exp() * whole).sum(1)
    found, wanted, of_fp64 = (
        (*values, *torch.autograd.grad(values[0].sum() + 0.1 * values[1].sum(), [hidden, weight]))
        for values in (compiled, plain, exact)
    )
    for one, other, precise in zip(found, wanted, of_fp64, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()
        assert (one - precise).abs().max() <= 2e-5 * precise.abs().max()


@pytest.mark.parametrize("labels_of_each", [1, 3])
@pytest.mark.parametrize("entropy", [True, False])
def test_the_passes_of_the_head_are_those_of_full_logits(labels_of_each: int, entropy: bool) -> None:
    """Several labels a token, and entropies that no loss uses."""
    torch.manual_seed(0)
    logits = torch.randn(6, 50, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(50, (6, labels_of_each)).squeeze(1)
    whole = logits.log_softmax(-1)
    logprobs = whole.gather(1, labels.view(6, -1)).view(labels.shape)
    wanted = logprobs, -(whole.exp() * whole).sum(-1)
    found = PLAIN_PASSES.measure(logits.detach(), labels)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other.detach())
    upstream = torch.randn(labels.shape, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    loss = (wanted[0] * upstream[0]).sum() + (wanted[1] * upstream[1]).sum() * entropy
    (expected,) = torch.autograd.grad(loss, [logits])
    actual = PLAIN_PASSES.gradient(logits.detach(), labels, upstream[0], upstream[1] if entropy else None)
    torch.testing.assert_close(actual, expected)


def test_a_logit_of_minus_infinity_adds_no_entropy() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    logprobs, entropies = PLAIN_PASSES.measure(logits, torch.tensor([1]))
    half = torch.tensor([2.0]).log()
    torch.testing.assert_close(entropies, half)
    torch.testing.assert_close(logprobs, -half)


@pytest.mark.usefixtures("graphs_alone")
def test_layers_with_other_parts_are_compiled_too(tiny_family: Callable[[str], Path]) -> None:
    policy = load(tiny_family("gpt2"))
    layout = choose_layout(policy)
    rows = make_rows(seed=0)
    plain = train_on(policy, rows, layout, None)
    passes = install_kernels(policy, "compile", layout)
    assert sum("forward" in vars(part) for part in policy.module.modules()) == 3
    assert apart(train_on(policy, rows, layout, passes), plain) < 1e-5


@pytest.mark.usefixtures("graphs_alone")
def test_checkpointed_layers_and_adapters_with_dropout_are_compiled(tiny_model: Path) -> None:
    """Dropout draws other numbers in compiled layers, so that the comparison is made without it."""
    adapter = AdapterOptions(r=4, alpha=8, dropout=0.3, target_modules=("q_proj", "up_proj"))
    policy = load(tiny_model, adapter=adapter, gradient_checkpointing=True)
    passes = install_kernels(policy, "compile", choose_layout(policy))
    assert passes is not None
    assert policy.module.training
    values, gradients = train_on(policy, make_rows(seed=0), "shared", passes)
    assert values.isfinite().all()
    assert gradients.norm() > 0


def test_a_forward_in_a_wider_precision_than_training_is_not_compiled() -> None:
    calls: list[str] = []

    def note(kind: str) -> Callable[..., None]:
        return lambda *_: calls.append(kind)

    forward = kernels._forward_in(torch.float32, note("compiled"), note("plain"))
    forward(torch.nn.Identity(), torch.zeros(1))
    forward(torch.nn.Identity(), torch.zeros(1, dtype=torch.float64))
    assert calls == ["compiled", "plain"]


@pytest.mark.usefixtures("graphs_alone")
def test_kernels_that_compute_something_else_are_refused_and_under_auto_left_out(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        def forward(*arguments: Any, **named: Any) -> Any:
            found = function(*arguments, **named)
            return tuple(each * 1.01 for each in found) if isinstance(found, tuple) else found * 1.01

        return forward

    monkeypatch.setattr(torch, "compile", wrong)
    policy = load(tiny_model)
    layout = choose_layout(policy)
    with pytest.raises(KernelsUnusable, match=r"--kernels compile: values or gradients are .* use --kernels eager"):
        install_kernels(policy, "compile", layout)
    monkeypatch.setattr(kernels, "_are_plain", lambda *_: False)
    with caplog.at_level(logging.WARNING):
        assert install_kernels(policy, "auto", layout) is None
    assert "are not compiled: --kernels compile: values" in caplog.text
    assert not any("forward" in vars(part) for part in policy.module.modules())


@pytest.mark.usefixtures("graphs_alone")
def test_a_compiler_that_fails_is_reported_in_one_line(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("backend='inductor' raised:\nno Python.h")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: fail)
    policy = load(tiny_model)
    with pytest.raises(KernelsUnusable, match=r"^--kernels compile: backend='inductor' raised:; use --kernels eager$"):
        install_kernels(policy, "compile", choose_layout(policy))


@pytest.mark.parametrize("kind", ["auto", "eager"])
def test_on_a_cpu_operations_stay_plain_unless_asked(tiny_model: Path, kind: Any) -> None:
    policy = load(tiny_model)
    assert install_kernels(policy, kind, "shared") is None
    assert not any("forward" in vars(part) for part in policy.module.modules())


def test_without_a_compiler_the_flag_is_refused_with_what_is_missing(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    policy = load(tiny_model)
    with pytest.raises(KernelsUnusable, match=r"there is no g\+\+ \(CXX\) to compile with.*use --kernels eager$"):
        install_kernels(policy, "compile", "shared")
    assert kernels._compiler("cuda") == ("gcc (CC)", "gcc")


@pytest.mark.usefixtures("graphs_alone")
def test_liger_is_asked_for_the_layers_alone_and_refused_where_it_has_nothing(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.integrations import liger

    policy = load(tiny_model)
    layout = choose_layout(policy)
    with pytest.raises(KernelsUnusable, match="Liger has no kernels for a CPU"):
        install_kernels(policy, "liger", layout)
    monkeypatch.setattr(kernels, "_refuse", lambda *_: None)
    monkeypatch.setattr(liger, "is_liger_kernel_available", lambda: False)
    with pytest.raises(KernelsUnusable, match="pip install liger-kernel"):
        install_kernels(policy, "liger", layout)
    asked: list[dict[str, bool]] = []

    def apply(module: Any, config: dict[str, bool]) -> None:
        asked.append(config)
        if len(asked) > 1:
            norm = next(part for part in module.modules() if type(part).__name__ == "Qwen2RMSNorm")
            norm.forward = type(norm).forward.__get__(norm)

    monkeypatch.setattr(liger, "apply_liger_kernel", apply)
    with pytest.raises(KernelsUnusable, match="Liger has none for Qwen2ForCausalLM"):
        install_kernels(policy, "liger", layout)
    assert install_kernels(policy, "liger", layout) is not None
    assert {name for name, wanted in asked[-1].items() if wanted} == {"rope", "rms_norm", "swiglu"}


def test_the_probe_compares_part_of_each_gradient_and_leaves_none(tiny_model: Path) -> None:
    policy = load(tiny_model)
    values, gradients = kernels._probe(policy, "rows", None)
    assert len(values) == 2 * sum(np.array(kernels.LENGTHS) - 4)
    assert len(gradients) == sum(min(each.numel(), kernels.KEPT_OF_EACH) for each in policy.masters.values())
    assert all(master.grad is None for master in policy.masters.values())
