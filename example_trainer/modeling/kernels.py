"""Kernels of the elementwise work between the learner's products: norms, rotary positions, SwiGLU, the head's passes.

PyTorch runs each such operation alone, reading and writing arrays of the size of the activations. `compile` gives the
forward of each decoder layer, and the head's passes over its logits, to torch.compile; attention stays as it is.
`liger` puts Liger's Triton kernels into the layers instead. Whatever is chosen is compared with the plain operations on
a few tokens before it trains: values and gradients, on the device that it trains on.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from example_trainer.errors import KernelsUnusable
from example_trainer.modeling import attention
from example_trainer.modeling.loading import is_quantised
from example_trainer.modeling.logprobs import PLAIN_PASSES, HeadPasses, head_of, token_logprobs
from example_trainer.modeling.micro_batches import LayoutKind, PackedBatch, Row, forward_hidden, pack_rows
from example_trainer.modeling.shards import local_part

if TYPE_CHECKING:
    from example_trainer.modeling.policy import Policy
    from example_trainer.options.model import Kernels

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-4}
HALF_PRECISION_TOLERANCE = 5e-2
"""Largest distance of values and gradients from those of plain operations, relative to their length; fp32 had 2e-7."""
LENGTHS = (24, 19, 15)
KEPT_OF_EACH = 4096
"""Elements of each gradient that are compared; all of them would take a copy of the weights."""


def install_kernels(policy: Policy, kernels: Kernels, layout: LayoutKind) -> HeadPasses | None:
    """Put kernels into the policy's layers, and return the passes of its head; None for plain operations.

    Under `auto` they are compiled on a GPU if they can be and prove equal there, with a warning if not. On a CPU they
    stay plain: memory is not a bottleneck there, and compiling takes minutes. If a choice by name is impossible,
    `KernelsUnusable` is raised.
    """
    if _are_plain(kernels, policy.device):
        return None
    if kernels != "auto":
        return _install(policy, kernels, layout)
    try:
        return _install(policy, "compile", layout)
    except KernelsUnusable as error:
        _uncompile_layers(policy.module)
        logger.warning("the learner's operations are not compiled: %s", error)
        return None


def _are_plain(kernels: Kernels, device: torch.device) -> bool:
    return kernels == "eager" or (kernels == "auto" and device.type == "cpu")


def _install(policy: Policy, kernels: Kernels, layout: LayoutKind) -> HeadPasses:
    """Put these kernels into the layers and compare them; raise `KernelsUnusable` if they fail or differ."""
    _refuse(policy, kernels)
    plain, passes = _probe(policy, layout, None), compiled_passes()
    try:
        if kernels == "liger":
            _put_liger_into(policy.module)
        else:
            _compile_layers(policy.module, policy.dtype)
        difference = max(map(_apart, _probe(policy, layout, passes), plain))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise KernelsUnusable(f"--kernels {kernels}: {reason}; use --kernels eager") from error
    if not difference <= TOLERANCE.get(policy.dtype, HALF_PRECISION_TOLERANCE):
        raise KernelsUnusable(
            f"--kernels {kernels}: values or gradients are {difference:.1e} of their length from those of plain "
            "operations on this device; use --kernels eager"
        )
    logger.info("--kernels %s: %.1e of their length from plain operations", kernels, difference)
    return passes


def refuse_kernels(chosen: Kernels, device: torch.device) -> None:
    """Raise `KernelsUnusable` if what the kernels chosen by name need is missing on this machine."""
    if chosen not in {"auto", "eager"}:
        _refuse_here(chosen, device)


def _refuse_here(chosen: str, device: torch.device) -> None:
    compiler, program = _compiler(device.type)
    _raise_first(
        chosen,
        {
            f"there is no {compiler} to compile with; install a C++ compiler": shutil.which(program) is None,
            "Liger has no kernels for a CPU": chosen == "liger" and device.type == "cpu",
            "pip install liger-kernel": chosen == "liger" and find_spec("liger_kernel") is None,
        },
    )


def _refuse(policy: Policy, chosen: str) -> None:
    """Raise `KernelsUnusable` if what these kernels need is missing here, or if they cannot compute this policy."""
    sharding = policy.sharding
    is_divided = sharding is not None and sharding.tensor_parallel_size > 1
    in_four_bits = any(map(is_quantised, policy.module.parameters()))
    _raise_first(
        chosen,
        {
            "a base in 4 bits has kernels of its own": in_four_bits,
            "tensor parallelism divides the layers": is_divided,
        },
    )
    _refuse_here(chosen, policy.device)


def _raise_first(chosen: str, reasons: Mapping[str, bool]) -> None:
    for reason, holds in reasons.items():
        if holds:
            raise KernelsUnusable(f"--kernels {chosen}: {reason}; use --kernels eager")


def _compiler(device_type: str) -> tuple[str, str]:
    """Return the variable that names the compiler of torch (on a CPU) or of Triton, and the compiler."""
    variable, usual = ("CXX", "g++") if device_type == "cpu" else ("CC", "gcc")
    found = os.environ.get(variable) or next((name for name in (usual, "clang") if shutil.which(name)), usual)
    return f"{found} ({variable})", found


def _compile_layers(module: nn.Module, dtype: torch.dtype) -> None:
    """Compile the forward of each kind of decoder layer once, for any number of tokens."""
    from transformers.modeling_utils import AttentionInterface

    # Its buckets differ from batch to batch, and each new one would be compiled.
    whole: Any = torch.compiler.disable(attention.packed_attention)  # type: ignore[no-untyped-call]  # untyped in torch
    AttentionInterface.register(attention.ATTENTION_NAME, whole)
    compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
    for layer in _layers(module):
        plain = type(layer).forward
        if plain not in compiled:
            compiled[plain] = _forward_in(dtype, torch.compile(plain, dynamic=True), plain)
        layer.forward = MethodType(compiled[plain], layer)


def _forward_in(dtype: torch.dtype, compiled: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that is compiled for this dtype alone: the parity check runs a few in a wider one."""

    def forward(layer: nn.Module, states: Tensor, *arguments: Any, **named: Any) -> Any:
        return (compiled if states.dtype == dtype else plain)(layer, states, *arguments, **named)

    return forward


