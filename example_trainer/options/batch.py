"""Options of a step's size and layout.

Part of `TrainingConfig`; importing it loads no torch.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from example_trainer.options.naming import aliases


class BatchOptions(BaseModel):
    """How much is trained per step and how it is laid out."""

    training_steps: int = Field(
        10,
        ge=1,
        description="Training steps; batch n is step n.",
        json_schema_extra=aliases("n_grpo_steps"),
    )
    batch_size: int = Field(
        2, ge=1, description="Micro-batch size in sequences.", json_schema_extra=aliases("mini_batch_size")
    )
    gradient_accumulation_steps: int = Field(
        32, ge=1, description="Micro-batches per step: a step trains batch-size times this."
    )
    seq_len: int = Field(
        2048,
        ge=2,
        description="Maximum sequence length in tokens. A longer one keeps its place in the group's baseline and is "
        "counted; --overlong says what else.",
    )
    overlong: Literal["drop", "mask"] = Field(
        "drop",
        description="What becomes of a sequence longer than --seq-len: it is not trained on, or it is as far as that.",
    )
    pad_to: int | None = Field(
        None,
        ge=1,
        description="Lay sequences out as rows padded to a multiple of this (64 in the published trainer), for models "
        "that cannot pack; unset: packed where the model computes that right.",
    )
    token_budget: int | None = Field(
        None, ge=1, description="Tokens per packed micro-batch; unset: batch-size x seq-len."
    )
    epochs_per_batch: int = Field(
        1,
        ge=1,
        description="Passes over each batch.",
        json_schema_extra=aliases("epochs_per_rollout_batch", "ppo_epochs"),
    )
    mini_batches: int = Field(1, ge=1, description="Optimizer steps per pass over a batch.")
    reshard_after_forward: bool = Field(
        True,
        description="With several ranks: let go of a layer's gathered weights between forward and backward; less "
        "memory, one more gathering.",
    )
    prefetch: bool = Field(True, description="Fetch batch n+1 while batch n trains.")
    logprob_chunk_tokens: int = Field(
        1024, ge=1, description="Tokens per chunk of the logprob head; bounds its memory."
    )
