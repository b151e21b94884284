"""The commands that the four published guides print, word for word, as facts.

A command is a shell block: variables, a program, and its flags over several lines. A fragment is a block of flags only,
which the guide adds to one of its commands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

COURSE: Final = "001"
OLD_TRAINER: Final = "002"
TRAINER: Final = "003"
TRL: Final = "004"


@dataclass(frozen=True, kw_only=True, slots=True)
class Printed:
    """One printed command."""

    guide: str
    text: str


COURSE_SCRIPT: Final = ".venv/bin/python scripts/grpo_train_loop.py"

COURSE_COMMANDS: Final = (
    Printed(
        guide=COURSE,
        text=r"""
.venv/bin/python scripts/grpo_train_loop.py \
    --n-grpo-steps 10 \
    --eval-steps 2 \
    --rollout-batch-size 64 \
    --train-batch-size 64 \
    --gradient-accumulation-steps 32 \
    --model-path /data/a5-alignment/models/Qwen2.5-Math-1.5B \
    --wandb-project cs336-grpo \
    --wandb-run-name test-run
""",
    ),
    Printed(
        guide=COURSE,
        text=r"""
.venv/bin/python scripts/grpo_train_loop.py \
    --model-path /data/a5-alignment/models/Qwen2.5-Math-1.5B \
    --wandb-project cs336-grpo \
    --wandb-run-name grpo-baseline
""",
    ),
    Printed(guide=COURSE, text=".venv/bin/python scripts/grpo_train_loop.py --help"),
)

COURSE_FRAGMENTS: Final = (
    r"""
--epochs-per-rollout-batch 1 \
--train-batch-size 256
""",
    r"""
--epochs-per-rollout-batch 4 \
--train-batch-size 1024 \
--loss-type grpo_clip \
--cliprange 0.2
""",
    r"""
--data-path ./data/math/train.jsonl \
--val-data-path ./data/math/test.jsonl
""",
    "--save-dir /path/to/checkpoints",
    r"""
--wandb-project my-project \
--wandb-run-name my-experiment
""",
)

OLD_TRAINER_COMMANDS: Final = tuple(
    Printed(guide=OLD_TRAINER, text=text)
    for text in (
        "run-api",
        "python environments/gsm8k_server.py serve --slurm False",
        r"""
python example_trainer/grpo.py \
  --model-name Qwen/Qwen2.5-3B-Instruct \
  --weight-bridge-mode none \
  --training-steps 100 \
  --vllm-restart-interval 10 \
  --batch-size 2 \
  --gradient-accumulation-steps 16 \
  --lr 1e-5 \
  --use-wandb \
  --wandb-project gsm8k-grpo
""",
        r"""
export LOGDIR=/tmp/atropos_bridge
export NUM_INFERENCE_NODES=0  # Single-node local mode
export MASTER_ADDR=localhost
export MASTER_PORT=26756

mkdir -p $LOGDIR

# Start the custom vLLM server with bridge endpoints
python example_trainer/vllm_api_server.py \
  --model Qwen/Qwen2.5-3B-Instruct \
  --port 9001 \
  --gpu-memory-utilization 0.45
""",
        r"""
export LOGDIR=/tmp/atropos_bridge
export NUM_INFERENCE_NODES=0
export MASTER_ADDR=localhost
export MASTER_PORT=26756

python example_trainer/grpo.py \
  --model-name Qwen/Qwen2.5-3B-Instruct \
  --weight-bridge-mode shared_vllm \
  --trainer-rank 0 \
  --world-size 1 \
  --num-inference-nodes 0 \
  --training-steps 100 \
  --batch-size 2 \
  --gradient-accumulation-steps 16 \
  --lr 1e-5 \
  --use-wandb \
  --wandb-project gsm8k-grpo-shared
""",
        r"""
python example_trainer/grpo.py \
  --model-name Qwen/Qwen2.5-3B-Instruct \
  --weight-bridge-mode lora_only \
  --lora-r 16 \
  --lora-alpha 32 \
  --lora-dropout 0.05 \
  --lora-target-modules q_proj v_proj \
  --training-steps 100 \
  --vllm-restart-interval 20 \
  --batch-size 2 \
  --gradient-accumulation-steps 16 \
  --lr 1e-4 \
  --use-wandb \
  --wandb-project gsm8k-grpo-lora
