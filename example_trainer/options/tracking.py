"""Options of what is reported where.

Part of `TrainingConfig`; importing it loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, Field, field_validator

from example_trainer.running.health import ANY_SIGN, parse_limits, sign_names


class TrackingOptions(BaseModel):
    """What is reported where; metrics.jsonl is always written."""

    use_wandb: bool = Field(False, description="Log to Weights & Biases.")
    wandb_project: str | None = Field(None, description="W&B project.")
    wandb_group: str | None = Field(None, description="W&B group; made from the name if unset.")
    wandb_run_name: str | None = Field(None, description="W&B run name; unset: --name.")
    tensorboard: bool = Field(False, description="Write TensorBoard event files into the run directory.")
    stop_on: list[str] | None = Field(
        None,
        description="End the run, with a checkpoint and exit code 3, when a sign of trouble appears: health for any, "
        "or the names of some (docs/reference/metrics.md lists them).",
    )
    health_limits: list[str] | None = Field(
        None,
        description="Other limits of those signs, as name=value: mean_ratio=0.7-1.3 kl=2 reward_drop=inf "
        "(docs/reference/metrics.md lists them); a mapping in a file.",
    )
    benchmark: bool = Field(False, description="Log a summary of times and rates at the end.")

    @field_validator("stop_on")
    @classmethod
    def _know_the_signs(cls, value: list[str] | None) -> list[str] | None:
        known = [ANY_SIGN, *sign_names()]
        for name in value or ():
            if name not in known:
                raise ValueError(f"{name} is no sign; there are {', '.join(known)}")
        return value

    @field_validator("health_limits", mode="before")
    @classmethod
    def _take_mapping(cls, value: object) -> object:
        return [f"{name}={limit}" for name, limit in value.items()] if isinstance(value, Mapping) else value

    @field_validator("health_limits")
    @classmethod
    def _know_the_limits(cls, value: list[str] | None) -> list[str] | None:
        parse_limits(value or ())
        return value
