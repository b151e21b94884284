"""Options of the optimizer and its schedule.

Part of `TrainingConfig`; importing it loads no torch.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from example_trainer.options.naming import aliases


class OptimizerOptions(BaseModel):
    """The optimizer and its schedule."""

    optimizer: Literal["adamw", "adamw_8bit", "adafactor"] = Field(
        "adamw_8bit",
        description="adamw_8bit needs bitsandbytes. adafactor has an absolute rate and no --adam-* settings. bf16 with "
        "stochastic rounding: any of them with --master-weights none.",
    )
    lr: float = Field(1e-5, ge=0.0, description="Learning rate.", json_schema_extra=aliases("learning_rate"))
    adam_beta1: float = Field(0.9, ge=0.0, lt=1.0, description="First-moment decay.")
    adam_beta2: float = Field(0.999, ge=0.0, lt=1.0, description="Second-moment decay.")
    adam_eps: float = Field(1e-8, gt=0.0, description="Added to the root of the second moment.")
    weight_decay: float = Field(
        0.01, ge=0.0, description="Decoupled weight decay; of matrices, not of norms and biases."
    )
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="How the rate falls to 0 after the warmup, over the run's optimizer steps."
    )
    warmup_steps: int = Field(0, ge=0, description="Linear warmup of the rate; 0 turns it off.")
    max_grad_norm: float = Field(1.0, ge=0.0, description="Clip the global gradient norm; 0 only measures it.")
    max_nonfinite_steps: int = Field(
        3, ge=1, description="Stop after this many steps in a row without a finite gradient."
    )