""",
        "python example_trainer/grpo.py --help",
        r"""
python example_trainer/grpo.py \
  --model-name Qwen/Qwen2.5-0.5B-Instruct \
  --training-steps 5 \
  --batch-size 1 \
  --gradient-accumulation-steps 4
""",
        r"""
python example_trainer/grpo.py \
  --model-name Qwen/Qwen2.5-3B-Instruct \
  --weight-bridge-mode lora_only \
  --lora-r 32 \
  --lora-alpha 64 \
  --training-steps 500 \
  --batch-size 2 \
  --gradient-accumulation-steps 32 \
  --lr 5e-5 \
  --use-wandb \
  --wandb-project gsm8k-lora
""",
        r"""
export LOGDIR=/tmp/atropos_bridge
export NUM_INFERENCE_NODES=0

python example_trainer/grpo.py \
  --model-name Qwen/Qwen2.5-3B-Instruct \
  --weight-bridge-mode shared_vllm \
  --training-steps 1000 \
  --batch-size 4 \
  --gradient-accumulation-steps 16 \
  --lr 1e-5 \
  --use-wandb \
  --wandb-project gsm8k-shared
""",
    )
)

TRAINER_COMMANDS: Final = (
    *(
        Printed(guide=TRAINER, text=text)
        for text in (
            "run-api --port 8002",
            r"""
python -m example_trainer.vllm_api_server \
    --model NousResearch/Hermes-3-Llama-3.1-8B \
    --port 9001 \
    --gpu-memory-utilization 0.5 \
    --max-model-len 4096 \
    --dtype bfloat16 \
    --enable-lora \
    --enforce-eager
""",
            r"""
# Important: Use server_type=vllm to get logprobs (required for GRPO)
python environments/gsm8k_server.py serve \
    --env.group_size 4 \
    --env.batch_size 16 \
    --env.total_steps 200 \
    --env.steps_per_eval 50 \
    --env.max_num_workers_per_node 8 \
    --env.rollout_server_url "http://localhost:8002" \
    --env.use_wandb true \
    --env.wandb_name "gsm8k-lora-only-env" \
    --openai.api_key "dummy" \
    --openai.base_url "http://localhost:9001/v1" \
    --openai.model_name "NousResearch/Hermes-3-Llama-3.1-8B" \
    --openai.server_type vllm
""",
            r"""
python -m example_trainer.grpo \
    --model-name NousResearch/Hermes-3-Llama-3.1-8B \
    --weight-bridge-mode lora_only \
    --vllm-port 9001 \
    --atropos-url "http://localhost:8002" \
    --batch-size 4 \
    --gradient-accumulation-steps 4 \
    --warmup-steps 20 \
    --lr 1e-5 \
    --training-steps 30 \
    --clip-eps 0.2 \
    --vllm-restart-interval 5 \
    --save-path ./lora_checkpoints \
    --wandb-project "grpo-training"
""",
            "python -m example_trainer.vllm_api_server --model ... --enable-lora --enforce-eager",
            r"""
python environments/gsm8k_server.py serve \
    --env.group_size 4 \
    --env.batch_size 16 \
    --env.total_steps 200 \
    --env.steps_per_eval 50 \
    --env.max_num_workers_per_node 8 \
    --env.rollout_server_url "http://localhost:8002" \
    --env.use_wandb true \
    --env.wandb_name "gsm8k-train-env" \
    --openai.base_url "http://localhost:9001/v1" \
    --openai.model_name "NousResearch/Hermes-3-Llama-3.1-8B" \
    --openai.server_type vllm
""",
            r"""
VLLM_ENABLE_SHARED_WEIGHTS=1 LOGDIR=/tmp/grpo_training \
python -m example_trainer.vllm_api_server \
    --model NousResearch/Hermes-3-Llama-3.1-8B \
    --port 9001 \
    --gpu-memory-utilization 0.45 \
    --enforce-eager
""",
            r"""
# Important: Use server_type=vllm to get logprobs (required for GRPO)
python environments/gsm8k_server.py serve \
    --openai.base_url "http://localhost:9001/v1" \
    --openai.model_name "NousResearch/Hermes-3-Llama-3.1-8B" \
    --openai.server_type vllm \
    --env.group_size 4 \
    --env.batch_size 16 \
    --env.total_steps 200 \
    --env.steps_per_eval 50 \
    --env.max_num_workers_per_node 8 \
    --env.rollout_server_url "http://localhost:8002" \
    --env.use_wandb true \
    --env.wandb_name "gsm8k-shared-vllm-env"
