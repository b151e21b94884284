"""Options of publishing weights: how often, for how long running requests drain, how the others are treated.

They are part of `TrainingConfig`; this module loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator

from atropos_api.common.files import named_path
from atropos_api.common.identity import Address, Host, host_in_url, split_address
from atropos_api.common.secrets import SECRET
from example_trainer.options.modes import MODES, BridgeMode, Mode
from example_trainer.options.vllm_settings import checked_settings

InFlight = Literal["auto", "drain", "recompute", "finish", "keep_kv"]
SERVED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""LoRA ranks for which vLLM has buffers."""
USUAL_STALENESS = 2
DRAIN_SECONDS = 0.5
"""Default of the longest time that running requests get to end before a publish writes weights."""
SYNC_CHECKS: Mapping[str, int | None] = MappingProxyType({"auto": None, "every": 1, "off": 0})


class PublishOptions(BaseModel):
    """The publishing of new weights to the inference server."""

    weight_bridge_mode: BridgeMode = Field(
        "none",
        description="How trained weights reach the server: shared_vllm writes them into the memory that vLLM reads, "
        "lora_only sends adapters to the running server, lora_restart writes an adapter and none a checkpoint, with "
        "which the server is started again.",
    )
    vllm_host: Host = Field(
        "127.0.0.1",
        description="Host of the vLLM server, and the address at which one that is started here listens. In lora_only "
        "it may be another machine, whose server must run already.",
    )
    vllm_port: int = Field(9001, ge=1, le=65535, description="Port of the vLLM server.")
    vllm_config_path: str = Field(
        "auto",
        description="vllm_bridge_config.json of the server (shared_vllm); auto looks in "
        "$LOGDIR, at the server's /bridge/info and in the current directory.",
    )
    vllm_restart_interval: int = Field(
        3,
        ge=1,
        description="Publish every N steps, or sooner where --max-staleness needs it: in none and lora_restart, and in "
        "lora_only if it is set.",
    )
    restart_method: Literal["restart", "reload"] = Field(
        "restart",
        description="How mode none serves a checkpoint: by a new server, or by making the running one read it.",
    )
    standby_server: bool = Field(
        True,
        description="Keep the process of the next server ready in none and lora_restart, with everything imported, "
        "where memory allows.",
    )
    registered_servers: bool = Field(
        False,
        description="Publish to the servers of --policy that are registered at the broker (vllm_api_server "
        "--broker-url), instead of to addresses; servers may come and go during the run.",
    )
    start_vllm: Literal["auto", "never"] = Field(
        "auto",
        description="lora_only: if no server answers at --vllm-port, auto starts one, never waits for one. With "
        "--registered-servers never keeps atropos-grpo-run from starting servers.",
    )
    inference_urls: list[Address] | None = Field(
        None,
        description="Addresses of the servers of --num-inference-nodes; unset: --vllm-host, from --vllm-port upwards.",
    )
    broadcast_backend: Literal["gloo", "nccl"] = Field(
        "gloo",
        description="Backend that sends weights to the servers of --num-inference-nodes; nccl needs a GPU for each.",
    )
    broadcast_address: str | None = Field(
        None,
        description="HOST or HOST:PORT at which the servers of --num-inference-nodes meet the trainer, reachable from "
        "each of them; unset: $MASTER_ADDR, else this host's loopback, with $MASTER_PORT, or any free port if there "
        "are several trainer processes or torchrun has started this one.",
    )
    sync_check: str = Field(
        "auto",
        description="Check by checksums and logprobs that trainer and server agree: after every publish, after every "
        "Nth, after the first only (off), or as often as takes at most 1 % of the time (auto; not with "
        "--overlap-publish, or with full weights on several ranks).",
    )
    gpu_memory_utilization: float = Field(0.45, gt=0.0, le=1.0, description="vLLM's share of GPU memory.")
    vllm_gpu: int | None = Field(
        None,
        ge=0,
        description="Index of vLLM's GPU among those that CUDA_VISIBLE_DEVICES leaves visible: the first, if there are "
        "several servers or tensor-parallel ranks, which take the following ones; unset: the trainer's.",
    )
    max_model_len: int = Field(
        4096,
        ge=1,
        description="Maximum context length of the server; under LongRoPE (Phi-3, Phi-4-mini) both sides choose the "
        "rotary factors of all sequences by it.",
    )
    vllm_tensor_parallel_size: int = Field(1, ge=1, description="Tensor-parallel ranks of vLLM.")
    vllm_quantization: str | None = Field(None, description="Quantisation of the served model.")
    vllm_head_dtype: Literal["float32", "auto"] = Field(
        "float32",
        description="Dtype of the server's output head; auto: vLLM's own, which rounds logits to --dtype, so that "
        "logprobs agree less closely.",
    )
    vllm_enable_sleep_mode: bool = Field(False, description="Enable vLLM's sleep mode.")
    vllm_settings: dict[str, Any] = Field(
        {},
        description="Further options of the vLLM server that trainer or launcher starts, as vLLM names them: "
        "max_num_seqs=64 kv_cache_dtype=fp8, or JSON. The section vllm: of a run file is the same.",
    )
    bridge_token: str | None = Field(
        None,
        description="Token for the server's state-changing routes; unset: the manifest's or $ATROPOS_BRIDGE_TOKEN.",
        repr=False,
        json_schema_extra=SECRET,
    )
    drain_seconds: float = Field(
        DRAIN_SECONDS, ge=0.0, description="Most seconds that running requests get to end under the old weights."
    )
    in_flight: InFlight = Field(
        "auto",
        description="Running requests in a publish: drain lets them end for --drain-seconds and pauses the rest, "
        "recompute pauses all at once, auto drains for that part of --drain-seconds after which the least generation "
        "is lost, finish waits for all to end but those whose client reads no further. The KV entries of paused "
        "requests are computed again; keep_kv pauses all and keeps them.",
    )
    sync_budget: float = Field(
        0.2,
        gt=0.0,
        description="Publish less often while recomputed tokens exceed this share of those generated, or under "
        "--in-flight auto while publishes have lost more than this share of the last ten seconds' generation (forward "
        "from the masters only).",
    )
    overlap_publish: bool = Field(False, description="Publish during the next batch's forward and backward.")
    keep_versions: int = Field(0, ge=0, description="Keep this many older policy versions for the alignment metrics.")
    alignment_sample_sequences: int = Field(
        16, ge=0, description="Sequences sampled per step for comparing logprobs with older versions."
    )

    _find_manifest = field_validator("vllm_config_path", mode="before")(named_path)

    @field_validator("vllm_settings", mode="before")
    @classmethod
    def _check_vllm_settings(cls, value: object) -> object:
        return checked_settings(value)

    @field_validator("broadcast_address")
    @classmethod
    def _check_broadcast_address(cls, value: str | None) -> str | None:
        if value is not None:
            split_address(value)
        return value

    def server_gpus(self, index: int = 0) -> str | None:
        """Return the numbers of the GPUs of the server with this index, one for each of its workers, with commas.

        None if `--vllm-gpu` gives none: a server then takes the first that it sees.
        """
        if self.vllm_gpu is None:
            return None
        size = self.vllm_tensor_parallel_size
        first = self.vllm_gpu + index * size
        return ",".join(str(number) for number in range(first, first + size))

    @property
    def vllm_url(self) -> str:
        """The address of the server at `--vllm-port`."""
        return f"http://{host_in_url(self.vllm_host)}:{self.vllm_port}"

    @property
    def vllm_port_is_given(self) -> bool:
        """True if `--vllm-port` is given: a server at another port is not meant then."""
        return "vllm_port" in self.model_fields_set

    @property
    def mode(self) -> Mode:
        """The row of the weight sync mode in `modes.py`."""
        return MODES[self.weight_bridge_mode]

    @field_validator("sync_check", mode="before")
    @classmethod
    def _check_sync_check(cls, value: object) -> str:
        text = str(value).lower()
        if text not in SYNC_CHECKS and not (text.isdigit() and int(text) > 0):
            raise ValueError(f"{value} is not valid; use auto, every, off, or a number of publishes of at least 1")
        return text


def served_rank(rank: int) -> int:
    """Return the smallest rank with vLLM buffers that is large enough for an adapter of this rank."""
    return next((size for size in SERVED_RANKS if size >= rank), SERVED_RANKS[-1])


def versions_kept(max_staleness: int | None) -> int:
    """Return the number of adapters a server keeps, so that a request within the staleness limit ends on its own."""
    return (USUAL_STALENESS if max_staleness is None else max_staleness) + 2
