"""Settings models: they configure an environment server, the inference servers it samples from and its sessions.

The names and defaults of the original Atropos environments are kept; our own fields come at the end. Importing this
module loads neither a tokenizer nor an HTTP library.

`slurm_servers` (`--slurm`) finds the inference servers of a Slurm job: `SLURM_JOB_NODELIST` names the nodes, the first
`NUM_TRAINING_NODES` of them train, and each of the others runs as many servers as fit its eight GPUs with `INFER_TP`
GPUs each, on the ports from 9000 on.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from atropos_api.common.cliconfig import ConfigError
from atropos_api.common.files import named_path
from atropos_api.common.identity import require_address
from atropos_api.common.observability import LogForm, MetricsHost, MetricsPort, TracesEndpoint
from atropos_api.common.secrets import SECRET
from atropos_api.wire.groups import MOST_MASK_TOKENS

ServerType = Literal["openai", "trl", "sglang", "vllm"]

LateMembers = Literal["wait", "redraw", "close"]

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


def _address_or_none_yet(url: str) -> str:
    return require_address(url) if url else url


Address = Annotated[str, AfterValidator(_address_or_none_yet)]


def _json_object(text: str, info: ValidationInfo) -> str:
    if not isinstance(json.loads(text), dict):
        raise ValueError(f"{info.field_name} must be a JSON object")  # noqa: TRY004 - pydantic reports ValueError
    return text


JsonObject = Annotated[str, AfterValidator(_json_object)]


class EvalHandlingEnum(StrEnum):
    """Choice of what happens to training rollouts during an evaluation: stop them, limit them or leave them alone."""

    STOP_TRAIN = "STOP_TRAIN"
    LIMIT_TRAIN = "LIMIT_TRAIN"
    NONE = "NONE"


_SAMPLING = "this environment has no such setting: its code samples, at temperature 1 unless it says otherwise"
_LONGEST_ANSWER = "use --env.max-new-tokens where the environment has it, else --env.max-token-length"

NAMES_ELSEWHERE: Mapping[str, str] = {
    "max_completion_length": _LONGEST_ANSWER,
    "max_completion_tokens": _LONGEST_ANSWER,
    "max_concurrent": "use --env.max-num-workers, in groups",
    "max_new_tokens": "this environment has --env.max-token-length alone",
    "max_response_length": _LONGEST_ANSWER,
    "max_tokens": _LONGEST_ANSWER,
    "num_generations": "use --env.group-size",
    "reward_functions": "use --env.reward, of dataset_server.py",
    "reward_funcs": "use --env.reward, of dataset_server.py",
    "rollouts_per_example": "use --env.group-size",
    "temperature": _SAMPLING,
    "top_k": _SAMPLING,
    "top_p": _SAMPLING,
}
"""Settings of TRL, verl and verifiers that are unknown here, each with the sentence that their error line gets."""


class BaseEnvConfig(BaseModel):
    """Settings of every environment: each is set with `--env.<field>`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())
    names_elsewhere: ClassVar[Mapping[str, str]] = NAMES_ELSEWHERE

    group_size: int = Field(4, ge=1, description="Rollouts of one item.")
    max_num_workers: int = Field(-1, description="Groups collected at once; -1: max_num_workers_per_node x servers.")
    max_eval_workers: int = Field(16, ge=1, description="Evaluation workers at once, where an environment uses it.")
    max_num_workers_per_node: int = Field(8, ge=1, description="Groups collected at once for each server.")
    steps_per_eval: int = Field(100, description="Trainer steps from one evaluation to the next; 0: none.")
    max_token_length: int = Field(2048, ge=1, description="Longest generation; also registered with the broker.")
    eval_handling: EvalHandlingEnum = Field(
        EvalHandlingEnum.STOP_TRAIN,
        description="Training rollouts during an evaluation: STOP_TRAIN begins none, LIMIT_TRAIN keeps "
        "eval_limit_ratio of the workers at them, NONE goes on as before.",
    )
    eval_limit_ratio: float = Field(
        0.5, gt=0, le=1, description="Share of the workers that collect groups under LIMIT_TRAIN."
    )
    inference_weight: float = Field(1.0, gt=0, description="Weight of this environment's share of a batch.")
    batch_size: int = Field(-1, description="Sequences in a batch; the broker's value replaces it.")
    max_batches_offpolicy: int = Field(3, ge=1, description="Batches that may be in collection or in the queue.")
    tokenizer_name: str | None = Field(
        None, description="Name or folder of the model's tokenizer; default: that of the model the server serves."
    )
    use_wandb: bool = Field(True, description="Log to Weights & Biases, if it is installed.")
    use_trackio: bool = Field(False, description="Log to Trackio; needs trackio.")
    trackio_name: str | None = Field(
        None, description="Name of the run in Trackio, which is continued if there is one; default: with the date."
    )
    rollout_server_url: Address = Field("http://localhost:8000", description="Address of the broker (run-api).")
    total_steps: int = Field(1000, description="Groups that `process` collects.")
    wandb_name: str | None = Field(None, description="Name in the broker and in W&B; default: the environment's own.")
    num_rollouts_to_keep: int = Field(32, ge=0, description="Groups kept for the rollout table.")
    num_rollouts_per_group_for_logging: int = Field(1, description="Rollouts a group in that table; -1: all.")
    ensure_scores_are_not_same: bool = Field(True, description="Drop groups whose scores are all equal.")
    data_path_to_save_groups: str | None = Field(None, description="JSON lines file that every group is appended to.")
    data_dir_to_save_evals: str | None = Field(
        None, description="Folder for metrics.json, samples.jsonl and samples.html."
    )
    min_items_sent_before_logging: int = Field(2, ge=1, description="Groups sent before metrics are logged.")
    include_messages: bool = Field(False, description="Send each rollout's messages with its tokens.")
    min_batch_allocation: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Least share of a batch."
    )
    worker_timeout: float = Field(600, description="Time limit of a rollout in seconds; -1: none.")
    thinking_mode: bool = Field(False, description="Ask chat providers for reasoning.")
    reasoning_effort: ReasoningEffort | None = Field(
        None, description="Amount of reasoning to request; enables thinking_mode."
    )
    max_reasoning_tokens: Annotated[int, Field(ge=1024, le=32000)] | None = Field(
        None, description="The same as a number of tokens; reasoning_effort takes precedence."
    )
    custom_thinking_prompt: str | None = Field(None, description="Prompt for reasoning, in environments that read it.")
    # Fields that the original Atropos does not have.
    group_size_schedule: str = Field(
        "", description="Group sizes by trainer step, as 0:8,100:4; from each step on, its size replaces group_size."
    )
    groups_to_keep: int = Field(
        0,
        ge=0,
        description="Newest groups to keep in the file while serving, with their texts; 0: all, as sent.",
    )
    tool_parser: str = Field("hermes", description="Format of tool calls: hermes, json or a vLLM parser's name.")
    server: str | None = Field(
        None,
        description="In a run file: the environment it is for; others ignore keys that they do not know.",
    )
    rollout_server_token: str | None = Field(
        None, description="Bearer token of run-api; default: $ATROPOS_TOKEN.", json_schema_extra=SECRET
    )
    rollout_server_token_file: Path | None = Field(
        None,
        description="File with that token, read again when it is refused; default: $ATROPOS_TOKEN_FILE.",
        json_schema_extra={"aliases": ["token_file"]},
    )
    eval_at_start: bool = Field(False, description="Evaluate before the first group.")
    eval_at_end: bool = Field(False, description="Evaluate after the run has finished.")
    rollout_attempts: int = Field(3, ge=1, description="Attempts at an item whose rollout fails.")
    late_members: LateMembers = Field(
        "wait",
        description="Late rollouts of a group, where they are collected one by one: wait for them, redraw them, or "
        "close the group without them.",
    )
    late_factor: float = Field(
        1.5, ge=1, description="Rollouts are late at this multiple of the time that the first least_members took."
    )
    least_members: int = Field(
        0, ge=0, description="Rollouts that a group needs to be closed; 0: three quarters of group_size."
    )
    max_failures_in_a_row: int = Field(20, ge=1, description="Consecutive failed items after which the server exits.")
    wait_timeout: float = Field(600, gt=0, description="Seconds to wait for the broker or an inference server.")
    drain_seconds: float = Field(
        10, ge=0, description="Seconds that rollouts in progress may take to finish after SIGTERM."
    )
    allow_truncated_sampling: bool = Field(
        False, description="Train on top-p, top-k or penalised samples; their groups are marked."
    )
    sampling_mask_limit: int = Field(
        0,
        ge=0,
        le=MOST_MASK_TOKENS,
        description="Most tokens of a sampling mask: for each token of a top-p, top-k or min-p sample those that could "
        "be drawn, with which the trainer's ratio is exact; 0: no masks.",
    )
    allow_estimated_tokens: bool = Field(
        False,
        description="Train on text of server_type openai, tokenised again; groups are marked, without logprobs.",
    )
    session_host: str = Field("127.0.0.1", description="Address where sessions are served to agents.")
    session_port: int = Field(0, ge=0, le=65535, description="Its port; 0: a free one.")
    session_url: Address = Field("", description="URL by which agents reach that address, if it differs for them.")
    session_temperature: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Temperature that replaces the agents' in training requests; unset: no replacement."
    )
    log_format: LogForm = "text"
    metrics_port: MetricsPort = None
    metrics_host: MetricsHost = "127.0.0.1"
    otlp_traces_endpoint: TracesEndpoint = None

    _find_results = field_validator("data_path_to_save_groups", "data_dir_to_save_evals", mode="before")(named_path)

    @field_validator("group_size_schedule")
    @classmethod
    def _is_schedule(cls, text: str) -> str:
        read_schedule(text)
        return text

    @model_validator(mode="after")
    def _needs_members_it_can_have(self) -> Self:
        if self.least_members > self.group_size:
            raise ValueError(f"least_members {self.least_members} is more than group_size {self.group_size}; lower it")
        return self

    def least_members_of(self, group_size: int) -> int:
        """Return the number of rollouts that a group of this size needs to be closed."""
        return min(self.least_members or math.ceil(0.75 * group_size), group_size)

    @property
    def will_evaluate(self) -> bool:
        """True if a run with these settings is evaluated."""
        return self.steps_per_eval > 0 or self.eval_at_start or self.eval_at_end

    def check_names(self) -> None:
        """Raise an `AtroposError` for a name or file in these settings that does not exist; a launch ends with it."""

    def group_size_at(self, step: int, first_size: int) -> int:
        """Return the group size at a trainer step; a schedule that begins later has `first_size` before."""
        due = [size for start, size in self._schedule(first_size) if start <= step]
        return due[-1] if due else self.group_size

    def scheduled_sizes(self, first_size: int) -> frozenset[int]:
        return frozenset(size for _, size in self._schedule(first_size))

    def _schedule(self, first_size: int) -> list[tuple[int, int]]:
        """Return the schedule from step 0 on; an empty list if there is none."""
        pairs = read_schedule(self.group_size_schedule)
        return [(0, first_size), *pairs] if pairs and pairs[0][0] > 0 else pairs


