"""The effect of each trainer flag, as seen from outside: in metrics, weights, files, or messages to the broker.

`EFFECTS` compares a run with the flag to one without it. `SERVED` checks the command by which the trainer starts its
inference server. `ELSEWHERE` names the tests of flags that need more than one process on recorded batches. A flag in
none of the three fails a test, so that each new flag gets a line here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .flag_harness import TrainedRun, wandb_file


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """The flag's `argv` with `beside` is compared with `beside` alone; `holds` gets both runs."""

    argv: str
    holds: Callable[[TrainedRun, TrainedRun], bool]
    beside: str = ""
    needs: str = ""
    """An optional package; another test checks that without it the flag is refused."""


def _other_weights(seen: TrainedRun, usual: TrainedRun) -> bool:
    return not seen.same_weights(usual)


def _other(metric: str) -> Callable[[TrainedRun, TrainedRun], bool]:
    """Check that the metric differs at the last step."""
    return lambda seen, usual: seen.last[metric] != usual.last[metric]


def _file(pattern: str) -> Callable[[TrainedRun, TrainedRun], bool]:
    """Check that a file of this name exists with the flag and not without."""
    return lambda seen, usual: any(seen.directory.glob(pattern)) and not any(usual.directory.glob(pattern))


def _trained(seen: TrainedRun) -> set[str]:
    assert seen.policy is not None
    return set(seen.policy.masters)


def _shape_of(seen: TrainedRun, part: str) -> tuple[int, ...]:
    assert seen.policy is not None
    return next(tuple(master.shape) for name, master in seen.policy.masters.items() if part in name)


def _master_dtype(seen: TrainedRun) -> str:
    assert seen.policy is not None
    return str(next(iter(seen.policy.masters.values())).dtype)


def _fetched_before_the_step_ended(seen: TrainedRun) -> bool:
    return seen.recorded.calls.index(("batch", 2)) < seen.recorded.calls.index(("announce", (2, 1)))


def _wandb(text: str) -> Callable[[TrainedRun, TrainedRun], bool]:
    """Check that the recorded W&B run contains this."""
    return lambda seen, _: text.encode() in wandb_file(seen)


def _events(seen: TrainedRun) -> str:
    return (seen.directory / "events.jsonl").read_text()


def _begun(seen: TrainedRun) -> dict[str, Any]:
    """Return the body of the first request that began a publish."""
    return next(body for path, body in seen.recorded.served if path.endswith("publish/begin"))


def _reads_served(seen: TrainedRun) -> bool:
    assert seen.policy is not None
    return not seen.policy.forwards_from_masters


_TWO = "--training-steps 2"
_SHARED = "--weight-bridge-mode shared_vllm"
_LORA = "--weight-bridge-mode lora_only --lora-dropout 0"
_BF16 = "--dtype bfloat16"
_WANDB = "--use-wandb --wandb-project tried-project --wandb-group tried-group --wandb-run-name tried-name"

_BATCH = {
    "training_steps": Effect(argv="--training-steps 2", holds=lambda seen, _: [r["step"] for r in seen.rows] == [1, 2]),
    "batch_size": Effect(argv="--batch-size 2", holds=lambda seen, _: seen.request.batch_size == 8),
    "gradient_accumulation_steps": Effect(
        argv="--gradient-accumulation-steps 2", holds=lambda seen, _: seen.request.batch_size == 8
    ),
    "rollout_batch_size": Effect(
        argv="--rollout-batch-size 12 --gradient-accumulation-steps 1",
        holds=lambda seen, _: seen.request.batch_size == 12,
    ),
    "train_batch_size": Effect(
        argv="--train-batch-size 8 --gradient-accumulation-steps 2",
        beside="--rollout-batch-size 16 --gradient-accumulation-steps 2",
        holds=_other_weights,
    ),
    "seq_len": Effect(argv="--seq-len 12", holds=lambda seen, usual: seen.first["data/overlong"] > 0),
    "overlong": Effect(argv="--overlong mask", beside="--seq-len 12", holds=_other_weights),
    "pad_to": Effect(
        argv="--pad-to 64",
        holds=lambda seen, usual: seen.last["perf/padded_fraction"] > usual.last["perf/padded_fraction"],
    ),
    "token_budget": Effect(argv="--token-budget 40", holds=lambda seen, usual: seen.layer_calls > usual.layer_calls),
    "epochs_per_batch": Effect(
        argv="--epochs-per-batch 2", holds=lambda seen, usual: seen.layer_calls > usual.layer_calls
    ),
    "mini_batches": Effect(argv="--mini-batches 2", holds=_other_weights),
    "prefetch": Effect(
        argv="--no-prefetch",
        beside=_TWO,
        holds=lambda seen, usual: _fetched_before_the_step_ended(usual) and not _fetched_before_the_step_ended(seen),
    ),
}

