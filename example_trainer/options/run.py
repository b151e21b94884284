"""Options of a run: its addresses, directories and checkpoints, and the reporting of its metrics.

They are part of `TrainingConfig`; importing this module loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, field_validator

from atropos_api.common.identity import Address
from atropos_api.common.option_flags import aliases
from atropos_api.common.secrets import SECRET
from example_trainer.monitoring.health import ANY_SIGN, parse_limits, sign_names

MOST_SERVERS = 512

LARGEST_SEED = 2**32 - 1
"""The largest seed that every library accepts."""


class RunOptions(BaseModel):
    """The run: its name, directories, connections and checkpoints."""

    name: str = Field("grpo", min_length=1, description="Name of the run.")
    run_dir: Path | None = Field(
        None, description="Run directory; unset: runs/<name>-<time>. Holds metrics and checkpoints."
    )
    save_path: Path | None = Field(
        None,
        description="Checkpoint directory; unset: the run directory.",
        json_schema_extra=aliases("save_dir"),
    )
    log_dir: Path | None = Field(None, description="Log directory; unset: logs in the run directory.")
    seed: int = Field(0, ge=0, le=LARGEST_SEED, description="Seed of everything random in the trainer.")
    checkpoint_interval: int = Field(3, ge=0, description="Checkpoint every N steps; 0: at the end only.")
    checkpoint_names: Literal["plain", "cs336"] = Field(
        "plain",
        description="cs336: links checkpoint_step_N and final_model beside checkpoint-N, as the course has them.",
    )
    save_batches: bool = Field(
        False,
        description="Keep each batch as it came, in rollouts/batch-N.atb of the run directory, for atropos replay.",
    )
    keep_last: int = Field(0, ge=0, description="Keep the last K checkpoints; 0 keeps all.")
    resume: str | None = Field(None, description="auto (newest checkpoint, if any) or the path of a checkpoint.")
    atropos_url: Address = Field("http://localhost:8000", description="URL of the broker (run-api).")
    atropos_token: str | None = Field(
        None,
        description="Bearer token of the broker; default: $ATROPOS_TOKEN.",
        repr=False,
        json_schema_extra=SECRET,
    )
    atropos_token_file: Path | None = Field(
        None,
        description="File with that token, read again when it is refused; default: $ATROPOS_TOKEN_FILE.",
        json_schema_extra=aliases("token_file"),
    )
    take_over: bool = Field(
        False, description="Begin although another trainer is at work at the broker: its run is closed."
    )
    max_staleness: int | None = Field(
        None, ge=0, description="Refuse rollouts older than this many steps; unset: the broker's."
    )
    wait_timeout: float = Field(600.0, gt=0.0, description="Seconds to wait for the broker or vLLM to come up.")
    batch_timeout: float = Field(3600.0, gt=0.0, description="Seconds to wait for environments to fill one batch.")
    trainer_rank: int = Field(0, ge=0, description="Rank of this trainer process.")
    world_size: int = Field(1, ge=1, description="Trainer processes.")
    init_method: str = Field("env://", description="How trainer processes find each other.")
    num_inference_nodes: int = Field(
        0,
        ge=0,
        le=MOST_SERVERS,
        description="Servers that each get the weights sent (shared_vllm); 0: one, on this host, which shares them. "
        "atropos-grpo-run starts them here, unless --vllm-host or --inference-urls says where they are.",
    )


class TrackingOptions(BaseModel):
    """The reporting of metrics; metrics.jsonl is always written."""

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
