"""Options of the policy (model, precision, place of the masters), adapters, a step's size, and the optimizer.

They are part of `TrainingConfig`; importing this module loads no torch.
"""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import BaseModel, Field, field_validator

from atropos_api.common.option_flags import aliases
from example_trainer.options.objective import IMPORT_PATH, refuse_file

Kernels = Literal["auto", "liger", "compile", "eager"]
OptimizerName = Literal["adamw", "adamw_8bit", "adafactor"]

LOGIT_CHANGES: tuple[tuple[str, float | None], ...] = (
    ("final_logit_softcapping", None),
    ("lm_head_multiplier", 1.0),
    ("logit_scale", 1.0),
    ("logits_scaling", 1.0),
    ("logits_soft_cap", None),
    ("output_logit_soft_cap", None),
)
"""Fields of a model's configuration that change its logits after the head, each with the value without effect."""


class LoadingOptions(BaseModel):
    """The model, its precision and its device."""

    model_name: str = Field(
        description="Hugging Face model id or local directory.",
        json_schema_extra=aliases("model", "model_path"),
    )
    dtype: Literal["bfloat16", "float16", "float32", "auto"] = Field(
        "bfloat16",
        description="Dtype in which the model computes, and in which a server holds its weights; auto takes the "
        "checkpoint's. float16 is trained with a dynamic loss scale, from fp32 masters.",
    )
    device: str = Field("auto", description="cpu, cuda, cuda:N, or auto (cuda when there is one).")
    torch_threads: int | None = Field(
        None, ge=1, description="CPU threads of torch in the trainer; unset leaves torch's choice."
    )
    master_weights: Literal["fp32", "host", "none"] = Field(
        "fp32",
        description="Place of the optimizer's weights: fp32 on the model's device, fp32 in host "
        "memory, or none (the optimizer updates the model's own weights, in bf16 with stochastic rounding).",
    )
    train_layer_indices: str | None = Field(
        None, description="Train these layers only, full weights: 20-31, 0-3,28-31, top-25% or last-12."
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward: less memory, about a third more time."
    )
    activation_offloading: bool = Field(
        False,
        description="Keep the inputs of the layers in host memory until the backward, beside --gradient-checkpointing "
        "on a GPU: for sequences whose inputs alone do not fit.",
    )
    kernels: Kernels = Field(
        "auto",
        description="Kernels of the learner's norms, rotary positions, SwiGLU, head and clip: eager (each operation "
        "alone), compile (torch.compile, needs a C++ compiler) or liger (pip install liger-kernel). auto: compile on a "
        "GPU if it computes the same there, else eager.",
    )
    debug_loading: bool = Field(False, description="Log each tensor while the model is loaded.")


class FitOptions(BaseModel):
    """The check of the GPU's memory."""

    fit: Literal["check", "auto", "off"] = Field(
        "check",
        description="Before anything is loaded: check refuses a run that does not fit the GPU and names flags that do, "
        "auto sets them, off does neither (docs/reference/memory.md).",
    )
    gpu_memory_gb: float | None = Field(
        None, gt=0.0, description="GPU memory in GB (10^9 bytes) that --fit counts with; unset: the GPU's own."
    )


class ModelOptions(FitOptions, LoadingOptions):
    """The model and the weights that the forward reads."""

    forward_weights: Literal["auto", "views", "masters"] = Field(
        "auto",
        description="Weights that the forward reads in shared_vllm mode: the served tensors (views) or the "
        "fp32 masters. auto: masters when publishes overlap or a batch has several steps.",
    )


class LoraOptions(BaseModel):
    """Adapters, for the lora_only and lora_restart modes."""

    lora_r: int = Field(16, ge=1, description="LoRA rank.")
    lora_alpha: int = Field(32, ge=1, description="LoRA scaling factor: the adapter is multiplied by alpha / r.")
    lora_dropout: float = Field(
        0.05,
        ge=0.0,
        lt=1.0,
        description="LoRA dropout probability, in forwards with gradients only. Where a server samples, it uses no "
        "dropout, so ratios at staleness 0 are exactly 1 only if this is 0.",
    )
    lora_target_modules: list[str] | None = Field(
        None,
        description="Modules that get an adapter, by name (q_proj v_proj), or a preset: attention, mlp, all-linear. "
        "Unset means q_proj v_proj.",
    )
    lora_layer_indices: str | None = Field(
        None, description="Put adapters on these layers only: 20-31, 0-3,28-31, top-25% or last-12."
    )
    load_in_4bit: bool = Field(
        False,
        description="QLoRA: hold the frozen base in 4 bits (nf4, by bitsandbytes) under the adapter; the server of "
        "atropos-grpo loads the values that it computes with, from served/base in the run directory.",
    )


