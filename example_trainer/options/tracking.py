"""Options of what is reported where.

Part of `TrainingConfig`; importing it loads no torch.
"""

from __future__ import annotations

from pydantic import BaseModel, Field


class TrackingOptions(BaseModel):
    """What is reported where; metrics.jsonl is always written."""

    use_wandb: bool = Field(False, description="Log to Weights & Biases.")
    wandb_project: str | None = Field(None, description="W&B project.")
    wandb_group: str | None = Field(None, description="W&B group; made from the name if unset.")
    wandb_run_name: str | None = Field(None, description="W&B run name; unset: --name.")
    benchmark: bool = Field(False, description="Log a summary of times and rates at the end.")
