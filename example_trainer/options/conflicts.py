"""Combinations of settings that cannot work, each with its reason: sync modes against features, objective settings.

`TrainingConfig` checks them, not the weight bridges, so that a bad combination is refused before anything starts.
Importing this module loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from atropos_api.common.identity import is_this_host
from atropos_api.common.option_flags import flag
from example_trainer.options.publish import SERVED_RANKS

if TYPE_CHECKING:
    from example_trainer.options.training_options import TrainingOptions


BOUNDS_OF = {
    "cispo": "--cispo-cap",
    "dppo": "--clip-eps and --cispo-cap",
    "gmpo": "--clip-eps",
    "m2po": "--m2-threshold",
    "sapo": "--sapo-temperature-pos and -neg",
    "vespo": "--vespo-k-pos, -lambda-pos, -k-neg and -lambda-neg",
}
"""Loss types whose weights have a bound of their own, and the options that set it."""


def refuse_objective(config: TrainingOptions) -> str | None:
    """Return the first contradiction among the options of the objective, or None."""
    rules: tuple[Callable[[TrainingOptions], Iterator[str]], ...] = (
        _importance_sampling,
        _importance_bounds,
        _reference,
        _overlong,
        _several_ranks,
    )
    return next((reason for rule in rules for reason in rule(config)), None)


def _importance_sampling(config: TrainingOptions) -> Iterator[str]:
    sampling = f"--importance-sampling {config.importance_sampling}"
    if config.importance_sampling != "clip":
        if config.loss_type in BOUNDS_OF:
            own = f"--loss-type {config.loss_type} bounds its own weights"
            yield f"{sampling}: {own}; set {BOUNDS_OF[config.loss_type]} and leave {sampling} out"
        if config.has_own_loss:
            yield f"{sampling}: {config.loss_type} weighs its own ratios; leave {sampling} out"
        if config.old_logprobs == "recomputed":
            yield (
                f"{sampling} weighs the policy against the sampler already, so --old-logprobs recomputed would count "
                "the gap twice; use --importance-sampling clip with --mismatch-correction"
            )
    if config.loss_type == "vespo" and config.mismatch_correction != "none":
        yield (
            f"--mismatch-correction {config.mismatch_correction}: --loss-type vespo weighs each sequence by its whole "
            "ratio to the sampler; leave it and --old-logprobs out"
        )
    if config.mismatch_correction != "none" and config.old_logprobs == "rollout":
        yield (
            f"--mismatch-correction {config.mismatch_correction} weighs the trainer's old logprobs against the "
            "sampler's; add --old-logprobs recomputed"
        )


def _importance_bounds(config: TrainingOptions) -> Iterator[str]:
    weighs = config.importance_sampling != "clip" or config.mismatch_correction != "none"
    if config.tis_floor and not weighs:
        yield (
            f"--tis-floor {config.tis_floor:g} bounds importance weights, but there are none; add "
            "--importance-sampling truncated, or --mismatch-correction"
        )
    if config.tis_floor >= config.tis_cap:
        yield f"--tis-floor {config.tis_floor:g} must be below --tis-cap {config.tis_cap:g}"


def _reference(config: TrainingOptions) -> Iterator[str]:
    for field in ("target_kl", "ref_model", "ref_update_interval"):
        if getattr(config, field) and not config.kl_coef:
            given = f"{flag(field)} {getattr(config, field)}"
            yield f"{given} needs a divergence to act on; add --kl-coef, 1e-3 for instance"
    if config.ref_model is not None and config.trains_adapter:
        yield (
            f"--ref-model {config.ref_model}: under {config.weight_bridge_mode} the reference is the base with the "
            "adapter off; leave it out"
        )


def _overlong(config: TrainingOptions) -> Iterator[str]:
    limit = config.max_response_tokens
    if limit is None:
        for field in ("overlong_penalty", "mask_overlong", "overlong_buffer"):
            if getattr(config, field):
                yield f"{flag(field)} {getattr(config, field)} needs the length limit; add --max-response-tokens"
    elif config.overlong_buffer > limit:
        yield f"--overlong-buffer {config.overlong_buffer} is longer than --max-response-tokens {limit}; set it lower"
    elif limit > config.seq_len:
        yield f"--max-response-tokens {limit} is longer than --seq-len {config.seq_len}; lower it, or raise --seq-len"


def _several_ranks(config: TrainingOptions) -> Iterator[str]:
    if config.shuffle_advantages and config.world_size > 1:
        yield (
            f"--shuffle-advantages with --world-size {config.world_size} would permute within each rank's share only; "
            "run the control on one process"
        )


_NO_ADAPTERS = "this mode trains full weights, adapters are for --weight-bridge-mode lora_only"
_NO_STEPS_IN_4_BITS = (
    "this mode steps the weights themselves, and a step is lost in 4 bits; "
    "--weight-bridge-mode lora_only (or lora_restart) trains an adapter over them"
)

_ADAPTERS_REFUSED = {
    "lora_r": _NO_ADAPTERS,
    "lora_alpha": _NO_ADAPTERS,
    "lora_dropout": _NO_ADAPTERS,
    "lora_target_modules": _NO_ADAPTERS,
    "lora_layer_indices": _NO_ADAPTERS,
    "load_in_4bit": _NO_STEPS_IN_4_BITS,
}

ADAPTER_SETTINGS = tuple(_ADAPTERS_REFUSED)

SHARED_VLLM_REFUSES = {
    "vllm_tensor_parallel_size": "it splits the tensors that the trainer maps",
    "vllm_quantization": "quantised weights cannot be trained in place",
    "vllm_enable_sleep_mode": "it removes the weights while the trainer uses them",
} | _ADAPTERS_REFUSED

BROADCAST_REFUSES = {
    "vllm_quantization": "a broadcast sends unquantised weights, which fit no quantised tensor",
    "vllm_enable_sleep_mode": "a sleeping server has no weights that a broadcast could replace",
} | _ADAPTERS_REFUSED
"""The settings that `shared_vllm` refuses with `--num-inference-nodes`, where no memory is shared."""


def reason_to_refuse(config: TrainingOptions) -> str | None:
    """Return the first reason why these settings cannot work together, or None."""
    rules: tuple[Callable[[TrainingOptions], str | None], ...] = (
        _refuse_general,
        _refuse_ranks,
        _refuse_shared,
        _refuse_adapter_settings,
        _refuse_lora,
        _refuse_remote_restart,
        _refuse_remote_host,
        _refuse_registered,
        _refuse_broadcast,
        refuse_objective,
    )
    return next((reason for refuse in rules if (reason := refuse(config))), None)


def _refuse_general(config: TrainingOptions) -> str | None:
    if config.dtype == "float16" and config.master_weights == "none":
        return (
            "--dtype float16 with --master-weights none: gradients of float16 are computed from a scaled loss, and "
            "divided by the scale in fp32 masters; in float16 most would become 0. Use --master-weights fp32, or "
            "--dtype bfloat16"
        )
    if config.trainer_rank >= config.world_size:
        return f"--trainer-rank {config.trainer_rank} must be below --world-size {config.world_size}"
    if config.master_weights == "none" and config.optimizer_steps_per_batch > 1:
        return (
            f"--master-weights none with {config.optimizer_steps_per_batch} optimizer steps per "
            "batch would change the served weights between publishes; use --master-weights fp32"
        )
    return _refuse_forward_weights(config)


_SHARES_WITH_ONE = (
    "one process maps the server's tensors, and each rank holds only a part of every weight; add "
    "--num-inference-nodes 1, which sends gathered weights to the server, or use --world-size 1"
)


def _refuse_ranks(config: TrainingOptions) -> str | None:
    """Return the first setting that several trainer processes do not support, with its reason, or None."""
    if reason := _refuse_tensor_parallel(config):
        return f"--trainer-tensor-parallel-size {config.trainer_tensor_parallel_size} {reason}"
    if config.world_size == 1:
        return None
    causes = (
        (config.shares_memory, _SHARES_WITH_ONE),
        (
            ":" in config.optimizer and not config.trains_adapter,
            f"--optimizer {config.optimizer} would step a rank's rows as if whole; use adamw, adamw_8bit or adafactor",
        ),
        (config.overlap_publish, "--overlap-publish would gather weights during a forward that also gathers them"),
        (config.keep_versions > 0, f"--keep-versions {config.keep_versions} keeps older weights in one process only"),
    )
    cause = next((text for holds, text in causes if holds), None)
    return None if cause is None else f"--world-size {config.world_size}: {cause}"


def _refuse_tensor_parallel(config: TrainingOptions) -> str | None:
    size, processes = config.trainer_tensor_parallel_size, config.world_size
    if size == 1:
        return None
    if processes % size:
        return f"does not divide --world-size {processes}; start a multiple of {size} processes"
    if config.trains_adapter:
        return (
            f"would divide the layers that adapters are put on, and {config.weight_bridge_mode} trains adapters of "
            "whole layers; use --weight-bridge-mode none, or several processes without it"
        )
    return None


def _refuse_forward_weights(config: TrainingOptions) -> str | None:
    needs_masters = config.overlap_publish or config.optimizer_steps_per_batch > 1
    if needs_masters and config.forward_weights == "views":
        cause = "--overlap-publish" if config.overlap_publish else "several steps per batch"
        return f"{cause} needs the forward to run from the masters; use --forward-weights masters or auto"
    if config.master_weights == "none" and (config.overlap_publish or config.forward_weights == "masters"):
        cause = "--overlap-publish" if config.overlap_publish else "--forward-weights masters"
        return f"{cause} needs master weights; use --master-weights fp32"
    if config.shares_memory and config.master_weights == "host" and config.forwards_from_masters:
        return (
            "--master-weights host keeps the masters in host memory, where no forward runs; use --forward-weights "
            "views without --overlap-publish and with one optimizer step a batch, or --master-weights fp32"
        )
    return None


def _refuse_shared(config: TrainingOptions) -> str | None:
    if not config.mode.shares_memory:
        return None
    for field, reason in (BROADCAST_REFUSES if config.broadcasts else SHARED_VLLM_REFUSES).items():
        value, works = getattr(config, field), type(config).model_fields[field].default
        if value != works:
            return f"shared_vllm refuses {flag(field)} {value}: {reason}; leave it at {works}"
    return None


def _refuse_adapter_settings(config: TrainingOptions) -> str | None:
    if not config.mode.refuses_adapter_settings:
        return None
    changed = [
        field for field in ADAPTER_SETTINGS if getattr(config, field) != type(config).model_fields[field].default
    ]
    if changed:
        reason = SHARED_VLLM_REFUSES[changed[0]]
        return f"mode none refuses {flag(changed[0])} {getattr(config, changed[0])}: {reason}"
    return None


def _refuse_remote_restart(config: TrainingOptions) -> str | None:
    if config.num_inference_nodes and not config.servers_outlive_publish:
        return (
            f"--num-inference-nodes {config.num_inference_nodes}: mode {config.weight_bridge_mode} restarts its "
            "servers, which is possible on this host only; use --weight-bridge-mode lora_only with --vllm-host, or "
            "--registered-servers, which reload checkpoints"
        )
    return None


def _refuse_remote_host(config: TrainingOptions) -> str | None:
    if config.registered_servers or config.num_inference_nodes or config.mode.starts_missing_server:
        return None
    if is_this_host(config.vllm_host):
        return None
    mode, over_network = config.weight_bridge_mode, "--num-inference-nodes 1, which sends the weights to that server"
    if config.mode.shares_memory:
        return (
            f"--vllm-host {config.vllm_host}: {mode} shares memory with a server on this host, and that is another "
            f"one; add {over_network}, or use --weight-bridge-mode lora_only"
        )
    return (
        f"--vllm-host {config.vllm_host}: mode {mode} starts its server on this host, and that is another one; use "
        f"--weight-bridge-mode lora_only with a server that runs there, or shared_vllm with {over_network}"
    )


def _refuse_registered(config: TrainingOptions) -> str | None:
    if not config.registered_servers:
        return None
    mode = config.mode
    if not (mode.server_outlives_publish or (mode.reloads_checkpoints and config.restart_method == "reload")):
        instead = "add --restart-method reload, which makes them read each checkpoint"
        return (
            f"--registered-servers: mode {mode.name} restarts its server, and the trainer cannot restart registered "
            f"ones; {instead if mode.reloads_checkpoints else 'use --weight-bridge-mode lora_only'}"
        )
    if config.inference_urls is not None:
        return "--registered-servers takes the servers' addresses from the broker; leave --inference-urls out"
    return None


def _refuse_broadcast(config: TrainingOptions) -> str | None:
    nodes, urls = config.num_inference_nodes, config.inference_urls
    if urls is not None and len(urls) != nodes:
        return f"--inference-urls names {len(urls)} servers, --num-inference-nodes says {nodes}; make them agree"
    if config.broadcasts and config.broadcast_backend == "nccl" and config.device == "cpu":
        return "--broadcast-backend nccl sends from GPU to GPU, and --device cpu has none; use --broadcast-backend gloo"
    if config.broadcasts and config.forward_weights == "views":
        return f"--num-inference-nodes {nodes} shares no memory, so there are no views; leave --forward-weights at auto"
    return None


def _refuse_lora(config: TrainingOptions) -> str | None:
    if config.trains_adapter and config.train_layer_indices is not None:
        return (
            f"{config.weight_bridge_mode} refuses --train-layer-indices {config.train_layer_indices}: "
            "the base is frozen; use --lora-layer-indices"
        )
    if config.trains_adapter and config.lora_r > SERVED_RANKS[-1]:
        return f"--lora-r {config.lora_r}: vLLM serves adapters up to rank {SERVED_RANKS[-1]}; use less"
    replaces_server = not (config.mode.server_outlives_publish or config.mode.reloads_checkpoints)
    if replaces_server and config.restart_method == "reload":
        return "--restart-method reload is for whole checkpoints; use --weight-bridge-mode lora_only for adapters"
    if config.load_in_4bit and config.vllm_quantization is not None:
        return (
            f"--vllm-quantization {config.vllm_quantization} would quantise the values of the 4-bit base again, so "
            "that server and trainer compute with different values; leave it out, or leave out --load-in-4bit"
        )
    return None
