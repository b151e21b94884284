"""Optimizers over the master weights, stochastic rounding for bf16 masters, and the learning-rate schedule.

An optimizer whose package is missing, or has no kernel for this device, is an error that names the install command: a
silent fallback would train another run than requested. Weight decay leaves out norms and biases, as Hugging Face's
`Trainer` does.

Masters in bf16 (`--master-weights none`) are stepped with stochastic rounding under every optimizer. Rounding to the
nearest bf16 number loses every update below half the spacing at its weight, which at usual learning rates is most of
them. With stochastic rounding an update of a tenth of the spacing moves the weight one time in ten, so the sum over
steps equals the exact one in expectation (Gupta et al. 2015, "Deep Learning with Limited Numerical Precision"). A
single run has the variance of this rounding: fp32 masters are better if there is memory for them.

An optimizer of the user's own is named by its import path:

    # my_pkg/my_module.py
    def my_optimizer(groups: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.betas[0])

`--optimizer my_pkg.my_module:my_optimizer` steps with it. `groups` are parameter groups with their weight decay; the
trainer sets each group's `lr` before every step, clips gradients and saves the optimizer's `state_dict`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from atropos_api.common.import_path import import_own
from example_trainer.errors import OptimizerUnavailable
from example_trainer.modeling.sharded_optimizers import Adafactor, BlockwiseAdamW
from example_trainer.modeling.shards import first_indices, local_part
from example_trainer.options.training_options import TrainingOptions

CHUNK_ELEMENTS = 1 << 24
"""Number of weights kept in fp32, with their gradients, during a step (128 MiB); a larger tensor is kept whole."""

PIECE_ELEMENTS = 1 << 22
"""Number of weights rounded at one time, which needs about four arrays of that size (64 MiB)."""

GIVEN_SETTINGS = ("weight_decay", "betas", "eps")
"""Entries of a parameter group that options set; torch stores them with the state and would load them with it."""

_LOW_BITS = 16
_SEED_BYTES = 4
"""Size of the seed that torch's CPU generator uses."""


def rounding_noise(shape: Sequence[int], device: torch.device, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 1 << _LOW_BITS, shape, dtype=torch.int32, device=device, generator=generator)


def round_stochastically(values: Tensor, noise: Tensor) -> Tensor:
    """Round fp32 to bf16, up with a probability equal to the fraction that truncation drops; non-finite values stay.

    bf16 is the upper half of fp32; `noise` is added to the lower half and carries over.
    """
    bits = (values.contiguous().view(torch.int32) + noise) & -(1 << _LOW_BITS)
    return torch.where(values.isfinite(), bits.view(torch.float32), values).to(torch.bfloat16)


