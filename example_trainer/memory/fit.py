"""The nearest configuration that fits a GPU, and the one line that says why another does not.

Changes are tried from the most to the least exact. The outer order is that of the weights: as given, 8-bit states,
weights in bf16 without masters, masters in host memory, and Adafactor. For each of them those changes are tried that
alter no result: nothing, activation checkpointing, smaller micro-batches, and after these the same with a smaller share
for vLLM, which then runs fewer requests at a time. `--fit auto` makes these changes. What changes the training itself
(fewer layers, an adapter, a base in 4 bits) is only named.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import util
from typing import Any, TypeVar

from atropos_api.common.option_flags import flag
from example_trainer.errors import BadLayerFilter
from example_trainer.memory.budget import Budget, budget, server_needs
from example_trainer.memory.shapes import ModelShape
from example_trainer.options.conflicts import reason_to_refuse
from example_trainer.options.layer_indices import parse_layer_indices
from example_trainer.options.training_options import TrainingOptions

OptionsT = TypeVar("OptionsT", bound=TrainingOptions)
Changes = Mapping[str, Any]

GB = 1e9

USABLE_FRACTION = 0.97
"""Share of the GPU's memory that can be used: the driver keeps a little, and allocators do not fill it to the byte."""

CACHED_SEQUENCES = 8
"""Sequences of `--max-model-len` tokens that vLLM's cache can hold at least under a share that is chosen here."""