def read_schedule(text: str) -> list[tuple[int, int]]:
    """Return pairs of step and value read from `0:8,100:4`, in the order of the steps."""
    try:
        pairs = [(int(step), int(value)) for step, value in (part.split(":") for part in text.split(",") if part)]
    except ValueError:
        raise ValueError(f"{text!r} is not a schedule; write pairs of step and size, as 0:8,100:4") from None
    if any(step < 0 or value < 1 for step, value in pairs):
        raise ValueError(f"{text!r}: steps begin at 0 and sizes at 1")
    if len({step for step, _ in pairs}) < len(pairs):
        raise ValueError(f"{text!r} gives one step two sizes; give each step one")
    return sorted(pairs)


class ServerBaseline(BaseModel):
    """Base settings: all inference servers share them."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())

    timeout: float = Field(1200, gt=0, description="Seconds that one request may take.")
    num_max_requests_at_once: int = Field(512, ge=1, description="Training requests in flight on a server.")
    num_requests_for_eval: int = Field(64, ge=1, description="Evaluation requests in flight on a server.")
    model_name: str = Field("default", description="Name of the model to request.")
    server_type: ServerType = Field("openai", description="Kind of server at base_url; training needs vllm or sglang.")
    rolling_buffer_length: int = Field(1000, ge=1, description="Requests that timings are averaged over.")
    tokenizer_name: str = Field(
        "none",
        description="Its model's tokenizer, if --env.tokenizer_name is unset; none: the one that the server reports.",
    )


class APIServerConfig(ServerBaseline):
    """Settings of one inference server: each is set with `--openai.<field>`."""

    api_key: str = Field("", description="Bearer token of the server.", json_schema_extra=SECRET)
    base_url: Address = Field(
        "http://localhost:9001/v1", description="Its address; /generate is requested without the /v1."
    )
    policy: str = Field(
        "",
        max_length=200,
        description="Policy whose servers are requested, as they are registered with the broker, in place of base_url.",
    )
    n_kwarg_is_ignored: bool = Field(False, description="The provider ignores n and returns one choice.")
    health_check: bool = Field(True, description="Wait for a server that does not answer instead of failing.")

    @property
    def root_url(self) -> str:
        """The address without OpenAI's `/v1`: the native endpoints are there."""
        return self.base_url.rstrip("/").removesuffix("/v1")

    def as_defaults(self) -> dict[str, Any]:
        """Return the settings as values that files and flags override."""
        return self.model_dump()