""",
            r"""
python -m example_trainer.grpo \
    --model-name NousResearch/Hermes-3-Llama-3.1-8B \
    --weight-bridge-mode shared_vllm \
    --vllm-port 9001 \
    --vllm-config-path /tmp/grpo_training/vllm_bridge_config.json \
    --atropos-url "http://localhost:8002" \
    --warmup-steps 20 \
    --clip-eps 0.2
""",
            r"""
# Single command starts both vLLM and trainer
VLLM_ENABLE_SHARED_WEIGHTS=1 python -m example_trainer.run \
    --model-name NousResearch/Hermes-3-Llama-3.1-8B \
    --atropos-url "http://localhost:8002" \
    --training-steps 30
""",
            "VLLM_USE_V1=0 python -m example_trainer.vllm_api_server ...",
            r"""
# Add --enforce-eager to vLLM
python vllm_api_server.py --model $MODEL --enforce-eager
""",
            "python -m example_trainer.grpo --weight-bridge-mode lora_only ...",
        )
    ),
)

TRL_COMMANDS: Final = (
    Printed(
        guide=TRL,
        text="CUDA_AVAILABLE_DEVICES=<> accelerate launch --num_processes <gpu_devices> --mixed_precision fp16 "
        "grpo_run.py",
    ),
)

COMMANDS: Final = (*COURSE_COMMANDS, *OLD_TRAINER_COMMANDS, *TRAINER_COMMANDS, *TRL_COMMANDS)

TRAINER_FRAGMENTS: Final = (
    r"""
--batch-size 1 \
--gradient-accumulation-steps 64 \
--seq-len 1024
""",
    "--vllm-port 9002",
    "--lora-target-modules q_proj v_proj",
    "--lora-target-modules q_proj k_proj v_proj o_proj",
    "--lora-target-modules q_proj k_proj v_proj o_proj gate_proj up_proj down_proj",
    "--clip-eps 0.2     # Limits importance sampling ratio to [0.8, 1.2]",
    "--warmup-steps 20",
    "--optimizer adamw_8bit",
    "--optimizer adamw",
    "--optimizer adafactor",
    r"""
--gpu-memory-utilization 0.4   # Less vLLM memory
--batch-size 2                  # Smaller batches
--gradient-accumulation-steps 8 # Compensate with accumulation
--seq-len 1024                  # Shorter sequences
--optimizer adafactor           # Uses less memory than AdamW
""",
    r"""
--use-wandb \
--wandb-project "my-grpo-training" \
--wandb-group "hermes-8b-gsm8k"
""",
)
"""Flags that 002 and 003 add to the trainer's command; those of an adapter need a mode that trains one."""

GENERATE_BODY: Final = '{"prompt": "Hello", "max_tokens": 5}'
"""The body that 003 posts to `/generate` with curl."""

INSTALLS: Final = (
    "pip install -r example_trainer/requirements.txt",
    'pip install -e ".[example_trainer]"',
    'pip install -e ".[all]"',
)

LAYER_QUERY: Final = """\
from transformers import AutoConfig

model_id = "meta-llama/Meta-Llama-3-8B-Instruct"
cfg = AutoConfig.from_pretrained(model_id)
num_layers = getattr(cfg, "num_hidden_layers", None)
if num_layers is None:
    num_layers = getattr(cfg, "n_layer", None)

print(f"model={model_id}")
print(f"num_hidden_layers={num_layers}")
if num_layers is not None:
    print(f"valid index range: 0-{num_layers-1}")
"""
"""The program by which 003 counts a model's layers."""

GUIDES_REWARD: Final = """\
import numpy as np
from nltk.tokenize import word_tokenize

def simple_reward(samples):
    out = []
    for s in samples:
        length_penalty = -0.001 * max(0, len(word_tokenize(s["completion"])) - 512)
        end_bonus      = 1.0 if s["completion"].strip().endswith(".") else 0.0
        out.append(length_penalty + end_bonus)
    return np.array(out, dtype=np.float32)
"""
"""The reward that 004 prints."""