_MODEL = {
    "model_name": Effect(argv="--model-name {other}", holds=_other_weights),
    "dtype": Effect(
        argv="--dtype bfloat16",
        holds=lambda seen, usual: seen.first["logprobs/training_mean"] != usual.first["logprobs/training_mean"],
    ),
    "torch_threads": Effect(argv="--torch-threads 2", holds=lambda seen, _: seen.recorded.of("threads") == [2]),
    "master_weights": Effect(
        argv="--master-weights none",
        beside=_BF16,
        holds=lambda seen, usual: (_master_dtype(seen), _master_dtype(usual)) == ("torch.bfloat16", "torch.float32"),
    ),
    "train_layer_indices": Effect(
        argv="--train-layer-indices 1", holds=lambda seen, _: all(".layers.1." in name for name in _trained(seen))
    ),
    "gradient_checkpointing": Effect(
        argv="--gradient-checkpointing", holds=lambda seen, usual: seen.layer_calls > usual.layer_calls
    ),
    "activation_offloading": Effect(
        argv="--activation-offloading",
        beside="--gradient-checkpointing",
        holds=lambda seen, usual: "has no effect on a CPU" in seen.log and "has no effect on a CPU" not in usual.log,
    ),
    "debug_loading": Effect(
        argv="--debug-loading", holds=lambda seen, usual: "layers.0" in seen.log and "layers.0" not in usual.log
    ),
}

_ADAPTERS = {
    "lora_r": Effect(argv="--lora-r 4", beside=_LORA, holds=lambda seen, _: 4 in _shape_of(seen, "lora_A")),
    "lora_alpha": Effect(argv="--lora-alpha 4", beside=f"{_LORA} {_TWO}", holds=_other("train/loss")),
    "lora_dropout": Effect(
        argv="--lora-dropout 0.5", beside="--weight-bridge-mode lora_only --lora-dropout 0", holds=_other_weights
    ),
    "load_in_4bit": Effect(
        argv="--load-in-4bit",
        beside="--weight-bridge-mode lora_restart",
        needs="bitsandbytes",
        holds=_other("logprobs/training_mean"),
    ),
    "lora_target_modules": Effect(
        argv="--lora-target-modules o_proj",
        beside=_LORA,
        holds=lambda seen, _: all("o_proj" in n for n in _trained(seen)),
    ),
    "lora_layer_indices": Effect(
        argv="--lora-layer-indices 1",
        beside=_LORA,
        holds=lambda seen, _: all(".layers.1." in name for name in _trained(seen)),
    ),
}