OF_FULL_WEIGHTS: Sequence[Changes] = (
    {},
    {"optimizer": "adamw_8bit"},
    {"master_weights": "none"},
    {"master_weights": "none", "optimizer": "adamw_8bit"},
    {"master_weights": "host"},
    {"master_weights": "none", "optimizer": "adafactor"},
)
OTHER_TRAININGS: Sequence[Changes] = (
    {"train_layer_indices": "last-12"},
    {"weight_bridge_mode": "lora_restart"},
    {"weight_bridge_mode": "lora_restart", "load_in_4bit": True},
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerShares:
    """The division of a GPU's memory among the servers on it: those of the policy, and a teacher's."""

    policy_part: float = 1.0
    """Part of `--gpu-memory-utilization` that all servers of the policy take together; 2 if each of two takes it."""
    teacher_part: float = 0.0
    """Part of `--gpu-memory-utilization` that the teacher's server takes."""
    teacher_share: float = 0.0
    """Share of the memory that the teacher's server takes if it does not depend on that option."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """The GPU of a trainer process, with vLLM's share of it."""

    total_bytes: float
    share: float
    """vLLM's share of the memory, which `servers` divides; 0 if it serves from another GPU."""
    servers: ServerShares = ServerShares()
    share_can_change: bool = True
    """False if the server is started elsewhere, so that `--gpu-memory-utilization` does not set its share."""
    host_bytes: float | None = None
    """Memory of the host; None if it is not known."""
    program: str = "atropos-grpo"
    """The program that trains: under `atropos-sft` no server follows it, and its adapters have a flag of their own."""

    @property
    def usable_bytes(self) -> float:
        return self.total_bytes * USABLE_FRACTION

    @property
    def policy_share(self) -> float:
        return self.share * self.servers.policy_part

    @property
    def teacher_share(self) -> float:
        return self.share * self.servers.teacher_part + self.servers.teacher_share


def explain(shape: ModelShape, config: TrainingOptions, gpu: Gpu) -> str | None:
    """Return the reason why a configuration does not fit, with the nearest one that does; None if it fits."""
    if fits(shape, config, gpu):
        return None
    problem = _problem(shape, config, gpu)
    if found := nearest(shape, config, gpu):
        return f"{problem}; {_fitting(shape, config, gpu, found)}, or let --fit auto choose; --fit off skips this check"
    if found := nearest(shape, config, gpu, trainings=OTHER_TRAININGS):
        return (
            f"{problem}; no flag makes this training fit, but {_fitting(shape, config, gpu, found)}; "
            "--fit off skips this check"
        )
    teacher = "another one for the teacher (--teacher.gpu), " if gpu.teacher_share else ""
    server = "another one for vLLM (--vllm-gpu), " if gpu.share else ""
    return (
        f"{problem}; nothing that this trainer can change fits: take a larger GPU, {server}{teacher}several ranks "
        "(torchrun), shorter sequences or a smaller model; --fit off skips this check"
    )


def nearest(
    shape: ModelShape, config: TrainingOptions, gpu: Gpu, *, trainings: Sequence[Changes] | None = None
) -> dict[str, Any] | None:
    """Return the smallest changes with which a configuration fits, {} if it does as it is; None if none is enough.

    `trainings` are the changes of the weights to try; unset: those that train the same weights.
    """
    if trainings is None:
        trainings = ({},) if config.trains_adapter else _trainings_with_the_users_optimizer(config)
    for training in trainings:
        weights = {name: value for name, value in training.items() if getattr(config, name) != value}
        if (training and not weights) or not _can_be_made(weights, shape):
            continue
        for lowers_share in (False, True):
            for memory in _without_effect_on_results(config):
                changes = {**weights, **memory}
                changed = with_changes(config, changes)
                if changes and _is_refused(shape, changed):
                    continue
                if lowers_share:
                    share = _other_share(shape, changed, gpu)
                    if share is None:
                        continue
                    changes |= {"gpu_memory_utilization": share}
                if fits(shape, with_changes(config, changes), gpu_after(changes, gpu)):
                    return changes
    return None


def fits(shape: ModelShape, config: TrainingOptions, gpu: Gpu) -> bool:
    """Return True if trainer and server fit together, and the server's weights and one sequence fit its share."""
    needed = budget_on(shape, config, gpu)
    if gpu.host_bytes is not None and needed.host > gpu.host_bytes * USABLE_FRACTION:
        return False
    return needed.total <= gpu.usable_bytes and _lacks_in_share(shape, config, gpu) <= 0


def budget_on(shape: ModelShape, config: TrainingOptions, gpu: Gpu) -> Budget:
    policy, teacher = gpu.policy_share * gpu.total_bytes, gpu.teacher_share * gpu.total_bytes
    return budget(shape, config, server_bytes=policy, teacher_bytes=teacher)


def least_share(shape: ModelShape, config: TrainingOptions, gpu_bytes: float) -> float:
    """Return the share below which vLLM surely cannot start: the weights, and a cache of one sequence."""
    return server_needs(shape, config, cached_tokens=config.max_model_len, workspace_bytes=0.0) / gpu_bytes


def with_changes(config: OptionsT, changes: Changes) -> OptionsT:
    """Return the configuration with other values, unchecked."""
    return config.model_copy(update=dict(changes))


def gpu_after(changes: Changes, gpu: Gpu) -> Gpu:
    """Return the GPU with the share that the changes give vLLM."""
    return replace(gpu, share=changes.get("gpu_memory_utilization", gpu.share))


def as_flags(changes: Changes, program: str = "atropos-grpo") -> str:
    """Return changes as flags of the trainer, or of `atropos-sft`."""
    if program == "atropos-sft" and "weight_bridge_mode" in changes:
        changes = {"use_lora": True, **{name: value for name, value in changes.items() if name != "weight_bridge_mode"}}
    return " ".join(flag(name) if value is True else f"{flag(name)} {value}" for name, value in changes.items())


def parts(needed: Budget) -> str:
    """Return the parts of a budget in GB, those under a tenth left out."""
    named = {
        "vLLM's share": needed.server,
        "the teacher's share": needed.teacher,
        "weights": needed.weights,
        "masters": needed.masters,
        "gradients": needed.gradients,
        "optimizer states": needed.states,
        "copies": needed.copies,
        "activations": needed.working,
        "runtime": needed.runtime,
    }
    return ", ".join(f"{name} {part / GB:.1f}" for name, part in named.items() if part >= GB / 10)


def _problem(shape: ModelShape, config: TrainingOptions, gpu: Gpu) -> str:
    on = f"on a GPU of {gpu.total_bytes / GB:.1f} GB"
    needed = budget_on(shape, config, gpu)
    if needed.total > gpu.usable_bytes:
        return f"{config.model_name} needs {needed.total / GB:.1f} GB {on} ({parts(needed)})"
    if (lacking := _lacks_in_share(shape, config, gpu)) > 0:
        divided = f", of which the policy's part is {gpu.policy_share:g}," if gpu.servers.policy_part < 1 else ""
        return (
            f"--gpu-memory-utilization {gpu.share:g}{divided} {on} lacks {lacking / GB:.1f} GB for the served weights "
            f"and one sequence of {config.max_model_len} tokens"
        )
    host = gpu.host_bytes or 0.0
    return f"--master-weights host needs {needed.host / GB:.1f} GB of host memory, and there are {host / GB:.1f}"


def _fitting(shape: ModelShape, config: TrainingOptions, gpu: Gpu, changes: Changes) -> str:
    needed = budget_on(shape, with_changes(config, changes), gpu_after(changes, gpu))
    host = f" and {needed.host / GB:.1f} GB of host memory" if needed.host else ""
    return f"{as_flags(changes, gpu.program)} fits ({needed.total / GB:.1f} GB{host})"


def _lacks_in_share(shape: ModelShape, config: TrainingOptions, gpu: Gpu) -> float:
    if not gpu.share or not gpu.share_can_change:
        return 0.0
    return (least_share(shape, config, gpu.total_bytes) - gpu.policy_share) * gpu.total_bytes


def _can_be_made(weights: Changes, shape: ModelShape) -> bool:
    """Return True if the packages that these changes of the weights need are installed, and the layers exist."""
    try:
        parse_layer_indices(weights.get("train_layer_indices", "0"), shape.layers)
    except BadLayerFilter:
        return False
    needs = weights.get("optimizer") == "adamw_8bit" or weights.get("load_in_4bit")
    return not needs or util.find_spec("bitsandbytes") is not None


def _is_refused(shape: ModelShape, config: TrainingOptions) -> bool:
    """Return True if settings cannot work together when `--dtype auto` is the dtype in which the model is stored."""
    served = {"dtype": shape.stored_dtype} if config.dtype == "auto" else {}
    return reason_to_refuse(with_changes(config, served)) is not None


def _trainings_with_the_users_optimizer(config: TrainingOptions) -> Sequence[Changes]:
    """Return the changes of full weights; an optimizer of the user's own is not replaced."""
    replaceable = {"adamw", *(each["optimizer"] for each in OF_FULL_WEIGHTS if "optimizer" in each)}
    return [each for each in OF_FULL_WEIGHTS if "optimizer" not in each or config.optimizer in replaceable]


def _without_effect_on_results(config: TrainingOptions) -> Iterator[Changes]:
    """Yield changes that alter memory and time alone.

    They are: none, checkpointing, with it smaller micro-batches, and with the smallest ones inputs in host memory.
    """
    yield {}
    checkpointing = {} if config.gradient_checkpointing else {"gradient_checkpointing": True}
    if checkpointing:
        yield checkpointing
    tokens = config.micro_batch_tokens
    while tokens > config.seq_len:
        tokens = max(config.seq_len, tokens // 2 // config.seq_len * config.seq_len)
        yield {**checkpointing, "token_budget": tokens}
    if not config.activation_offloading:
        smaller = {"token_budget": tokens} if tokens < config.micro_batch_tokens else {}
        yield {**checkpointing, **smaller, "activation_offloading": True}


def _other_share(shape: ModelShape, config: TrainingOptions, gpu: Gpu) -> float | None:
    """Return the share nearest to vLLM's that is enough for trainer and server; None if there is none."""
    if not gpu.share or not gpu.share_can_change:
        return None
    servers, total = gpu.servers, gpu.total_bytes
    left = gpu.usable_bytes - budget_on(shape, config, gpu).trainer - servers.teacher_share * total
    room = math.floor(100 * left / (total * (servers.policy_part + servers.teacher_part))) / 100
    needed = server_needs(shape, config, cached_tokens=CACHED_SEQUENCES * config.max_model_len)
    comfortable = math.ceil(100 * needed / (total * servers.policy_part)) / 100
    share = min(room, max(comfortable, gpu.share))
    return share if comfortable <= share != gpu.share else None
