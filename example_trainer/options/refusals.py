"""Combinations of settings that cannot work, each with its reason: modes against features first of all.

The configuration model asks here, no bridge does; so what is refused is refused before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from example_trainer.options.naming import flag
from example_trainer.options.objective_rules import refuse_objective
from example_trainer.options.publish import LORA_MODES, SERVED_RANKS

if TYPE_CHECKING:
    from example_trainer.config import TrainingConfig

_NO_ADAPTERS = "this mode trains full weights, adapters are for --weight-bridge-mode lora_only"
SHARED_VLLM_REFUSES = {
    "vllm_tensor_parallel_size": "it splits the tensors that the trainer maps",
    "vllm_quantization": "quantised weights cannot be trained in place",
    "vllm_enable_sleep_mode": "it moves the weights away under the trainer",
    "lora_r": _NO_ADAPTERS,
    "lora_alpha": _NO_ADAPTERS,
    "lora_dropout": _NO_ADAPTERS,
    "lora_target_modules": _NO_ADAPTERS,
    "lora_layer_indices": _NO_ADAPTERS,
    "load_in_4bit": _NO_ADAPTERS,
}
ADAPTER_SETTINGS = tuple(field for field, reason in SHARED_VLLM_REFUSES.items() if reason == _NO_ADAPTERS)


def reason_to_refuse(config: TrainingConfig) -> str | None:
    """The first reason why these settings cannot work together, or None."""
    rules: tuple[Callable[[TrainingConfig], str | None], ...] = (
        _refuse_general,
        _refuse_ranks,
        _refuse_shared,
        _refuse_adapter_settings,
        _refuse_lora,
        _refuse_remote_restart,
        _refuse_broadcast,
        refuse_objective,
    )
    return next((reason for refuse in rules if (reason := refuse(config))), None)


def _refuse_general(config: TrainingConfig) -> str | None:
    if config.dtype == "float16":
        return (
            "--dtype float16 cannot be trained: its gradients underflow without loss scaling; "
            "use --dtype bfloat16, or float32 on a CPU"
        )
    if config.trainer_rank >= config.world_size:
        return f"--trainer-rank {config.trainer_rank} must be below --world-size {config.world_size}"
    if config.master_weights == "none" and config.optimizer_steps_per_batch > 1:
        return (
            f"--master-weights none with {config.optimizer_steps_per_batch} optimizer steps per "
            "batch would change the served weights between publishes; use --master-weights fp32"
        )
    return _refuse_forward_weights(config)


def _refuse_ranks(config: TrainingConfig) -> str | None:
    """What several trainer processes cannot do together."""
    if config.world_size == 1:
        return None
    sharded = config.weight_bridge_mode not in LORA_MODES
    causes = (
        (config.weight_bridge_mode == "shared_vllm", "the served weights are one unsharded copy; use --world-size 1"),
        (
            sharded and config.optimizer != "adamw",
            f"--optimizer {config.optimizer} cannot step weights that are spread over ranks; use --optimizer adamw",
        ),
        (
            sharded and config.master_weights != "fp32",
            f"--master-weights {config.master_weights} is for one process; use fp32, of which each rank holds a part",
        ),
        (config.overlap_publish, "--overlap-publish would gather weights beside a forward that gathers them as well"),
        (config.keep_versions > 0, f"--keep-versions {config.keep_versions} keeps older weights in one process only"),
    )
    cause = next((text for holds, text in causes if holds), None)
    return None if cause is None else f"--world-size {config.world_size}: {cause}"


def _refuse_forward_weights(config: TrainingConfig) -> str | None:
    needs_masters = config.overlap_publish or config.optimizer_steps_per_batch > 1
    if needs_masters and config.forward_weights == "views":
        cause = "--overlap-publish" if config.overlap_publish else "several steps per batch"
        return f"{cause} needs the forward to run from the masters; use --forward-weights masters or auto"
    if config.master_weights == "none" and (config.overlap_publish or config.forward_weights == "masters"):
        cause = "--overlap-publish" if config.overlap_publish else "--forward-weights masters"
        return f"{cause} needs master weights; use --master-weights fp32"
    shares = config.weight_bridge_mode == "shared_vllm" and config.num_inference_nodes == 0
    if shares and config.master_weights == "host" and config.forwards_from_masters:
        return (
            "--master-weights host keeps the masters in host memory, where no forward runs; use --forward-weights "
            "views without --overlap-publish and with one optimizer step a batch, or --master-weights fp32"
        )
    return None


def _refuse_shared(config: TrainingConfig) -> str | None:
    if config.weight_bridge_mode != "shared_vllm":
        return None
    for field, reason in SHARED_VLLM_REFUSES.items():
        value, works = getattr(config, field), type(config).model_fields[field].default
        if value != works:
            return f"shared_vllm refuses {flag(field)} {value}: {reason}; leave it at {works}"
    return None


def _refuse_adapter_settings(config: TrainingConfig) -> str | None:
    if config.weight_bridge_mode != "none":
        return None
    changed = [
        field for field in ADAPTER_SETTINGS if getattr(config, field) != type(config).model_fields[field].default
    ]
    if changed:
        return f"mode none refuses {flag(changed[0])} {getattr(config, changed[0])}: {_NO_ADAPTERS}"
    return None


def _refuse_remote_restart(config: TrainingConfig) -> str | None:
    if config.num_inference_nodes and config.weight_bridge_mode in {"none", "lora_restart"}:
        return (
            f"--num-inference-nodes {config.num_inference_nodes}: mode {config.weight_bridge_mode} starts its servers "
            "anew, which it can on this host only; use --weight-bridge-mode lora_only with --vllm-host"
        )
    return None


def _refuse_broadcast(config: TrainingConfig) -> str | None:
    nodes, urls = config.num_inference_nodes, config.inference_urls
    if urls is not None and len(urls) != nodes:
        return f"--inference-urls names {len(urls)} servers, --num-inference-nodes says {nodes}; make them agree"
    if nodes and config.weight_bridge_mode == "shared_vllm" and config.forward_weights == "views":
        return f"--num-inference-nodes {nodes} shares no memory, so there are no views; leave --forward-weights at auto"
    return None


def _refuse_lora(config: TrainingConfig) -> str | None:
    if config.weight_bridge_mode in LORA_MODES and config.train_layer_indices is not None:
        return (
            f"{config.weight_bridge_mode} refuses --train-layer-indices {config.train_layer_indices}: "
            "the base is frozen; use --lora-layer-indices"
        )
    if config.weight_bridge_mode in LORA_MODES and config.lora_r > SERVED_RANKS[-1]:
        return f"--lora-r {config.lora_r}: vLLM serves adapters up to rank {SERVED_RANKS[-1]}; use less"
    if config.weight_bridge_mode == "lora_restart" and config.restart_method == "reload":
        return "--restart-method reload is for whole checkpoints; use --weight-bridge-mode lora_only for adapters"
    if config.weight_bridge_mode == "lora_only" and config.load_in_4bit:
        return (
            "lora_only refuses --load-in-4bit: the running server computes with the base as it was before it was cut "
            "to 4 bits; use --weight-bridge-mode lora_restart, which serves what the trainer computes with"
        )
    return None
