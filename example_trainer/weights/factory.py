"""Construction of the weight bridge for each mode from the trainer's configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from example_trainer.options.modes import BridgeMode
from example_trainer.options.publish import served_rank, versions_kept
from example_trainer.weight_protocol.base_record import BASE_DIRECTORY
from example_trainer.weights.base import WeightBridge

if TYPE_CHECKING:
    from example_trainer.config import TrainingConfig
    from example_trainer.modeling.loading import PolicyOptions
    from example_trainer.vllm_manager import VllmOptions


def policy_options(config: TrainingConfig) -> PolicyOptions:
    """Return the part of the trainer's configuration that concerns loading the model."""
    from example_trainer.modeling.loading import PolicyOptions, Sharding
    from example_trainer.modeling.lora import adapter_options

    # An adapter is small and its base is frozen, so every rank holds both unsharded; only gradients are summed.
    sharding = None
    if config.world_size > 1 and not config.trains_adapter:
        sharding = Sharding(
            reshard_after_forward=config.reshard_after_forward,
            tensor_parallel_size=config.trainer_tensor_parallel_size,
        )
    return PolicyOptions(
        model_name=config.model_name,
        dtype=config.dtype,
        device=config.device,
        master_weights=config.master_weights,
        train_layer_indices=config.train_layer_indices,
        adapter=adapter_options(config),
        gradient_checkpointing=config.gradient_checkpointing,
        sharding=sharding,
        debug_loading=config.debug_loading,
    )


def make_bridge(config: TrainingConfig) -> WeightBridge:
    """Return the bridge for the configured mode."""
    if config.broadcasts:
        return _broadcast(config)
    bridges: dict[BridgeMode, Callable[[TrainingConfig], WeightBridge]] = {
        "shared_vllm": _shared,
        "lora_only": _lora_only,
        "lora_restart": _restart,
        "none": _restart,
    }
    return bridges[config.weight_bridge_mode](config)


def _shared(config: TrainingConfig) -> WeightBridge:
    from example_trainer.weights.shared_vllm import SharedOptions, SharedVllmBridge

    return SharedVllmBridge(
        SharedOptions(
            policy=policy_options(config),
            server_url=f"http://{config.vllm_host}:{config.vllm_port}",
            manifest_path=config.vllm_config_path,
            bridge_token=config.bridge_token,
            wait_timeout_seconds=config.wait_timeout,
            forwards_from_masters=config.forwards_from_masters,
            drain_seconds=config.drain_seconds,
            in_flight=config.in_flight,
            sync_budget=config.sync_budget,
            max_staleness=config.max_staleness,
            sync_check_every=config.sync_check_every,
        )
    )


def _broadcast(config: TrainingConfig) -> WeightBridge:
    from example_trainer.weights.broadcast import BroadcastBridge, BroadcastOptions

    return BroadcastBridge(
        BroadcastOptions(
            policy=policy_options(config),
            server_urls=config.server_urls,
            bridge_token=config.bridge_token,
            wait_timeout_seconds=config.wait_timeout,
            drain_seconds=config.drain_seconds,
            in_flight=config.in_flight,
            sync_budget=config.sync_budget,
            max_staleness=config.max_staleness,
            backend=config.broadcast_backend,
            sync_check_every=config.sync_check_every,
        )
    )


def _lora_only(config: TrainingConfig) -> WeightBridge:
    from example_trainer.weights.lora_only import HotswapOptions, LoraHotswapBridge, ServersHotswapBridge
    from example_trainer.weights.publish_loop import CHECKED_SHARE

    kept, served = versions_kept(config.max_staleness), config.required_run_dir / "served"
    starts = config.start_vllm == "auto" and config.num_inference_nodes == 0
    bridges = [
        LoraHotswapBridge(
            HotswapOptions(
                policy=policy_options(config),
                server_url=url,
                adapters_dir=served / str(index) if config.num_inference_nodes > 1 else served,
                base_dir=config.required_run_dir / BASE_DIRECTORY,
                bridge_token=config.bridge_token,
                vllm=_vllm(config, _adapter_arguments(config, kept)) if starts else None,
                wait_timeout_seconds=config.wait_timeout,
                versions_kept=kept,
                sync_check_every=config.sync_check_every,
                sync_check_share=CHECKED_SHARE / len(config.server_urls),
            )
        )
        for index, url in enumerate(config.server_urls)
    ]
    return bridges[0] if len(bridges) == 1 else ServersHotswapBridge(bridges)


def _restart(config: TrainingConfig) -> WeightBridge:
    from example_trainer.weights.restart import RestartBridge, RestartOptions

    return RestartBridge(
        RestartOptions(
            policy=policy_options(config),
            vllm=_vllm(config),
            weights_dir=config.required_run_dir / "served",
            base_dir=config.required_run_dir / BASE_DIRECTORY,
            restart_interval=config.vllm_restart_interval,
            method=config.restart_method,
            adapter_arguments=_adapter_arguments(config, 1),
            sync_check_every=config.sync_check_every,
        )
    )


def _vllm(config: TrainingConfig, arguments: Sequence[str] = ()) -> VllmOptions:
    """Return the options with which the trainer starts a server of its own."""
    from example_trainer.vllm_manager import VllmOptions

    return VllmOptions(
        host=config.vllm_host,
        port=config.vllm_port,
        log_path=(config.log_dir or config.required_run_dir / "logs") / "vllm.log",
        served_model_name=config.model_name,
        tokenizer=config.model_name,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        gpu_memory_utilization=config.gpu_memory_utilization,
        gpu=config.vllm_gpu,
        seed=config.seed,
        ready_timeout_seconds=config.wait_timeout,
        drain_seconds=config.drain_seconds,
        extra_arguments=[*_vllm_arguments(config), *arguments],
    )


def _adapter_arguments(config: TrainingConfig, kept: int) -> list[str]:
    """Return the arguments for starting a server of adapters."""
    return ["--enable-lora", "--max-lora-rank", str(served_rank(config.lora_r)), "--max-loras", str(kept)]


def _vllm_arguments(config: TrainingConfig) -> list[str]:
    """Return vLLM's own flags for which the trainer's configuration has settings."""
    arguments = ["--tensor-parallel-size", str(config.vllm_tensor_parallel_size)]
    if config.vllm_quantization is not None:
        arguments += ["--quantization", config.vllm_quantization]
    if config.vllm_enable_sleep_mode:
        arguments.append("--enable-sleep-mode")
    return arguments
