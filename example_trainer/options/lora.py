"""Options of adapters.

Part of `TrainingConfig`; importing it loads no torch.
"""

from __future__ import annotations

from pydantic import BaseModel, Field


class LoraOptions(BaseModel):
    """Adapters, for the lora_only and lora_restart modes."""

    lora_r: int = Field(16, ge=1, description="LoRA rank.")
    lora_alpha: int = Field(32, ge=1, description="LoRA scaling factor.")
    lora_dropout: float = Field(0.05, ge=0.0, lt=1.0, description="LoRA dropout probability.")
    lora_target_modules: list[str] | None = Field(
        None, description="Modules that get an adapter; unset means q_proj v_proj."
    )
    lora_layer_indices: str | None = Field(None, description="Put adapters on these layers only: 20-31 or 0-3,28-31.")
