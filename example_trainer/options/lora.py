"""Options of adapters.

Part of `TrainingConfig`; importing it loads no torch.
"""

from __future__ import annotations

from pydantic import BaseModel, Field


class LoraOptions(BaseModel):
    """Adapters, for the lora_only and lora_restart modes."""

    lora_r: int = Field(16, ge=1, description="LoRA rank.")
    lora_alpha: int = Field(32, ge=1, description="LoRA scaling factor; the adapter counts alpha / r times.")
    lora_dropout: float = Field(
        0.05,
        ge=0.0,
        lt=1.0,
        description="LoRA dropout probability, in forwards with gradients only. The sampler has none, so ratios are "
        "exactly 1 at staleness 0 only with 0.",
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
        False, description="QLoRA: hold the frozen base in 4 bits (nf4, by bitsandbytes) under the adapter."
    )
