"""The trainer's settings: documented defaults, combinations that are refused, aliases."""

from __future__ import annotations

import logging

import pytest
from pydantic import ValidationError

from atropos_api.common.cliconfig import ConfigError, load_config
from example_trainer.cli import silence_unused_kernels
from example_trainer.config import TrainingConfig

DOCUMENTED_DEFAULTS = {
    "weight_bridge_mode": "none",
    "training_steps": 10,
    "checkpoint_interval": 3,
    "batch_size": 2,
    "gradient_accumulation_steps": 32,
    "warmup_steps": 0,
    "seq_len": 2048,
    "train_layer_indices": None,
    "clip_eps": 0.2,
    "lr": 1e-5,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "lora_target_modules": None,
    "lora_layer_indices": None,
    "vllm_port": 9001,
    "vllm_config_path": "auto",
    "gpu_memory_utilization": 0.45,
    "vllm_gpu": None,
    "max_model_len": 4096,
    "dtype": "bfloat16",
    "vllm_restart_interval": 3,
    "atropos_url": "http://localhost:8000",
    "use_wandb": False,
    "wandb_project": None,
    "wandb_group": None,
    "trainer_rank": 0,
    "world_size": 1,
    "init_method": "env://",
    "num_inference_nodes": 0,
    "debug_loading": False,
    "benchmark": False,
    "optimizer": "adamw_8bit",
    "max_grad_norm": 1.0,
}

REFUSED = [
    ({"dtype": "float16", "master_weights": "none"}, "divided by the scale in fp32 masters"),
    (
        {"dtype": "float16", "master_weights": "none", "weight_bridge_mode": "lora_only"},
        "Use --master-weights fp32, or --dtype bfloat16",
    ),
    ({"world_size": 2, "overlap_publish": True}, "--overlap-publish would gather weights"),
    ({"world_size": 2, "keep_versions": 2}, "--keep-versions 2 keeps older weights"),
    ({"trainer_rank": 1}, "--trainer-rank 1"),
    ({"trainer_tensor_parallel_size": 2}, "does not divide --world-size 1; start a multiple of 2 processes"),
    (
        {"trainer_tensor_parallel_size": 2, "world_size": 2, "weight_bridge_mode": "lora_only"},
        "lora_only trains adapters of whole layers",
    ),
    (
        {"trainer_tensor_parallel_size": 2, "world_size": 2, "weight_bridge_mode": "shared_vllm"},
        "add --num-inference-nodes 1, which sends gathered weights",
    ),
    ({"weight_bridge_mode": "shared_vllm", "world_size": 2}, "add --num-inference-nodes 1"),
    (
        {"weight_bridge_mode": "shared_vllm", "num_inference_nodes": 2, "broadcast_backend": "nccl", "device": "cpu"},
        "--device cpu has none; use --broadcast-backend gloo",
    ),
    ({"weight_bridge_mode": "shared_vllm", "vllm_tensor_parallel_size": 2}, "--vllm-tensor-parallel-size 2"),
    ({"weight_bridge_mode": "shared_vllm", "vllm_quantization": "fp8"}, "quantised"),
    ({"weight_bridge_mode": "shared_vllm", "vllm_enable_sleep_mode": True}, "--vllm-enable-sleep-mode"),
    ({"weight_bridge_mode": "shared_vllm", "num_inference_nodes": 2, "forward_weights": "views"}, "shares no memory"),
    (
        {"num_inference_nodes": 2, "inference_urls": ["http://a:1"], "weight_bridge_mode": "shared_vllm"},
        "names 1 servers",
    ),
    ({"weight_bridge_mode": "shared_vllm", "lora_r": 8}, "--lora-r 8"),
    ({"weight_bridge_mode": "shared_vllm", "lora_layer_indices": "0-1"}, "--lora-layer-indices"),
    (
        {"weight_bridge_mode": "shared_vllm", "load_in_4bit": True},
        "a step is lost in 4 bits; --weight-bridge-mode lora_only",
    ),
    ({"weight_bridge_mode": "lora_only", "load_in_4bit": True, "vllm_quantization": "fp8"}, "of the 4-bit base again"),
    ({"weight_bridge_mode": "none", "lora_r": 8}, "none refuses --lora-r 8"),
    ({"weight_bridge_mode": "lora_only", "lora_r": 600}, "vLLM serves adapters up to rank 512"),
    ({"weight_bridge_mode": "lora_restart", "restart_method": "reload"}, "reload is for whole checkpoints"),
    (
        {"weight_bridge_mode": "none", "load_in_4bit": True},
        "a step is lost in 4 bits; --weight-bridge-mode lora_only",
    ),
    ({"weight_bridge_mode": "lora_only", "train_layer_indices": "0-1"}, "--lora-layer-indices"),
    ({"weight_bridge_mode": "lora_restart", "train_layer_indices": "0-1"}, "frozen"),
    ({"master_weights": "none", "epochs_per_batch": 2}, "--master-weights fp32"),
    ({"master_weights": "none", "mini_batches": 2}, "2 optimizer steps per batch"),
    ({"overlap_publish": True, "forward_weights": "views"}, "--forward-weights masters"),
    ({"epochs_per_batch": 4, "forward_weights": "views"}, "several steps per batch"),
    ({"overlap_publish": True, "master_weights": "none"}, "--overlap-publish needs master weights"),
    ({"forward_weights": "masters", "master_weights": "none"}, "--master-weights fp32"),
    (
        {"weight_bridge_mode": "shared_vllm", "master_weights": "host", "overlap_publish": True},
        "use --forward-weights views without --overlap-publish",
    ),
]