class MicroBatchOptions(BaseModel):
    """The micro-batches of a step, and the layout of sequences in them."""

    batch_size: int = Field(
        2,
        ge=1,
        description="Micro-batch size in sequences.",
        json_schema_extra=aliases("mini_batch_size", "per_device_train_batch_size"),
    )
    gradient_accumulation_steps: int = Field(
        32, ge=1, description="Micro-batches per step: a step trains batch-size times this."
    )
    pad_to: int | None = Field(
        None,
        ge=1,
        description="Pad sequences to rows of a multiple of this length (64 in the published trainer), for models "
        "that cannot pack; unset: pack them if the model computes packed rows correctly.",
    )
    token_budget: int | None = Field(
        None, ge=1, description="Tokens per packed micro-batch; unset: batch-size x seq-len."
    )
    reshard_after_forward: bool = Field(
        True,
        description="With several ranks: free a layer's gathered weights between forward and backward; this takes less "
        "memory and one more all-gather.",
    )
    logprob_chunk_tokens: int = Field(
        1024, ge=1, description="Tokens per chunk of the logprob head; bounds its memory."
    )


class BatchOptions(MicroBatchOptions):
    """The number and size of training steps."""

    training_steps: int = Field(
        10,
        ge=1,
        description="Training steps; batch n is step n.",
        json_schema_extra=aliases("n_grpo_steps", "max_steps"),
    )
    seq_len: int = Field(
        2048,
        ge=2,
        description="Maximum sequence length in tokens. A longer sequence still counts in its group's baseline; "
        "--overlong decides if it is trained.",
    )
    overlong: Literal["drop", "mask"] = Field(
        "drop",
        description="Treatment of a sequence longer than --seq-len: drop does not train on it, mask trains on its "
        "first --seq-len tokens.",
    )
    unusable_groups: Literal["stop", "leave_out"] = Field(
        "stop",
        description="Treatment of a group that cannot be trained (no logprobs of its tokens, ids that the policy does "
        "not have): stop ends the run, leave_out goes on without it.",
    )
    epochs_per_batch: int = Field(
        1,
        ge=1,
        description="Passes over each batch.",
        json_schema_extra=aliases("epochs_per_rollout_batch", "ppo_epochs", "num_iterations"),
    )
    mini_batches: int = Field(1, ge=1, description="Optimizer steps per pass over a batch.")
    prefetch: bool = Field(True, description="Fetch batch n+1 while batch n trains.")


class OptimizerOptions(BaseModel):
    """The optimizer and its schedule."""

    optimizer: OptimizerName | str = Field(
        "adamw_8bit",
        description="adamw_8bit needs bitsandbytes. adafactor has an absolute rate and no --adam-* settings. "
        "package.module:function is an optimizer of your own. bf16 with stochastic rounding: any of them with "
        "--master-weights none.",
    )
    lr: float = Field(1e-5, ge=0.0, description="Learning rate.", json_schema_extra=aliases("learning_rate"))
    adam_beta1: float = Field(0.9, ge=0.0, lt=1.0, description="First-moment decay.")
    adam_beta2: float = Field(0.999, ge=0.0, lt=1.0, description="Second-moment decay.")
    adam_eps: float = Field(1e-8, gt=0.0, description="Added to the root of the second moment.")
    weight_decay: float = Field(
        0.01, ge=0.0, description="Decoupled weight decay; applies to matrices, not to norms and biases."
    )
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="Schedule of the rate after the warmup: linear and cosine would reach 0 one step after the run's "
        "last. Steps that are skipped for want of a signal do not count, so with some the rate ends higher.",
        json_schema_extra=aliases("lr_scheduler_type"),
    )
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warmup of the rate; 0 turns it off.")
    max_grad_norm: float = Field(1.0, ge=0.0, description="Clip the global gradient norm to this; 0 only measures it.")
    max_nonfinite_steps: int = Field(
        3, ge=1, description="Stop after this many steps in a row without a finite gradient."
    )

    @field_validator("optimizer")
    @classmethod
    def _check_optimizer(cls, value: str) -> str:
        refuse_file(value)
        known = get_args(OptimizerName)
        if value in known or IMPORT_PATH.fullmatch(value):
            return value
        raise ValueError(f"{value} is not an optimizer; use one of {', '.join(known)}, or package.module:function")