_OBJECTIVE = {
    "loss_type": Effect(argv="--loss-type reinforce_with_baseline", holds=_other_weights),
    "importance_sampling": Effect(argv="--importance-sampling truncated", holds=_other("train/loss")),
    "clip_eps": Effect(
        argv="--clip-eps 0.9",
        holds=lambda seen, usual: seen.first["grpo/clipped_fraction"] < usual.first["grpo/clipped_fraction"],
    ),
    "clip_eps_high": Effect(
        argv="--clip-eps-high 5",
        holds=lambda seen, usual: seen.first["grpo/clipped_fraction"] < usual.first["grpo/clipped_fraction"],
    ),
    "dual_clip": Effect(argv="--dual-clip None", holds=_other("train/loss")),
    "cispo_cap": Effect(argv="--cispo-cap 1.1", beside="--loss-type cispo", holds=_other("train/loss")),
    "sapo_temperature_pos": Effect(
        argv="--sapo-temperature-pos 3", beside="--loss-type sapo", holds=_other("train/loss")
    ),
    "sapo_temperature_neg": Effect(
        argv="--sapo-temperature-neg 3", beside="--loss-type sapo", holds=_other("train/loss")
    ),
    "vespo_k_pos": Effect(argv="--vespo-k-pos 1", beside="--loss-type vespo", holds=_other("train/loss")),
    "vespo_lambda_pos": Effect(argv="--vespo-lambda-pos 1", beside="--loss-type vespo", holds=_other("train/loss")),
    "vespo_k_neg": Effect(argv="--vespo-k-neg 1", beside="--loss-type vespo", holds=_other("train/loss")),
    "vespo_lambda_neg": Effect(argv="--vespo-lambda-neg 1", beside="--loss-type vespo", holds=_other("train/loss")),
    "m2_threshold": Effect(
        argv="--m2-threshold 1e-9", beside="--loss-type m2po", holds=_other("grpo/second_moment_kept")
    ),
    "kl_bias_correction": Effect(
        argv="--kl-bias-correction", beside="--kl-coef 1 --training-steps 2", holds=_other("train/loss")
    ),
    "tis_cap": Effect(argv="--tis-cap 1.1", beside="--importance-sampling truncated", holds=_other("train/loss")),
    "tis_floor": Effect(argv="--tis-floor 0.9", beside="--importance-sampling truncated", holds=_other("train/loss")),
    "log_ratio_clamp": Effect(
        argv="--log-ratio-clamp 0.1",
        beside="--dual-clip None",
        holds=lambda seen, _: seen.first["grpo/max_ratio"] < 1.11,
    ),
    "old_logprobs": Effect(argv="--old-logprobs recomputed", holds=_other("train/loss")),
    "mismatch_correction": Effect(
        argv="--mismatch-correction token_truncate", beside="--old-logprobs recomputed", holds=_other("train/loss")
    ),
    "off_policy_mask": Effect(
        argv="--off-policy-mask 0", holds=lambda seen, _: seen.first["grpo/off_policy_fraction"] > 0
    ),
    "staleness_mask": Effect(
        argv="--staleness-mask 0",
        beside=_TWO,
        holds=lambda seen, usual: (
            seen.first["train/loss"] == usual.first["train/loss"]
            and (seen.last["train/skipped"], usual.last["train/skipped"]) == (1.0, 0.0)
        ),
    ),
    "staleness_decay": Effect(
        argv="--staleness-decay 0.5",
        beside=_TWO,
        holds=lambda seen, usual: (
            seen.first["train/loss"] == usual.first["train/loss"]
            and abs(seen.last["train/loss"] - 0.5 * usual.last["train/loss"]) < 1e-6 * abs(usual.last["train/loss"])
        ),
    ),
    "kl_coef": Effect(argv="--kl-coef 1", beside=_TWO, holds=_other("train/loss")),
    "kl_estimator": Effect(argv="--kl-estimator k1", beside=f"{_TWO} --kl-coef 1", holds=_other("train/kl_reference")),
    "target_kl": Effect(
        argv="--target-kl 1e-9", beside=f"{_TWO} --kl-coef 1 --ref-model {{other}}", holds=_other("train/kl_coef")
    ),
    "kl_adapt_rate": Effect(
        argv="--kl-adapt-rate 1",
        beside=f"{_TWO} --kl-coef 1 --ref-model {{other}} --target-kl 1e-9",
        holds=_other("train/kl_coef"),
    ),
    "ref_model": Effect(
        argv="--ref-model {other}",
        beside="--kl-coef 1",
        holds=lambda seen, usual: seen.first["train/kl_reference"] > usual.first["train/kl_reference"],
    ),
    "ref_update_interval": Effect(
        argv="--ref-update-interval 1",
        beside=f"{_TWO} --kl-coef 1",
        holds=lambda seen, usual: seen.last["train/kl_reference"] < usual.last["train/kl_reference"],
    ),
    "entropy_coef": Effect(argv="--entropy-coef 1", holds=_other_weights),
    "distill": Effect(argv="--distill forward_kl", holds=_other("train/loss")),
    "distill_coef": Effect(argv="--distill-coef 3", beside="--distill forward_kl", holds=_other("train/loss")),
    "distill_temperature": Effect(
        argv="--distill-temperature 3", beside="--distill forward_kl", holds=_other("train/loss")
    ),
    "loss_aggregation": Effect(argv="--loss-aggregation sequence", holds=_other("train/loss")),
    "advantage_norm": Effect(argv="--advantage-norm none", holds=_other("train/loss")),
    "use_std_normalization": Effect(argv="--use-std-normalization false", holds=_other("train/loss")),
    "importance_sampling_level": Effect(argv="--importance-sampling-level sequence", holds=_other("train/loss")),
    "advantage_std": Effect(argv="--advantage-std population", holds=_other("train/loss")),
    "max_response_tokens": Effect(
        argv="--max-response-tokens 6",
        beside="--max-response-tokens 40 --mask-overlong",
        holds=lambda seen, usual: seen.first["data/truncated"] > usual.first["data/truncated"],
    ),
    "mask_overlong": Effect(
        argv="--mask-overlong",
        beside="--max-response-tokens 6",
        holds=lambda seen, usual: seen.first["data/trained_tokens"] < usual.first["data/trained_tokens"],
    ),
    "overlong_penalty": Effect(
        argv="--overlong-penalty 2", beside="--max-response-tokens 8", holds=_other("train/loss")
    ),
    "overlong_buffer": Effect(
        argv="--overlong-buffer 6", beside="--max-response-tokens 8 --overlong-penalty 2", holds=_other("train/loss")
    ),
    "shuffle_advantages": Effect(argv="--shuffle-advantages", holds=_other("train/loss")),
}