def as_server_list(
    configs: ServerBaseline | APIServerConfig | list[APIServerConfig],
) -> list[APIServerConfig]:
    """Return a list of server configs, whichever of the three forms was given."""
    if isinstance(configs, list):
        return configs
    if isinstance(configs, APIServerConfig):
        return [configs]
    return [APIServerConfig(**configs.model_dump())]


GPUS_A_NODE = 8
FIRST_PORT = 9000


def slurm_servers(template: APIServerConfig, variables: Mapping[str, str] = os.environ) -> list[APIServerConfig]:
    """Return a config for each server of the Slurm job: a copy of `template` with that server's address."""
    listed = variables.get("SLURM_JOB_NODELIST")
    if not listed:
        raise ConfigError("--slurm: SLURM_JOB_NODELIST is not set; start inside a Slurm job, or name --openai.base_url")
    training = _whole_number(variables, "NUM_TRAINING_NODES", default=0, least=0)
    gpus_a_server = _whole_number(variables, "INFER_TP", default=1, least=1)
    nodes = _hostnames(listed)[training:]
    if not nodes or gpus_a_server > GPUS_A_NODE:
        raise ConfigError(
            f"--slurm: no server fits: of {len(nodes)} nodes none is left after NUM_TRAINING_NODES={training}, "
            f"and INFER_TP={gpus_a_server} of {GPUS_A_NODE} GPUs"
        )
    return [
        template.model_copy(update={"base_url": f"http://{node}:{FIRST_PORT + number}/v1"})
        for node in nodes
        for number in range(GPUS_A_NODE // gpus_a_server)
    ]


def _hostnames(listed: str) -> list[str]:
    command = ["scontrol", "show", "hostnames", listed]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"--slurm: {' '.join(command)} failed ({error}); it must be on the PATH") from error
    return done.stdout.split()


