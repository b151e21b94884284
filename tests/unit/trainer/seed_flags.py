"""The flags in the published guides' tables, as facts: guide, flag, and default there.

Two defaults of the guides are not kept on purpose: checkpoints and logs are in the run directory unless a path is
given (`trained_model_checkpoints` and `./logs` in the guides).
"""

from __future__ import annotations

from typing import Final

REQUIRED: Final = "required"
IN_RUN_DIR: Final = None

TRAINER_GUIDE: Final[tuple[tuple[str, object], ...]] = (
    ("--model-name", REQUIRED),
    ("--model", REQUIRED),
    ("--weight-bridge-mode", "none"),
    ("--training-steps", 10),
    ("--checkpoint-interval", 3),
    ("--batch-size", 2),
    ("--gradient-accumulation-steps", 32),
    ("--warmup-steps", 0),
    ("--seq-len", 2048),
    ("--train-layer-indices", None),
    ("--clip-eps", 0.2),
    ("--lr", 1e-5),
    ("--lora-r", 16),
    ("--lora-alpha", 32),
    ("--lora-dropout", 0.05),
    ("--lora-target-modules", None),
    ("--lora-layer-indices", None),
    ("--vllm-port", 9001),
    ("--vllm-config-path", "auto"),
    ("--gpu-memory-utilization", 0.45),
    ("--vllm-gpu", None),
    ("--max-model-len", 4096),
    ("--dtype", "bfloat16"),
    ("--vllm-restart-interval", 3),
    ("--atropos-url", "http://localhost:8000"),
    ("--use-wandb", False),
    ("--wandb-project", None),
    ("--wandb-group", None),
    ("--trainer-rank", 0),
    ("--world-size", 1),
    ("--init-method", "env://"),
    ("--num-inference-nodes", 0),
    ("--debug-loading", False),
    ("--benchmark", False),
    ("--log-dir", IN_RUN_DIR),
    ("--optimizer", "adamw_8bit"),
)

OLD_TRAINER_GUIDE: Final[tuple[tuple[str, object], ...]] = (
    ("--model-name", REQUIRED),
    ("--lr", 1e-5),
    ("--training-steps", 10),
    ("--batch-size", 2),
    ("--gradient-accumulation-steps", 32),
    ("--seq-len", 2048),
    ("--save-path", IN_RUN_DIR),
    ("--vllm-port", 9001),
    ("--vllm-restart-interval", 3),
    ("--weight-bridge-mode", "none"),
    ("--trainer-rank", 0),
    ("--world-size", 1),
    ("--init-method", "env://"),
    ("--num-inference-nodes", 0),
    ("--use-wandb", False),
    ("--wandb-project", None),
    ("--wandb-group", None),
    ("--lora-r", 16),
    ("--lora-alpha", 32),
    ("--lora-dropout", 0.05),
)

COURSE_SCRIPT: Final[tuple[tuple[str, object, str], ...]] = (
    ("--n-grpo-steps", 200, "training_steps"),
    ("--learning-rate", 1e-5, "lr"),
    ("--rollout-batch-size", 256, "sequences_per_batch"),
    ("--train-batch-size", 256, "sequences_per_batch"),
    ("--gradient-accumulation-steps", 128, "gradient_accumulation_steps"),
    ("--loss-type", "reinforce_with_baseline", "loss_type"),
    ("--use-std-normalization", "group", "advantage_norm"),
    ("--epochs-per-rollout-batch", 1, "epochs_per_batch"),
    ("--cliprange", 0.2, "clip_eps"),
    ("--model-path", REQUIRED, "model_name"),
    ("--save-dir", IN_RUN_DIR, "save_path"),
    ("--wandb-project", None, "wandb_project"),
    ("--wandb-run-name", None, "wandb_run_name"),
)
"""Each flag with the script's default, and the setting or size that has it here under `--preset cs336`."""

COURSE_SCRIPT_ENVIRONMENT: Final = ("--group-size", "--eval-steps", "--data-path", "--val-data-path")

TRL_GUIDE: Final[tuple[tuple[str, object, str], ...]] = (
    ("--beta", 0.05, "kl_coef"),
    ("--target-kl", 0.1, "target_kl"),
    ("--learning-rate", 5e-6, "lr"),
    ("--mini-batch-size", 4, "batch_size"),
    ("--ppo-epochs", 1, "epochs_per_batch"),
    ("--clip-range", 0.2, "clip_eps"),
    ("--load-in-4bit", False, "load_in_4bit"),
)
"""The same under `--preset trl-note`; its group size is the environment's."""