_OPTIMIZER = {
    "optimizer": Effect(argv="--optimizer adafactor", holds=_other_weights),
    "lr": Effect(argv="--lr 1e-2", holds=lambda seen, usual: seen.first["train/lr"] == 10 * usual.first["train/lr"]),
    "adam_beta1": Effect(argv="--adam-beta1 0.5", beside=_TWO, holds=_other_weights),
    "adam_beta2": Effect(argv="--adam-beta2 0.5", beside=_TWO, holds=_other_weights),
    "adam_eps": Effect(argv="--adam-eps 1", holds=_other_weights),
    "weight_decay": Effect(argv="--weight-decay 0.5", holds=_other_weights),
    "lr_schedule": Effect(
        argv="--lr-schedule linear",
        beside=_TWO,
        holds=lambda seen, usual: seen.last["train/lr"] < usual.last["train/lr"],
    ),
    "warmup_steps": Effect(
        argv="--warmup-steps 4", holds=lambda seen, usual: seen.first["train/lr"] == usual.first["train/lr"] / 4
    ),
    "max_grad_norm": Effect(argv="--max-grad-norm 1e-6", beside="--adam-eps 1", holds=_other_weights),
}

_RUN = {
    "name": Effect(argv="--name tried", holds=lambda seen, _: seen.request.name == "tried"),
    "run_dir": Effect(
        argv="--run-dir {directory}/elsewhere",
        holds=lambda seen, _: (seen.directory / "elsewhere/metrics.jsonl").exists(),
    ),
    "save_path": Effect(
        argv="--save-path {directory}/kept", holds=lambda seen, _: (seen.directory / "kept/checkpoint-1").is_dir()
    ),
    "seed": Effect(argv="--seed 7", beside="--shuffle-advantages", holds=_other("train/loss")),
    "checkpoint_interval": Effect(argv="--checkpoint-interval 1", beside=_TWO, holds=_file("checkpoint-1")),
    "checkpoint_names": Effect(argv="--checkpoint-names cs336", holds=_file("checkpoint_step_1/model.safetensors")),
    "save_batches": Effect(argv="--save-batches", holds=_file("rollouts/batch-1.atb")),
    "recorded_tokens": Effect(
        argv="--recorded-tokens 0",
        holds=lambda seen, usual: (
            not (seen.directory / "trained.jsonl").exists() and (usual.directory / "trained.jsonl").exists()
        ),
    ),
    "keep_last": Effect(
        argv="--keep-last 1",
        beside=f"{_TWO} --checkpoint-interval 1",
        holds=lambda seen, usual: (
            not (seen.directory / "checkpoint-1").exists() and (usual.directory / "checkpoint-1").exists()
        ),
    ),
    "atropos_url": Effect(
        argv="--atropos-url http://127.0.0.1:8123", holds=lambda seen, _: "127.0.0.1:8123" in seen.recorded.url
    ),
    "atropos_token": Effect(
        argv="--atropos-token s3cret",
        holds=lambda seen, _: seen.recorded.token == "Bearer s3cret",
    ),
    "take_over": Effect(argv="--take-over", holds=lambda seen, usual: seen.request.take_over > usual.request.take_over),
    "policy": Effect(argv="--policy math", holds=lambda seen, _: seen.request.policy == "math"),
    "max_staleness": Effect(argv="--max-staleness 3", holds=lambda seen, _: seen.request.max_staleness == 3),
    "wait_timeout": Effect(argv="--wait-timeout 7", holds=lambda seen, _: seen.recorded.of("wait") == [7.0]),
    "vllm_restart_interval": Effect(
        argv="--vllm-restart-interval 2",
        beside=_TWO,
        holds=lambda seen, usual: (
            len({version for version, _ in seen.recorded.of("announce")})
            < len({version for version, _ in usual.recorded.of("announce")})
        ),
    ),
    "preset": Effect(argv="--preset dr_grpo", holds=_other("train/loss")),
}