def _whole_number(variables: Mapping[str, str], name: str, *, default: int, least: int) -> int:
    text = variables.get(name, str(default))
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"--slurm: {name}={text!r} must be a whole number of at least {least}")
    return int(text)


KEY_PREFIX = "/t/"
KEY_VARIABLE = "ATROPOS_SESSION_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """Settings of served sessions: they say where agents reach an environment's sessions."""

    host: str = "127.0.0.1"
    port: int = 0
    url: str = ""
    """The URL at which agents reach this host and port, if it differs for them."""
    temperature: float | None = None
    """The temperature that replaces the one of agents' training requests; None: theirs is kept."""
    key_in_url: bool = False
    """True if addresses carry the key, for agents that get only an address."""

    @classmethod
    def from_config(cls, config: BaseEnvConfig, *, key_in_url: bool = False) -> SessionSettings:
        return cls(
            host=config.session_host,
            port=config.session_port,
            url=config.session_url,
            temperature=config.session_temperature,
            key_in_url=key_in_url,
        )


@dataclass(frozen=True, slots=True)
class SessionAddress:
    """The address of one session: a base URL for clients of OpenAI's API, and the key that they send."""

    root_url: str
    name: str
    key: str = field(repr=False)
    key_in_url: bool

    def url(self, *, with_key: bool | None = None) -> str:
        prefix = f"{KEY_PREFIX}{self.key}" if (self.key_in_url if with_key is None else with_key) else ""
        return f"{self.root_url}{prefix}/{self.name}/v1"
