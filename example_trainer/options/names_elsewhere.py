"""Names of settings in TRL, transformers, verl and prime-rl that are unknown here, each with what works in its place.

`cliconfig` puts these sentences into the error line of an unknown flag or key, in place of the nearest spelling: by
spelling alone `--max-completion-length` is close to `--max-model-len`. A name with a near and right spelling needs no
entry. The models of `atropos-grpo` and `atropos-sft` hold a mapping each; importing this module loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping

_OF_ENVIRONMENT = "it belongs to the environment"
_LONGEST_ANSWER = f"{_OF_ENVIRONMENT}: --env.max-new-tokens where it has that setting, else --env.max-token-length"
_SAMPLING = (
    f"{_OF_ENVIRONMENT}, whose code samples, at temperature 1 unless it says otherwise; "
    "python ENV.py serve --help lists its settings"
)
_REWARDS = f"{_OF_ENVIRONMENT}: --env dataset_server.py --env.reward rewards.py:NAME"
_DATA = f"{_OF_ENVIRONMENT}: --env dataset_server.py with --env.data-path FILE or --env.dataset-name NAME"
_OPTIMIZER_STEPS = (
    "use --mini-batches N, which divides a batch (--batch-size x --gradient-accumulation-steps answers) into N "
    "optimizer steps"
)
_STEPS = "use --training-steps; the environment begins its data again as often as the run needs"
_MISMATCH = "use --old-logprobs recomputed with --mismatch-correction"
_ADAPTER = "use --weight-bridge-mode lora_only (or lora_restart), which trains an adapter; --lora-r is its rank"
_OF_LAUNCHER = "it is a flag of atropos-grpo-run alone, and no key of a file"
_PLACEMENT = f"{_OF_LAUNCHER} but those of the section placement:"
_NOT_HERE = "there is nothing like it here; leave it out"

_COMMON: Mapping[str, str] = {
    "attn_implementation": "torch's own attention computes packed rows; leave it out",
    "bf16": "use --dtype bfloat16, which is the default",
    "deepspeed": "torchrun or accelerate launch start several processes, which share the weights by FSDP; leave it out",
    "fp16": "use --dtype float16",
    "logging_steps": "each step is logged; leave it out",
    "push_to_hub": "each checkpoint-N is a folder that hf upload takes; leave it out",
    "report_to": "use --use-wandb, --use-trackio or --tensorboard",
    "resume_from_checkpoint": "use --resume auto, or --resume PATH",
    "save_strategy": "use --checkpoint-interval N; 0: at the end only",
    "torch_dtype": "use --dtype",
    "use_liger_kernel": "use --kernels liger",
}
"""Names that mean the same to both programs."""

_LAUNCHER: Mapping[str, str] = {
    "cost_per_hour": _OF_LAUNCHER,
    "dry_run": "it is a flag, and no key of a file",
    "json_lines": _OF_LAUNCHER,
    "max_log_mib": _OF_LAUNCHER,
    "max_restarts": _OF_LAUNCHER,
    "placement": _PLACEMENT,
    "placement_address": _PLACEMENT,
    "placement_timeout": _PLACEMENT,
    "progress": _OF_LAUNCHER,
    "quiet": _OF_LAUNCHER,
    "restart_window": _OF_LAUNCHER,
    "stop_grace": _OF_LAUNCHER,
}
"""Options of the launcher, which a trainer and the section `trainer:` do not know."""

TRAINING_NAMES: Mapping[str, str] = {
    **_COMMON,
    **_LAUNCHER,
    "dataset_name": _DATA,
    "eval_dataset": f"{_OF_ENVIRONMENT}: --env.val-data-path FILE",
    "eval_strategy": "use --eval-steps N",
    "generation_batch_size": _OPTIMIZER_STEPS,
    "log_completions": "the newest rollouts are always in the run directory, in rollouts; leave it out",
    "mask_truncated_completions": "use --mask-overlong with --max-response-tokens",
    "max_async_level": "use --max-staleness N",
    "max_completion_length": _LONGEST_ANSWER,
    "max_completion_tokens": _LONGEST_ANSWER,
    "max_off_policy_steps": "use --max-staleness N",
    "max_prompt_length": "use --seq-len (trainer) and --max-model-len (server), which bound prompt and answer together",
    "max_response_length": _LONGEST_ANSWER,
    "max_tokens": _LONGEST_ANSWER,
    "num_epochs": _STEPS,
    "num_processes": "start the trainer by torchrun --nproc-per-node N or accelerate launch --num_processes N",
    "num_train_epochs": _STEPS,
    "per_device_eval_batch_size": "the environment evaluates by itself; leave it out",
    "ref_model_mixup_alpha": "the new reference is the policy itself, every --ref-update-interval steps; leave it out",
    "reward_funcs": _REWARDS,
    "reward_weights": f'{_REWARDS}, with a weight as \'{{"name": "rewards.py:NAME", "weight": 0.5}}\'',
    "rollouts_per_example": "use --group-size N",
    "save_freq": "use --checkpoint-interval N",
    "slurm": "it is a flag of environments: python ENV.py serve --slurm true",
    "steps_per_generation": _OPTIMIZER_STEPS,
    "sync_ref_model": "use --ref-update-interval N",
    "temperature": _SAMPLING,
    "test_freq": "use --eval-steps N",
    "top_entropy_quantile": _NOT_HERE,
    "top_k": _SAMPLING,
    "top_p": _SAMPLING,
    "total_epochs": _STEPS,
    "train_dataset": _DATA,
    "train_files": _DATA,
    "use_lora": _ADAPTER,
    "use_peft": _ADAPTER,
    "use_vllm": "vLLM always samples; leave it out",
    "val_files": f"{_OF_ENVIRONMENT}: --env.val-data-path FILE",
    "vllm_importance_sampling_correction": _MISMATCH,
    "vllm_importance_sampling_mode": _MISMATCH,
    "vllm_mode": "use --weight-bridge-mode: in shared_vllm trainer and vLLM share one copy of the weights",
    "vllm_server_base_url": "use --vllm-host and --vllm-port",
}
"""Names of other GRPO trainers, and of the launcher, that `atropos-grpo` and the section `trainer:` do not know."""

FINE_TUNING_NAMES: Mapping[str, str] = {
    **_COMMON,
    "dataset_train_split": "use --dataset NAME:CONFIGURATION:SPLIT",
    "group_size": "fine-tuning has no groups; leave it out, or start atropos-grpo-run",
    "loss_type": "fine-tuning has one loss; leave it out, or start atropos-grpo-run",
    "per_device_eval_batch_size": "evaluations are computed in the micro-batches of training; leave it out",
    "run_dir": "use --save-path",
    "use_peft": "use --use-lora",
    "weight_bridge_mode": "fine-tuning has no server; --use-lora trains an adapter",
}
"""Names of trainers for supervised fine-tuning, and of `atropos-grpo`, that `atropos-sft` does not know."""
