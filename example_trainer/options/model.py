"""Options of the policy: which model, in which precision, where its masters live.

Part of `TrainingConfig`; importing it loads no torch.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from example_trainer.options.naming import aliases


class ModelOptions(BaseModel):
    """Which model is trained, in which precision, where."""

    model_name: str = Field(
        description="Hugging Face model id or local directory.",
        json_schema_extra=aliases("model", "model_path"),
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
        "memory, or none (update the served weights themselves, in bf16 with stochastic rounding: a true single copy).",
    )
    forward_weights: Literal["auto", "views", "masters"] = Field(
        "auto",
        description="What the forward reads in shared_vllm mode: the served tensors (views) or the "
        "fp32 masters. auto: masters when publishes overlap or a batch has several steps.",
    )
    train_layer_indices: str | None = Field(
        None, description="Train these layers only, full weights: 20-31, 0-3,28-31, top-25% or last-12."
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward: less memory, about a third more time."
    )
    debug_loading: bool = Field(False, description="Log each tensor while the model is loaded.")