class StochasticRounding(torch.optim.Optimizer):
    """An optimizer for bf16 parameters: it steps them with another, fp32 optimizer and rounds stochastically.

    The inner optimizer works on fp32 copies that have memory only during a step; its states stay in fp32. The noise is
    a function of `seed`, the step number and the place of a weight, so a resumed run draws the same noise, and so do
    several ranks that each hold a shard of the weights.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        *,
        seed: int,
        chunk_elements: float = CHUNK_ELEMENTS,
    ) -> None:
        self._stand_ins: dict[nn.Parameter, nn.Parameter] = {}
        for parameter in (each for group in groups for each in group["params"]):
            stand_in = nn.Parameter(torch.empty_like(parameter, dtype=torch.float32))
            _set_memory(stand_in, held=False)
            self._stand_ins[parameter] = stand_in
        self._inner = make([group | {"params": [self._stand_ins[p] for p in group["params"]]} for group in groups])
        self._seed = seed
        self._chunk_elements = chunk_elements
        self._steps = 0
        super().__init__(groups, {name: value for name, value in self._inner.defaults.items() if name != "params"})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("a closure cannot be evaluated between rounding and step; compute the gradients before")
        self._steps += 1
        set_lr(self._inner, self.param_groups[0]["lr"])  # an optimizer of the user's own may have other groups
        for chunk in self._chunks():
            self._step_chunk(chunk)

    def _chunks(self) -> Iterator[list[tuple[int, nn.Parameter]]]:
        """Return the parameters that have gradients, with their numbers, some at a time."""
        chunk: list[tuple[int, nn.Parameter]] = []
        for number, parameter in enumerate(self._stand_ins):
            if parameter.grad is None:
                continue
            chunk.append((number, parameter))
            if sum(local_part(each).numel() for _, each in chunk) >= self._chunk_elements:
                yield chunk
                chunk = []
        if chunk:
            yield chunk

    @torch.no_grad()
    def _step_chunk(self, chunk: list[tuple[int, nn.Parameter]]) -> None:
        for _, parameter in chunk:
            stand_in = self._stand_ins[parameter]
            _set_memory(stand_in, held=True)
            stand_in.copy_(parameter)
            stand_in.grad = None if parameter.grad is None else parameter.grad.float()
        self._inner.step()
        for number, parameter in chunk:
            stand_in = self._stand_ins[parameter]
            stand_in.grad = None
            self._round(number, parameter, local_part(stand_in))
            _set_memory(stand_in, held=False)

    def _round(self, number: int, parameter: nn.Parameter, values: Tensor) -> None:
        """Round this rank's shard piece by piece; pieces are rows of the whole parameter, each with its own noise."""
        weights, values = (_with_rows(tensor) for tensor in (local_part(parameter), values))
        shape = _with_rows_shape(parameter.shape)
        starts = first_indices(parameter) or (0,)
        across = tuple(slice(at, at + size) for at, size in zip(starts[1:], weights.shape[1:], strict=True))
        height = max(1, PIECE_ELEMENTS * shape[0] // max(1, math.prod(shape)))
        end = starts[0] + len(weights)
        for piece in range(starts[0] // height, -(-end // height) if len(weights) else 0):
            first, last = piece * height, min((piece + 1) * height, shape[0])
            noise = rounding_noise(
                (last - first, *shape[1:]), weights.device, self._generator(weights.device, number, piece)
            )
            own = slice(max(first, starts[0]), min(last, end))
            drawn = noise[(slice(own.start - first, own.stop - first), *across)]
            rows = slice(own.start - starts[0], own.stop - starts[0])
            weights[rows].copy_(round_stochastically(values[rows], drawn))

    def _generator(self, device: torch.device, number: int, piece: int) -> torch.Generator:
        mixed = hashlib.blake2b(repr((self._seed, self._steps, number, piece)).encode(), digest_size=_SEED_BYTES)
        return torch.Generator(device).manual_seed(int.from_bytes(mixed.digest(), "little"))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer, and the step number."""
        return {"inner": self._inner.state_dict(), "rounding_steps": self._steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "inner" not in state_dict:
            raise ValueError("it belongs to weights in fp32, and bf16 weights are stepped without such masters here")
        load_state(self._inner, state_dict["inner"])
        self._steps = state_dict["rounding_steps"]


def _set_memory(parameter: nn.Parameter, *, held: bool) -> None:
    """Allocate (uninitialised) or free the memory of a parameter's values; its shape and shards stay known."""
    local = local_part(parameter.detach())
    local.untyped_storage().resize_(local.numel() * local.element_size() if held else 0)


def _with_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim else tensor.view(1)


def _with_rows_shape(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(shape) or (1,)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSettings:
    """The settings of an optimizer: `adafactor` uses only `lr` and `weight_decay`.

    It keeps no first moment, and decays the second by its own rule.
    """

    name: str
    """A key of `OPTIMIZERS`, or `package.module:function`."""
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    seed: int = 0
    """Seed of stochastic rounding."""


def optimizer_settings(config: TrainingOptions) -> OptimizerSettings:
    return OptimizerSettings(
        name=config.optimizer,
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        seed=config.seed,
    )


def make_optimizer(parameters: Iterable[torch.nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Return the named optimizer; its states are on the device of the parameters.

    Raises `OptimizerUnavailable` if it cannot be imported or cannot step on that device.
    """
    trained = list(parameters)
    groups = _decay_groups(trained, settings.weight_decay)
    maker = OPTIMIZERS.get(settings.name) or load_own_optimizer(settings, trained[0].device)

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return maker(groups, settings)

    if any(parameter.dtype == torch.bfloat16 for parameter in trained):
        # An optimizer of the user's own may count its steps by group, so it is called once a step, with all parameters.
        chunk_elements = CHUNK_ELEMENTS if settings.name in OPTIMIZERS else math.inf
        return StochasticRounding(groups, make, seed=settings.seed, chunk_elements=chunk_elements)
    return make(groups)


def load_own_optimizer(settings: OptimizerSettings, device: torch.device) -> OptimizerMaker:
    """Import `package.module:function` and step a small matrix and vector with it; raise if either fails.

    The working directory is searched too.
    """
    flag = f"--optimizer {settings.name}"
    module_name, _, function_name = settings.name.partition(":")
    try:
        maker: OptimizerMaker = getattr(import_own(module_name), function_name)
    except Exception as error:  # a user's module may raise anything while it is loaded
        raised = f"{type(error).__name__}: {error}"
        raise OptimizerUnavailable(f"{flag} cannot be imported: {raised}; check the path, and PYTHONPATH") from error
    tried = [nn.Parameter(torch.ones(shape, device=device)) for shape in ((4, 4), (4,))]
    for parameter in tried:
        parameter.grad = torch.ones_like(parameter)
    try:
        optimizer = maker(_decay_groups(tried, settings.weight_decay), replace(settings, lr=1e-3))
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        set_lr(optimizer, 1e-3)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    except Exception as error:
        raise OptimizerUnavailable(
            f"{flag} fails on a small matrix: {error!r}; give it the signature of the example in "
            "docs/reference/library.md"
        ) from error
    if held != {id(parameter) for parameter in tried} or any(bool((each == 1).all()) for each in tried):
        raise OptimizerUnavailable(f"{flag} leaves parameters unchanged; let it step all that it is given")
    return maker


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRate:
    """The learning-rate schedule: the rate rises linearly from 0 over the warmup, then follows `schedule`.

    `linear` and `cosine` would reach 0 one step after the last of `total_steps`, so every step changes the weights.
    Steps that are skipped are not counted, so a run that has some ends at a higher rate.
    """

    peak: float
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    total_steps: int = 0

    def at(self, update: int) -> float:
        """Return the rate of optimizer step `update`; the first is 1."""
        if update < self.warmup_steps:
            return self.peak * update / self.warmup_steps
        return self.peak * self._remaining(update)

    def _remaining(self, update: int) -> float:
        first = max(1, self.warmup_steps)
        progress = min(1.0, (update - first) / max(1, self.total_steps + 1 - first))
        if self.schedule == "linear":
            return 1.0 - progress
        return 0.5 * (1.0 + math.cos(math.pi * progress)) if self.schedule == "cosine" else 1.0


def learning_rate(config: TrainingOptions) -> LearningRate:
    return LearningRate(
        peak=config.lr,
        warmup_steps=config.warmup_steps,
        schedule=config.lr_schedule,
        total_steps=config.training_steps * config.epochs_per_batch * config.mini_batches,
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def load_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a checkpoint's state; decay, betas and epsilon stay those of this run's options, as the rate does."""
    if "inner" in state and not isinstance(optimizer, StochasticRounding):
        raise ValueError("it belongs to bf16 weights without masters, and weights in fp32 are stepped here")
    given = [{name: group[name] for name in GIVEN_SETTINGS if name in group} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, settings in zip(optimizer.param_groups, given, strict=True):
        group.update(settings)


def _decay_groups(parameters: list[torch.nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups in which matrices decay, and norms and biases (of fewer than two dimensions) do not."""
    groups = [
        {"params": [each for each in parameters if each.ndim >= 2], "weight_decay": weight_decay},
        {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adamw(groups: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)


def _adafactor(groups: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    return Adafactor(groups, lr=settings.lr)


def _adamw_8bit(groups: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    try:
        import bitsandbytes
    except (ImportError, RuntimeError, OSError) as error:
        raise OptimizerUnavailable(
            f"--optimizer adamw_8bit needs bitsandbytes, which cannot be imported ({error}); "
            "pip install bitsandbytes, or use --optimizer adamw"
        ) from error
    make = partial(BlockwiseAdamW, lr=settings.lr, betas=settings.betas, eps=settings.eps)
    device = groups[0]["params"][0].device
    try:
        _step_once(make, device)
    except Exception as error:
        raise OptimizerUnavailable(
            f"--optimizer adamw_8bit: bitsandbytes {bitsandbytes.__version__} cannot step on {device} ({error}); "
            "pip install 'bitsandbytes>=0.48', or use --optimizer adamw"
        ) from error
    return make(groups)


def _step_once(make: Any, device: torch.device) -> None:
    """Take a step on a matrix large enough for 8-bit states: a missing kernel fails here, not after a batch."""
    probe = torch.nn.Parameter(torch.zeros(16, 256, device=device))
    probe.grad = torch.ones_like(probe)
    make([probe]).step()


OptimizerMaker: TypeAlias = Callable[[list[dict[str, Any]], OptimizerSettings], torch.optim.Optimizer]
"""A function from parameter groups and settings to an optimizer over them."""

OPTIMIZERS: Mapping[str, OptimizerMaker] = {"adamw": _adamw, "adamw_8bit": _adamw_8bit, "adafactor": _adafactor}
"""The registry of optimizers by the names of `--optimizer`; `options.model` lists them for the flag, and
`memory.budget` the bytes of their states."""