_TRACKING = {
    "use_wandb": Effect(argv=_WANDB, holds=_file("wandb/offline-run-*/run-*.wandb")),
    "wandb_project": Effect(argv=_WANDB, holds=_wandb("tried-project")),
    "wandb_group": Effect(argv=_WANDB, holds=_wandb("tried-group")),
    "wandb_run_name": Effect(argv=_WANDB, holds=_wandb("tried-name")),
    "tensorboard": Effect(argv="--tensorboard", holds=_file("tensorboard/events.out.*"), needs="tensorboard"),
    "stop_on": Effect(
        argv="--stop-on clipped_fraction",
        beside=_TWO,
        holds=lambda seen, usual: (seen.code, len(seen.rows), usual.code) == (3, 1, 0),
    ),
    "health_limits": Effect(
        argv="--health-limits clipped_fraction=1",
        holds=lambda seen, usual: "clipped_fraction" in _events(usual) and "clipped_fraction" not in _events(seen),
    ),
    "benchmark": Effect(
        argv="--benchmark",
        holds=lambda seen, usual: "benchmark: time/step mean" in seen.log and "benchmark:" not in usual.log,
    ),
    "metrics_port": Effect(
        argv="--metrics-port 0",
        holds=lambda seen, usual: "metrics at http://127.0.0.1:" in seen.log and "metrics at" not in usual.log,
    ),
    "metrics_host": Effect(
        argv="--metrics-host 127.0.0.2",
        beside="--metrics-port 0",
        holds=lambda seen, usual: (
            "metrics at http://127.0.0.2:" in seen.log and "metrics at http://127.0.0.1:" in usual.log
        ),
    ),
}

_PUBLISH = {
    "forward_weights": Effect(
        argv="--forward-weights masters",
        beside=_SHARED,
        holds=lambda seen, usual: _reads_served(usual) and not _reads_served(seen),
    ),
    "in_flight": Effect(
        argv="--in-flight recompute", beside=_SHARED, holds=lambda seen, _: _begun(seen)["in_flight"] == "recompute"
    ),
    "drain_seconds": Effect(
        argv="--drain-seconds 0.25", beside=_SHARED, holds=lambda seen, _: _begun(seen)["drain_seconds"] == 0.25
    ),
    "keep_versions": Effect(
        argv="--keep-versions 2",
        beside=_TWO,
        holds=lambda seen, usual: seen.last["alignment/tokens"] > usual.last["alignment/tokens"],
    ),
    "alignment_sample_sequences": Effect(
        argv="--alignment-sample-sequences 2",
        beside=f"{_TWO} --keep-versions 2",
        holds=lambda seen, usual: 0 < seen.last["alignment/tokens"] < usual.last["alignment/tokens"],
    ),
}

EFFECTS: dict[str, Effect] = {
    **_BATCH,
    **_MODEL,
    **_ADAPTERS,
    **_OBJECTIVE,
    **_OPTIMIZER,
    **_PUBLISH,
    **_RUN,
    **_TRACKING,
}

SERVED: dict[str, tuple[str, str]] = {
    "vllm_host": ("--vllm-host 127.0.0.2", "--host 127.0.0.2"),
    "vllm_port": ("--vllm-port 9123", "--port 9123"),
    "gpu_memory_utilization": ("--gpu-memory-utilization 0.3", "--gpu-memory-utilization 0.3"),
    "max_model_len": ("--max-model-len 512", "--max-model-len 512"),
    "vllm_tensor_parallel_size": ("--vllm-tensor-parallel-size 2", "--tensor-parallel-size 2"),
    "vllm_quantization": ("--vllm-quantization fp8", "--quantization fp8"),
    "vllm_head_dtype": ("--vllm-head-dtype auto", "--head-dtype auto"),
    "vllm_enable_sleep_mode": ("--vllm-enable-sleep-mode", "--enable-sleep-mode"),
    "vllm_settings": ("--vllm-settings max_num_seqs=3", "--max-num-seqs 3"),
    "log_dir": ("--log-dir somewhere", "--bridge-dir somewhere"),
}
"""Each flag, and the part of the server's command that is there only with it."""
