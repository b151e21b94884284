"""`TrainingConfig`: every setting of the trainer, in one flat pydantic model.

The command line, the run file's `trainer:` section and the launcher all build this model; nothing
else holds a default. A flag that the published documentation tables keeps the documented default.
Combinations that cannot work are refused here, with the reason, and not by the part that would
stumble over them later. Importing this module loads no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from example_trainer.course_options import CourseOptions

BridgeMode = Literal["none", "shared_vllm", "lora_only", "lora_restart"]
LossType = Literal["grpo", "gspo", "reinforce_with_baseline", "no_baseline"]

LORA_MODES = frozenset({"lora_only", "lora_restart"})
_NO_ADAPTERS = "this mode trains full weights, adapters are for --weight-bridge-mode lora_restart"
SHARED_VLLM_REFUSES = {
    "vllm_tensor_parallel_size": "it splits the tensors that the trainer maps",
    "vllm_quantization": "quantised weights cannot be trained in place",
    "vllm_enable_sleep_mode": "it moves the weights away under the trainer",
    "num_inference_nodes": "memory is shared on one host only",
    "lora_r": _NO_ADAPTERS,
    "lora_alpha": _NO_ADAPTERS,
    "lora_dropout": _NO_ADAPTERS,
    "lora_target_modules": _NO_ADAPTERS,
    "lora_layer_indices": _NO_ADAPTERS,
}
HIGH_FULL_FINE_TUNING_LR = 6e-6


def _aliases(*names: str) -> dict[str, Any]:
    return {"aliases": list(names)}


class ModelOptions(BaseModel):
    """Which model is trained, in which precision, where."""

    model_name: str = Field(
        description="Hugging Face model id or local directory.",
        json_schema_extra=_aliases("model", "model_path"),
    )
    dtype: Literal["bfloat16", "float16", "float32", "auto"] = Field(
        "bfloat16", description="Dtype of the served weights; auto takes the checkpoint's."
    )
    device: str = Field("auto", description="cpu, cuda, cuda:N, or auto (cuda when there is one).")
    torch_threads: int | None = Field(
        None, ge=1, description="CPU threads of torch in the trainer; unset leaves torch's choice."
    )
    master_weights: Literal["fp32", "host", "none"] = Field(
        "fp32",
        description="Where the optimizer's weights live: fp32 beside the model, fp32 in host "
        "memory, or none (update the served weights themselves: least memory, coarse rounding).",
    )
    forward_weights: Literal["auto", "views", "masters"] = Field(
        "auto",
        description="What the forward reads in shared_vllm mode: the served tensors (views) or the "
        "fp32 masters. auto: masters when publishes overlap or a batch has several steps.",
    )
    train_layer_indices: str | None = Field(
        None, description="Train these layers only, full weights: 20-31 or 0-3,28-31."
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward: less memory, about a third more time."
    )
    debug_loading: bool = Field(False, description="Log each tensor while the model is loaded.")


class LoraOptions(BaseModel):
    """Adapters, for the lora_only and lora_restart modes."""

    lora_r: int = Field(16, ge=1, description="LoRA rank.")
    lora_alpha: int = Field(32, ge=1, description="LoRA scaling factor.")
    lora_dropout: float = Field(0.05, ge=0.0, lt=1.0, description="LoRA dropout probability.")
    lora_target_modules: list[str] | None = Field(
        None, description="Modules that get an adapter; unset means q_proj v_proj."
    )
    lora_layer_indices: str | None = Field(None, description="Put adapters on these layers only: 20-31 or 0-3,28-31.")


class BatchOptions(BaseModel):
    """How much is trained per step and how it is laid out."""

    training_steps: int = Field(
        10,
        ge=1,
        description="Training steps; batch n is step n.",
        json_schema_extra=_aliases("n_grpo_steps"),
    )
    batch_size: int = Field(2, ge=1, description="Micro-batch size in sequences.")
    gradient_accumulation_steps: int = Field(
        32, ge=1, description="Micro-batches per step: a step trains batch-size times this."
    )
    seq_len: int = Field(
        2048,
        ge=2,
        description="Maximum sequence length in tokens. A longer one keeps its place in the "
        "group's baseline but is not trained on, and is counted.",
    )
    token_budget: int | None = Field(
        None, ge=1, description="Tokens per packed micro-batch; unset: batch-size x seq-len."
    )
    epochs_per_batch: int = Field(
        1,
        ge=1,
        description="Passes over each batch.",
        json_schema_extra=_aliases("epochs_per_rollout_batch", "ppo_epochs"),
    )
    mini_batches: int = Field(1, ge=1, description="Optimizer steps per pass over a batch.")
    prefetch: bool = Field(True, description="Fetch batch n+1 while batch n trains.")
    logprob_chunk_tokens: int = Field(
        1024, ge=1, description="Tokens per chunk of the logprob head; bounds its memory."
    )


class ObjectiveOptions(BaseModel):
    """Advantages and loss."""

    loss_type: LossType = Field("grpo", description="The policy-gradient loss.")
    importance_sampling: Literal["clip", "truncated"] = Field(
        "clip",
        description="Correction for the age of the rollouts: PPO's pessimistic clip, or importance "
        "weights truncated at --tis-cap (keeps learning when batches are several steps old).",
    )
    clip_eps: float = Field(
        0.2,
        gt=0.0,
        description="Clip the probability ratio to [1-eps, 1+eps].",
        json_schema_extra=_aliases("cliprange"),
    )
    clip_eps_high: float | None = Field(
        None, gt=0.0, description="Another epsilon for the upper side; unset: --clip-eps."
    )
    dual_clip: float | None = Field(
        3.0, gt=1.0, description="Bound on the ratio where the advantage is negative; None: off."
    )
    tis_cap: float = Field(2.0, gt=0.0, description="Cap of truncated importance weights.")
    log_ratio_clamp: float = Field(20.0, gt=0.0, description="Log-ratios are clamped to this before exp.")
    loss_aggregation: Literal["token", "sequence", "constant"] = Field(
        "token",
        description="Average over all trained tokens of the step, over sequences of token means, "
        "or over sequences of token sums divided by --seq-len.",
    )
    advantage_norm: Literal["none", "group", "batch"] = Field(
        "group", description="Divide centred rewards by the std of the group, the batch, or not."
    )
    advantage_std: Literal["sample", "population"] = Field(
        "sample",
        description="sample: n-1 form plus 1e-4; population: n form with a floor of 1e-8.",
    )
    shuffle_advantages: bool = Field(
        False,
        description="Diagnostic control run: permute the advantages inside each batch. Such a run "
        "must not learn; if it does, the reward curve proves nothing.",
    )


class OptimizerOptions(BaseModel):
    """The optimizer and its schedule."""

    optimizer: Literal["adamw", "adamw_8bit", "adafactor"] = Field(
        "adamw_8bit", description="adamw_8bit needs bitsandbytes."
    )
    lr: float = Field(1e-5, ge=0.0, description="Learning rate.", json_schema_extra=_aliases("learning_rate"))
    adam_beta1: float = Field(0.9, ge=0.0, lt=1.0, description="First-moment decay.")
    adam_beta2: float = Field(0.999, ge=0.0, lt=1.0, description="Second-moment decay.")
    adam_eps: float = Field(1e-8, gt=0.0, description="Added to the root of the second moment.")
    weight_decay: float = Field(0.01, ge=0.0, description="Decoupled weight decay.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="How the rate falls to 0 after the warmup, over the run's optimizer steps."
    )
    warmup_steps: int = Field(0, ge=0, description="Linear warmup of the rate; 0 turns it off.")
    max_grad_norm: float = Field(1.0, ge=0.0, description="Clip the global gradient norm; 0 only measures it.")
    max_nonfinite_steps: int = Field(
        3, ge=1, description="Stop after this many steps in a row without a finite gradient."
    )


class PublishOptions(BaseModel):
    """How new weights reach the inference server."""

    weight_bridge_mode: BridgeMode = Field(
        "none", description="shared_vllm, lora_only, lora_restart, or none (checkpoint, restart)."
    )
    vllm_host: str = Field("127.0.0.1", description="Host of the vLLM server.")
    vllm_port: int = Field(9001, ge=1, le=65535, description="Port of the vLLM server.")
    vllm_config_path: str = Field(
        "auto",
        description="vllm_bridge_config.json of the server (shared_vllm); auto looks in "
        "$LOGDIR, at the server's /bridge/info and here.",
    )
    vllm_restart_interval: int = Field(3, ge=1, description="Publish every N steps (none, lora_restart, lora_only).")
    gpu_memory_utilization: float = Field(0.45, gt=0.0, le=1.0, description="vLLM's share of GPU memory.")
    vllm_gpu: int | None = Field(None, ge=0, description="GPU of vLLM; unset: the trainer's.")
    max_model_len: int = Field(4096, ge=1, description="Maximum context length of the server.")
    vllm_tensor_parallel_size: int = Field(1, ge=1, description="Tensor-parallel ranks of vLLM.")
    vllm_quantization: str | None = Field(None, description="Quantisation of the served model.")
    vllm_enable_sleep_mode: bool = Field(False, description="vLLM's sleep mode.")
    bridge_token: str | None = Field(
        None,
        description="Token for the server's state-changing routes; unset: the manifest's or $ATROPOS_BRIDGE_TOKEN.",
        repr=False,
    )
    drain_seconds: float = Field(
        0.5, ge=0.0, description="Time that running requests get to end under the old weights."
    )
    in_flight: Literal["drain", "recompute", "finish", "keep_kv"] = Field(
        "drain", description="What a publish does with requests that are running."
    )
    sync_budget: float = Field(
        0.2,
        gt=0.0,
        description="Publish less often while recomputed tokens exceed this share of those "
        "generated (forward from the masters only).",
    )
    overlap_publish: bool = Field(False, description="Publish beside the next batch's forward and backward.")
    keep_versions: int = Field(0, ge=0, description="Keep this many older policy versions for the alignment metrics.")
    alignment_sample_sequences: int = Field(
        16, ge=0, description="Sequences sampled per step to compare logprobs with older versions."
    )


class RunOptions(BaseModel):
    """Where the run lives and whom it talks to."""

    name: str = Field("grpo", min_length=1, description="Name of the run.")
    run_dir: Path | None = Field(
        None, description="Run directory; unset: runs/<name>-<time>. Holds metrics and checkpoints."
    )
    save_path: Path | None = Field(
        None,
        description="Checkpoint directory; unset: the run directory.",
        json_schema_extra=_aliases("save_dir"),
    )
    log_dir: Path | None = Field(None, description="Log directory; unset: logs in the run directory.")
    seed: int = Field(0, ge=0, description="Seed of everything random in the trainer.")
    checkpoint_interval: int = Field(3, ge=0, description="Checkpoint every N steps; 0: at the end only.")
    keep_last: int = Field(0, ge=0, description="Keep the last K checkpoints; 0 keeps all.")
    resume: str | None = Field(None, description="auto (newest checkpoint, if any) or the path of a checkpoint.")
    atropos_url: str = Field("http://localhost:8000", description="URL of the broker (run-api).")
    atropos_token: str | None = Field(None, description="Bearer token of the broker.", repr=False)
    max_staleness: int | None = Field(
        None, ge=0, description="Refuse rollouts older than this many steps; unset: the broker's."
    )
    wait_timeout: float = Field(600.0, gt=0.0, description="Seconds to wait for the broker or vLLM to come up.")
    batch_timeout: float = Field(3600.0, gt=0.0, description="Seconds to wait for environments to fill one batch.")
    trainer_rank: int = Field(0, ge=0, description="Rank of this trainer process.")
    world_size: int = Field(1, ge=1, description="Trainer processes.")
    init_method: str = Field("env://", description="How trainer processes find each other.")
    num_inference_nodes: int = Field(0, ge=0, description="Inference nodes; 0: this host.")


class TrackingOptions(BaseModel):
    """What is reported where; metrics.jsonl is always written."""

    use_wandb: bool = Field(False, description="Log to Weights & Biases.")
    wandb_project: str | None = Field(None, description="W&B project.")
    wandb_group: str | None = Field(None, description="W&B group; made from the name if unset.")
    wandb_run_name: str | None = Field(None, description="W&B run name; unset: --name.")
    benchmark: bool = Field(False, description="Log a summary of times and rates at the end.")


class TrainingConfig(
    TrackingOptions,
    RunOptions,
    PublishOptions,
    OptimizerOptions,
    ObjectiveOptions,
    BatchOptions,
    LoraOptions,
    ModelOptions,
    CourseOptions,
):
    """All settings of one trainer process, flat, validated together."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    @model_validator(mode="after")
    def _refuse_what_cannot_work(self) -> TrainingConfig:
        for refuse in (self._refuse_general, self._refuse_shared, self._refuse_lora):
            if reason := refuse():
                raise ValueError(reason)
        return self

    def _refuse_general(self) -> str | None:
        if self.dtype == "float16":
            return (
                "--dtype float16 cannot be trained: its gradients underflow without loss scaling; "
                "use --dtype bfloat16, or float32 on a CPU"
            )
        if self.world_size > 1:
            where = (
                "the served weights are one unsharded copy"
                if self.weight_bridge_mode == "shared_vllm"
                else "sharded training is not available yet"
            )
            return f"--world-size {self.world_size}: {where}; use --world-size 1"
        if self.trainer_rank >= self.world_size:
            return f"--trainer-rank {self.trainer_rank} must be below --world-size {self.world_size}"
        if self.master_weights == "none" and self.optimizer_steps_per_batch > 1:
            return (
                f"--master-weights none with {self.optimizer_steps_per_batch} optimizer steps per "
                "batch would change the served weights between publishes; use --master-weights fp32"
            )
        return self._refuse_forward_weights()

    def _refuse_forward_weights(self) -> str | None:
        needs_masters = self.overlap_publish or self.optimizer_steps_per_batch > 1
        if needs_masters and self.forward_weights == "views":
            cause = "--overlap-publish" if self.overlap_publish else "several steps per batch"
            return f"{cause} needs the forward to run from the masters; use --forward-weights masters or auto"
        if self.master_weights == "none" and (self.overlap_publish or self.forward_weights == "masters"):
            cause = "--overlap-publish" if self.overlap_publish else "--forward-weights masters"
            return f"{cause} needs master weights; use --master-weights fp32"
        return None

    def _refuse_shared(self) -> str | None:
        if self.weight_bridge_mode != "shared_vllm":
            return None
        for field, reason in SHARED_VLLM_REFUSES.items():
            value, works = getattr(self, field), type(self).model_fields[field].default
            if value != works:
                return f"shared_vllm refuses {_flag(field)} {value}: {reason}; leave it at {works}"
        return None

    def _refuse_lora(self) -> str | None:
        if self.weight_bridge_mode in LORA_MODES and self.train_layer_indices is not None:
            return (
                f"{self.weight_bridge_mode} refuses --train-layer-indices {self.train_layer_indices}: "
                "the base is frozen; use --lora-layer-indices"
            )
        return None

    @property
    def sequences_per_batch(self) -> int:
        """Sequences the broker is asked for per step."""
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def optimizer_steps_per_batch(self) -> int:
        return self.epochs_per_batch * self.mini_batches

    @property
    def micro_batch_tokens(self) -> int:
        """Token budget of one packed micro-batch."""
        return self.token_budget or self.batch_size * self.seq_len

    @property
    def publish_interval(self) -> int:
        """Steps between publishes, before `sync_budget` spaces them further."""
        return 1 if self.weight_bridge_mode == "shared_vllm" else self.vllm_restart_interval

    @property
    def forwards_from_masters(self) -> bool:
        """Whether the forward reads the masters and never the served tensors."""
        if self.weight_bridge_mode != "shared_vllm":
            return True
        if self.forward_weights == "auto":
            return self.overlap_publish or self.optimizer_steps_per_batch > 1
        return self.forward_weights == "masters"

    @property
    def required_run_dir(self) -> Path:
        """The run directory, once the command has settled it."""
        if self.run_dir is None:
            raise ValueError("run_dir is not settled; call cli.settle_run_dir first")
        return self.run_dir

    @property
    def checkpoint_root(self) -> Path:
        """Where `checkpoint-N/` directories are written."""
        return self.save_path or self.required_run_dir

    def warnings(self) -> list[str]:
        """Settings that work but are often a mistake, one sentence each."""
        full = self.weight_bridge_mode not in LORA_MODES
        if full and self.master_weights != "none" and self.lr > HIGH_FULL_FINE_TUNING_LR:
            text = (
                f"--lr {self.lr:g} is high for full fine-tuning with fp32 masters (rounded bf16 weights used to "
                f"hide that); large models do better at {HIGH_FULL_FINE_TUNING_LR:g} or below"
            )
            return [text]
        return []


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")