def make(**settings: object) -> TrainingConfig:
    return TrainingConfig.model_validate({"model_name": "m", **settings})


@pytest.mark.parametrize(("name", "value"), DOCUMENTED_DEFAULTS.items())
def test_a_documented_flag_keeps_its_documented_default(name: str, value: object) -> None:
    assert getattr(make(), name) == value


@pytest.mark.parametrize(("settings", "words"), REFUSED)
def test_r31_what_cannot_work_is_refused_with_the_reason(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        make(**settings)
    assert words in str(caught.value)


def test_the_servers_of_a_broadcast_may_divide_their_layers_between_gpus() -> None:
    make(weight_bridge_mode="shared_vllm", num_inference_nodes=2, vllm_tensor_parallel_size=2)


@pytest.mark.parametrize("mode", ["none", "lora_only", "lora_restart"])
def test_several_processes_start_with_the_defaults_and_with_every_optimizer(mode: str) -> None:
    for optimizer in (None, "adamw", "adamw_8bit", "adafactor"):
        chosen = {} if optimizer is None else {"optimizer": optimizer}
        make(world_size=2, weight_bridge_mode=mode, **chosen)


def test_a_refusal_on_the_command_line_is_one_line() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(TrainingConfig, ["--model-name", "m", "--trainer-rank", "3"], prog="p", description="d")
    assert "\n" not in str(caught.value)
    assert "--trainer-rank 3" in str(caught.value)


def test_settings_passed_on_whole_are_accepted_again() -> None:
    shared = make(weight_bridge_mode="shared_vllm")
    assert TrainingConfig.model_validate(shared.model_dump()) == shared


def test_the_model_may_be_named_by_either_flag() -> None:
    for flag in ("--model-name", "--model", "--model_path"):
        assert load_config(TrainingConfig, [flag, "x"], prog="p", description="d").model_name == "x"


def test_the_courses_spellings_are_understood() -> None:
    spelt = {"model": "m", "learning-rate": "2e-5", "n-grpo-steps": "7", "cliprange": "0.1", "loss-type": "grpo_clip"}
    argv = [part for name, value in spelt.items() for part in (f"--{name}", value)]
    config = load_config(TrainingConfig, [*argv, "--epochs-per-rollout-batch", "2"], prog="p", description="d")
    assert (config.lr, config.training_steps, config.clip_eps, config.epochs_per_batch) == (2e-5, 7, 0.1, 2)
    assert config.loss_type == "grpo"


def test_a_step_takes_batch_size_times_accumulation_sequences() -> None:
    assert make(batch_size=4, gradient_accumulation_steps=8).sequences_per_batch == 32


def test_r36_the_forward_reads_the_views_unless_something_needs_the_masters() -> None:
    shared = {"weight_bridge_mode": "shared_vllm"}
    assert not make(**shared).forwards_from_masters
    assert make(**shared, overlap_publish=True).forwards_from_masters
    assert make(**shared, epochs_per_batch=4).forwards_from_masters
    assert make(**shared, forward_weights="masters").forwards_from_masters
    assert make(weight_bridge_mode="none").forwards_from_masters


def test_shared_mode_publishes_each_step_and_restart_modes_at_their_interval() -> None:
    assert make(weight_bridge_mode="shared_vllm", vllm_restart_interval=7).publish_interval == 1
    assert make(weight_bridge_mode="lora_restart", vllm_restart_interval=7).publish_interval == 7


def test_lora_only_swaps_each_step_unless_an_interval_is_named() -> None:
    assert make(weight_bridge_mode="lora_only").publish_interval == 1
    assert make(weight_bridge_mode="lora_only", vllm_restart_interval=5).publish_interval == 5
    assert make(weight_bridge_mode="lora_only", vllm_restart_interval=3).publish_interval == 3, "the default, but named"


IDLE = {
    "none": (
        "in_flight=recompute",
        "sync_budget=0.5",
        "forward_weights=views",
        "start_vllm=never",
        "broadcast_backend=nccl",
    ),
    "lora_restart": ("in_flight=keep_kv", "vllm_config_path=x", "start_vllm=never"),
    "lora_only": ("in_flight=finish", "drain_seconds=3", "restart_method=reload", "forward_weights=masters"),
    "shared_vllm": ("vllm_restart_interval=9", "restart_method=reload", "start_vllm=never", "sync_budget=0.5"),
}


@pytest.mark.parametrize(("mode", "setting"), [(mode, one) for mode, settings in IDLE.items() for one in settings])
def test_a_setting_that_does_nothing_in_a_mode_is_named_in_a_warning(mode: str, setting: str) -> None:
    field, _, value = setting.partition("=")
    warnings = make(**{"weight_bridge_mode": mode, field: value}).warnings()
    flag = f"--{field.replace('_', '-')}"
    assert [one.startswith(f"{flag} ") and f"has no effect in mode {mode}: " in one for one in warnings] == [True]


def test_a_setting_that_counts_is_not_warned_about() -> None:
    shared = {"weight_bridge_mode": "shared_vllm", "forward_weights": "masters", "sync_budget": 0.5}
    assert make(**shared, in_flight="recompute", drain_seconds=3).warnings() == []
    assert (
        make(weight_bridge_mode="none", restart_method="reload", drain_seconds=3, vllm_restart_interval=2).warnings()
        == []
    )
    assert make(weight_bridge_mode="lora_only", start_vllm="never", vllm_restart_interval=2).warnings() == []


def test_a_setting_that_came_with_a_loss_type_or_preset_is_not_warned_about() -> None:
    assert make(loss_type="dapo", importance_sampling="truncated").warnings() == []
    assert make(preset="recommended", importance_sampling="truncated").warnings() == []
    (warning,) = make(loss_type="dapo", importance_sampling="truncated", clip_eps=0.3).warnings()
    assert warning.startswith("--clip-eps 0.3 has no effect")


def test_settings_that_the_broker_or_dropout_makes_use_of_are_not_warned_about() -> None:
    assert make(wandb_group="g").warnings() == []
    lora = {"weight_bridge_mode": "lora_only", "alignment_sample_sequences": 3}
    assert make(**lora).warnings() == []
    assert make(**lora, lora_dropout=0.0).warnings() != []


def test_automatic_checks_are_off_where_they_would_gather_a_whole_model() -> None:
    assert make().sync_check_every is None
    assert make(world_size=2).sync_check_every == 0
    assert make(overlap_publish=True).sync_check_every == 0
    assert make(world_size=2, weight_bridge_mode="lora_restart").sync_check_every is None
    assert make(world_size=2, sync_check="every").sync_check_every == 1


def test_the_servers_context_length_is_warned_about_unless_the_check_of_memory_counts_with_it() -> None:
    shared = {"weight_bridge_mode": "shared_vllm", "max_model_len": 131072}
    assert make(**shared).warnings() == []
    without = (shared | {"fit": "off"}, shared | {"gpu_memory_utilization": 0.3}, shared | {"num_inference_nodes": 2})
    for settings in without:
        (warning,) = make(**settings).warnings()
        assert warning.startswith("--max-model-len 131072 has no effect in mode shared_vllm")


def test_adapters_are_sent_to_a_server_that_splits_its_layers_too() -> None:
    assert make(weight_bridge_mode="lora_only", vllm_tensor_parallel_size=2).vllm_tensor_parallel_size == 2


def test_r19_a_high_rate_for_full_fine_tuning_is_warned_about() -> None:
    assert "--lr 2e-05 is high" in make(lr=2e-5).warnings()[0]
    assert make(lr=2e-5, weight_bridge_mode="lora_restart").warnings() == []


def test_nothing_is_warned_about_at_the_defaults_of_the_guides() -> None:
    assert make().warnings() == []
    assert make(lr=1e-5).warnings() == []
    assert make(weight_bridge_mode="lora_restart").warnings() == []


@pytest.mark.parametrize("mode", ["lora_only", "lora_restart"])
def test_an_adapter_on_a_base_in_four_bits_is_trained_in_both_adapter_modes(mode: str) -> None:
    assert make(weight_bridge_mode=mode, load_in_4bit=True).warnings() == []


@pytest.mark.parametrize("load_in_4bit", [True, False])
def test_a_package_for_four_bits_is_advised_only_where_there_are_four_bits(
    load_in_4bit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = pytest.importorskip("bitsandbytes.backends.cpu.ops")
    library = logging.getLogger("bitsandbytes")
    monkeypatch.setattr(library, "level", library.level)
    silence_unused_kernels(make(weight_bridge_mode="lora_restart", load_in_4bit=load_in_4bit))
    assert ops.logger.isEnabledFor(logging.WARNING) is load_in_4bit
    library.setLevel(logging.NOTSET)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_no_option_takes_a_number_that_is_not_finite(value: str) -> None:
    numbers = [name for name, field in TrainingConfig.model_fields.items() if "float" in str(field.annotation)]
    assert len(numbers) > 20
    for name in numbers:
        with pytest.raises(ValidationError):
            TrainingConfig.model_validate({"model_name": "m", name: float(value)})


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"max_response_tokens": 8}, "--max-response-tokens 8"),
        ({"max_response_tokens": 8, "mask_overlong": True, "overlong_buffer": 4}, "--overlong-buffer 4"),
        ({"loss_type": "no_baseline", "advantage_norm": "batch"}, "--advantage-norm batch"),
        ({"loss_type": "no_baseline", "advantage_std": "population"}, "--advantage-std population"),
        ({"metrics_host": "0.0.0.0"}, "--metrics-host 0.0.0.0"),
        (
            {"world_size": 2, "weight_bridge_mode": "lora_only", "reshard_after_forward": False},
            "--reshard-after-forward False",
        ),
    ],
)
def test_a_setting_that_refines_what_is_not_chosen_is_warned_about(settings: dict[str, object], flag: str) -> None:
    config = TrainingConfig.model_validate({"model_name": "m", **settings})
    assert [one for one in config.warnings() if one.startswith(f"{flag} has no effect")]
    assert len(config.warnings()) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"max_response_tokens": 8, "loss_type": "dr_grpo"},
        {"max_response_tokens": 8, "overlong_penalty": 1.0, "overlong_buffer": 4},
        {"preset": "no_baseline"},
        {"metrics_host": "0.0.0.0", "metrics_port": 9100},
        {"world_size": 2, "reshard_after_forward": False},
    ],
)
def test_a_setting_beside_what_it_refines_is_not(settings: dict[str, object]) -> None:
    assert TrainingConfig.model_validate({"model_name": "m", **settings}).warnings() == []