def _uncompile_layers(module: nn.Module) -> None:
    for layer in _layers(module):
        vars(layer).pop("forward", None)


def _layers(module: Any) -> list[nn.Module]:
    """Return the decoder layers: by the class names in the model's `_no_split_modules`, also once they are sharded."""
    names = set(getattr(module, "_no_split_modules", None) or ())
    return [part for part in module.modules() if names & {kind.__name__ for kind in type(part).__mro__}]


def compiled_passes() -> HeadPasses:
    """Return the head's passes over its logits, to be compiled when they first run."""
    compiled = partial(torch.compile, dynamic=True)
    return HeadPasses(measure=compiled(PLAIN_PASSES.measure), gradient=compiled(PLAIN_PASSES.gradient))


def _put_liger_into(module: Any) -> None:
    """Put Liger's norms, rotary positions and SwiGLU into the layers; not its loss, which has no temperatures."""
    from transformers.integrations.liger import apply_liger_kernel

    parts = {"rope": True, "rms_norm": True, "swiglu": True, "cross_entropy": False}
    try:
        apply_liger_kernel(module, {**parts, "fused_linear_cross_entropy": False})
    except ImportError as error:
        raise KernelsUnusable("--kernels liger: pip install liger-kernel, or use --kernels compile") from error
    if not any("forward" in vars(part) for part in module.modules()):
        raise KernelsUnusable(f"--kernels liger: Liger has none for {type(module).__name__}; use --kernels compile")


def _probe(policy: Policy, layout: LayoutKind, passes: HeadPasses | None) -> tuple[Tensor, Tensor]:
    """Return logprobs and entropies of fixed random tokens, and the first elements of each weight's gradient."""
    vocabulary = policy.hf_config.get_text_config().vocab_size
    tokens = np.random.default_rng(0).integers(0, vocabulary, size=(len(LENGTHS), max(LENGTHS)))
    rows, first = [], 0
    for at, length in enumerate(LENGTHS):
        rows.append(Row(tokens=tokens[at, :length], targets=np.arange(4, length), first_target=first, group=at // 2))
        first += length - 4
    varlen = attention.uses_varlen(policy.device, policy.dtype)
    (micro,) = pack_rows(rows, 1 << 20, device=policy.device, layout=layout, varlen=varlen)
    labels = torch.from_numpy(np.concatenate([row.tokens[row.targets] for row in rows])).to(policy.device)
    policy.module.train(not policy.has_dropout)  # dropout would differ by its random numbers
    try:
        values = policy.compute(_score, micro, labels[micro.target_index], passes)
        (values.sum() / first).backward()  # type: ignore[no-untyped-call]  # untyped in torch
        policy.collect_gradients()
        found = [master.grad for master in policy.masters.values() if master.grad is not None]
        gradients = [local_part(gradient).flatten()[:KEPT_OF_EACH].float().cpu() for gradient in found]
    finally:
        policy.drop_gradients()
        policy.module.train()
    return values.detach().float().cpu(), torch.cat(gradients)


def _score(module: Any, micro: PackedBatch, labels: Tensor, passes: HeadPasses | None) -> Tensor:
    weight, bias = head_of(module)
    ones = torch.ones(len(labels), device=labels.device)
    hidden = forward_hidden(module, micro)
    return torch.cat(token_logprobs(hidden, weight, micro.hidden_index, labels, ones, bias=bias, passes=passes))


def _apart(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())
