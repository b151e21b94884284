"""`TrainingOptions`: all sections of the trainer's options in one flat model, and the values derived from them.

`RunOptions` (addresses, directories, checkpoints), `LoggingOptions` (reporting of metrics), `TrackingOptions` (signs of
trouble) and `ObservabilityOptions` are defined here.

`conflicts.py` checks these options; `config.TrainingConfig` is this model with that check. It loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from atropos_api.common.files import named_path
from atropos_api.common.identity import Address, host_in_url, is_this_host
from atropos_api.common.observability import LogForm, MetricsHost, MetricsPort, TracesEndpoint
from atropos_api.common.option_flags import aliases
from atropos_api.common.secrets import SECRET
from example_trainer.monitoring.health import ANY_SIGN, parse_limits, sign_names
from example_trainer.options.model import BatchOptions, LoraOptions, ModelOptions, OptimizerOptions
from example_trainer.options.objective import ObjectiveOptions
from example_trainer.options.presets import CourseOptions, PresetOptions
from example_trainer.options.publish import SYNC_CHECKS, PublishOptions, versions_kept
from example_trainer.options.without_effect import settings_without_effect

MOST_SERVERS = 512
LARGEST_SEED = 2**32 - 1
"""The largest seed that every library accepts."""


class ProcessOptions(BaseModel):
    """The trainer processes of a run."""

    trainer_rank: int = Field(0, ge=0, description="Rank of this trainer process.")
    world_size: int = Field(1, ge=1, description="Number of trainer processes.")
    init_method: str = Field(
        "env://", description="Address at which the trainer processes meet, as torch.distributed takes it."
    )


class RunOptions(ProcessOptions):
    """The run: its name, directories, connections and checkpoints."""

    name: str = Field("grpo", min_length=1, description="Name of the run.")
    run_dir: Path | None = Field(
        None,
        description="Run directory; unset: runs/<name>-<time>. Holds metrics and checkpoints.",
        json_schema_extra=aliases("output_dir"),
    )
    save_path: Path | None = Field(
        None,
        description="Checkpoint directory; unset: the run directory.",
        json_schema_extra=aliases("save_dir"),
    )
    log_dir: Path | None = Field(None, description="Log directory; unset: logs in the run directory.")
    seed: int = Field(0, ge=0, le=LARGEST_SEED, description="Seed of everything random in the trainer.")
    checkpoint_interval: int = Field(
        3, ge=0, description="Checkpoint every N steps; 0: at the end only.", json_schema_extra=aliases("save_steps")
    )
    checkpoint_names: Literal["plain", "cs336"] = Field(
        "plain",
        description="cs336: also link the checkpoints as checkpoint_step_N and final_model, the course's names.",
    )
    save_batches: bool = Field(
        False,
        description="Save each received batch as rollouts/batch-N.atb in the run directory, for atropos replay.",
    )
    recorded_tokens: int = Field(
        16_384,
        ge=0,
        description="Trained tokens of each step whose values the page shows and trained.jsonl has; 0: none.",
    )
    keep_last: int = Field(
        0, ge=0, description="Keep the last K checkpoints; 0 keeps all.", json_schema_extra=aliases("save_total_limit")
    )
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
    take_over: bool = Field(False, description="Begin even if another trainer uses the broker; its run is closed.")
    policy: str = Field(
        "default", min_length=1, max_length=200, description="Policy that the run trains, among those at the broker."
    )
    max_staleness: int | None = Field(
        None, ge=0, description="Refuse rollouts older than this many steps; unset: the broker's."
    )
    wait_timeout: float = Field(600.0, gt=0.0, description="Seconds to wait for the broker or vLLM to come up.")
    batch_timeout: float = Field(3600.0, gt=0.0, description="Seconds to wait for environments to fill one batch.")
    trainer_tensor_parallel_size: int = Field(
        1,
        ge=1,
        description="Number of trainer processes that divide each layer (tensor parallelism) and train the same rows; "
        "--world-size is a multiple of it.",
        json_schema_extra=aliases("actor_tp_size"),
    )
    num_inference_nodes: int = Field(
        0,
        ge=0,
        le=MOST_SERVERS,
        description="Number of servers that the weights (shared_vllm) or adapters (lora_only) are sent to; 0: one "
        "server on this host. In shared_vllm atropos-grpo-run starts them here unless --vllm-host names another host "
        "or --inference-urls is set; in lora_only they run already. With --registered-servers: number that the run "
        "waits for before its first publish, one at least; atropos-grpo-run starts them here.",
    )

    _find_directories = field_validator("run_dir", "save_path", "log_dir", "resume", mode="before")(named_path)


class LoggingOptions(BaseModel):
    """The reporting of metrics; metrics.jsonl is always written."""

    use_wandb: bool = Field(False, description="Log to Weights & Biases; --wandb-project does so too.")
    wandb_project: str | None = Field(None, description="W&B project.")
    wandb_group: str | None = Field(None, description="W&B group; unset: derived from --name.")
    wandb_run_name: str | None = Field(None, description="W&B run name; unset: --name.")
    use_trackio: bool = Field(
        False, description="Log to Trackio, on this machine or to the Space of $TRACKIO_SPACE_ID; needs trackio."
    )
    tensorboard: bool = Field(False, description="Write TensorBoard event files into the run directory.")
    benchmark: bool = Field(False, description="Log a summary of times and rates at the end.")

    @model_validator(mode="before")
    @classmethod
    def _log_to_a_named_project(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or not values.get("wandb_project"):
            return values
        return {"use_wandb": True, **values}


class TrackingOptions(LoggingOptions):
    """The signs of trouble that are watched for."""

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

    @field_validator("stop_on")
    @classmethod
    def _check_signs(cls, value: list[str] | None) -> list[str] | None:
        known = [ANY_SIGN, *sign_names()]
        for name in value or ():
            if name not in known:
                raise ValueError(f"{name} is not a health sign; use one of {', '.join(known)}")
        return value

    @field_validator("health_limits", mode="before")
    @classmethod
    def _take_mapping(cls, value: object) -> object:
        return [f"{name}={limit}" for name, limit in value.items()] if isinstance(value, Mapping) else value

    @field_validator("health_limits")
    @classmethod
    def _check_limits(cls, value: list[str] | None) -> list[str] | None:
        parse_limits(value or ())
        return value


class ObservabilityOptions(BaseModel):
    """The observation of the process: logs, traces, metrics for Prometheus."""

    log_format: LogForm = "text"
    metrics_port: MetricsPort = None
    metrics_host: MetricsHost = "127.0.0.1"
    otlp_traces_endpoint: TracesEndpoint = None


USUAL_LR_OF_LARGE_MODELS = 6e-6


class TrainingOptions(
    PresetOptions,
    CourseOptions,
    ObservabilityOptions,
    TrackingOptions,
    RunOptions,
    PublishOptions,
    OptimizerOptions,
    ObjectiveOptions,
    BatchOptions,
    LoraOptions,
    ModelOptions,
):
    """All options of one trainer process, flat: combinations that cannot work are not refused yet.

    Base classes are in the order in which they process the given values; options are listed in the reverse order.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    @property
    def sequences_per_batch(self) -> int:
        """Number of sequences requested from the broker per step."""
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def optimizer_steps_per_batch(self) -> int:
        return self.epochs_per_batch * self.mini_batches

    @property
    def micro_batch_tokens(self) -> int:
        """Token budget of one packed micro-batch."""
        return self.token_budget or self.batch_size * self.seq_len

    @property
    def aggregation_length(self) -> int:
        """The number of tokens by which `--loss-aggregation constant` divides a sequence's sum."""
        return self.max_response_tokens or self.seq_len

    @property
    def broadcasts(self) -> bool:
        """True if weights are sent to several servers, which share no memory with the trainer."""
        return self.mode.shares_memory and (self.num_inference_nodes > 0 or self.registered_servers)

    @property
    def servers_outlive_publish(self) -> bool:
        """True if servers take one publish after the other, so that the trainer starts none of its own."""
        return self.mode.server_outlives_publish or self.registered_servers

    @property
    def server_urls(self) -> tuple[str, ...]:
        """The addresses of the servers of `--num-inference-nodes`, or of the one at `--vllm-port`; none if they are the
        broker's.
        """
        if self.registered_servers:
            return ()
        count = max(1, self.num_inference_nodes)
        host, ports = host_in_url(self.vllm_host), range(self.vllm_port, self.vllm_port + count)
        given = self.inference_urls or (f"http://{host}:{port}" for port in ports)
        return tuple(url.rstrip("/") for url in given)  # environments get them with /v1 added

    @property
    def local_servers(self) -> int:
        """Number of the policy's servers that run here: those that no setting says to run elsewhere."""
        if self.registered_servers:
            return 0 if self.start_vllm == "never" else max(1, self.num_inference_nodes)
        if self.uses_remote_server:
            return 0
        return self.num_inference_nodes if self.broadcasts else 1

    @property
    def uses_remote_server(self) -> bool:
        """True if the one server is on another machine, which `lora_only` alone allows; it must run already."""
        is_addressed = not self.registered_servers and not self.num_inference_nodes
        return self.mode.starts_missing_server and is_addressed and not is_this_host(self.vllm_host)

    @property
    def may_start_server(self) -> bool:
        """True if the trainer starts a server of its own: always, or in `lora_only` if none answers."""
        if not self.servers_outlive_publish:
            return True
        starts_missing = self.mode.starts_missing_server and self.start_vllm == "auto"
        is_addressed = bool(self.num_inference_nodes) or self.registered_servers or self.uses_remote_server
        return starts_missing and not is_addressed

    @property
    def serves_here(self) -> bool:
        """True if the inference servers are on this host."""
        addressed = is_this_host(self.vllm_host) and not self.inference_urls
        return self.shares_memory or (addressed and self.local_servers > 0)

    @property
    def shares_memory(self) -> bool:
        """True if the served weights are one copy, in memory that trainer and server both map."""
        return self.mode.shares_memory and not self.broadcasts

    @property
    def trains_adapter(self) -> bool:
        """True if an adapter on a frozen base is trained, not the weights themselves."""
        return self.mode.trains_adapter

    @property
    def served_adapters(self) -> int:
        """Number of adapters that a server keeps: one, if a publish replaces the server."""
        return versions_kept(self.max_staleness) if self.mode.server_outlives_publish else 1

    @property
    def publish_interval(self) -> int:
        """Number of steps between publishes, which `sync_budget` may increase."""
        is_set = self.mode.interval_if_set and "vllm_restart_interval" in self.model_fields_set
        return self.vllm_restart_interval if is_set or not self.mode.server_outlives_publish else 1

    @property
    def sync_check_every(self) -> int | None:
        """Number of publishes per logprob parity check; 0: the first to each server only; None: by its duration."""
        # A check of sharded weights gathers a whole model while optimizer states and vLLM take memory too.
        is_sharded = self.world_size > 1 and not self.trains_adapter
        if self.sync_check == "auto" and (self.overlap_publish or is_sharded):
            return 0
        return SYNC_CHECKS[self.sync_check] if self.sync_check in SYNC_CHECKS else int(self.sync_check)

    @property
    def forwards_from_masters(self) -> bool:
        """True if the forward reads the masters and never the served tensors."""
        if not self.shares_memory:
            return True
        if self.forward_weights == "auto":
            return self.overlap_publish or self.optimizer_steps_per_batch > 1
        return self.forward_weights == "masters"

    @property
    def steps_served_weights(self) -> bool:
        """True if the optimizer steps the same tensors that the server reads, so that a step is part of a publish."""
        return self.shares_memory and self.master_weights == "none"

    @property
    def required_run_dir(self) -> Path:
        """The run directory; raises if the command has not set it yet."""
        if self.run_dir is None:
            raise ValueError("run_dir is not set; call cli.settle_run_dir first")
        return self.run_dir

    @property
    def checkpoint_root(self) -> Path:
        """The directory in which `checkpoint-N/` directories are written."""
        return self.save_path or self.required_run_dir

    def warnings(self) -> list[str]:
        """Return a sentence for each setting that has no effect in this mode, or is valid but often a mistake."""
        idle = settings_without_effect(self)
        full = not self.trains_adapter
        # No warning at the documented default: a warning in every log would be ignored.
        if full and self.master_weights != "none" and self.lr > type(self).model_fields["lr"].default:
            text = (
                f"--lr {self.lr:g} is high for full fine-tuning with fp32 masters (rounded bf16 weights used to "
                f"hide that); large models do better at {USUAL_LR_OF_LARGE_MODELS:g} or below"
            )
            return [*idle, text]
        return idle
