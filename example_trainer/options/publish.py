"""Options of publishing weights to the inference server: part of `TrainingConfig`; this module loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from pydantic import BaseModel, Field, field_validator

from atropos_api.common.identity import Address, Host
from atropos_api.common.secrets import SECRET
from example_trainer.options.modes import MODES, BridgeMode, Mode

InFlight = Literal["drain", "recompute", "finish", "keep_kv"]
SERVED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""LoRA ranks for which vLLM has buffers."""
USUAL_STALENESS = 2
DRAIN_SECONDS = 0.5
"""Default time that running requests get to end before a publish writes weights."""
SYNC_CHECKS: Mapping[str, int | None] = MappingProxyType({"auto": None, "every": 1, "off": 0})


class PublishOptions(BaseModel):
    """The publishing of new weights to the inference server."""

    weight_bridge_mode: BridgeMode = Field(
        "none", description="shared_vllm, lora_only, lora_restart, or none (checkpoint, restart)."
    )
    vllm_host: Host = Field("127.0.0.1", description="Host of the vLLM server.")
    vllm_port: int = Field(9001, ge=1, le=65535, description="Port of the vLLM server.")
    vllm_config_path: str = Field(
        "auto",
        description="vllm_bridge_config.json of the server (shared_vllm); auto looks in "
        "$LOGDIR, at the server's /bridge/info and in the current directory.",
    )
    vllm_restart_interval: int = Field(
        3, ge=1, description="Publish every N steps: in none and lora_restart, and in lora_only if it is set."
    )
    restart_method: Literal["restart", "reload"] = Field(
        "restart",
        description="How mode none serves a checkpoint: by a new server, or by making the running one read it.",
    )
    start_vllm: Literal["auto", "never"] = Field(
        "auto", description="lora_only: if no server answers at --vllm-port, auto starts one, never waits for one."
    )
    inference_urls: list[Address] | None = Field(
        None,
        description="Addresses of the servers of --num-inference-nodes; unset: --vllm-host, from --vllm-port upwards.",
    )
    broadcast_backend: Literal["gloo", "nccl"] = Field(
        "gloo",
        description="Backend that sends weights to the servers of --num-inference-nodes (MASTER_ADDR, MASTER_PORT).",
    )
    sync_check: str = Field(
        "auto",
        description="Check by checksums and logprobs that trainer and server agree: after every publish, after every "
        "Nth, after the first only (off), or as often as takes at most 1 % of the time (auto; not with "
        "--overlap-publish, or with full weights on several ranks).",
    )
    gpu_memory_utilization: float = Field(0.45, gt=0.0, le=1.0, description="vLLM's share of GPU memory.")
    vllm_gpu: int | None = Field(
        None, ge=0, description="GPU of vLLM (of the first server, if there are several); unset: the trainer's."
    )
    max_model_len: int = Field(4096, ge=1, description="Maximum context length of the server.")
    vllm_tensor_parallel_size: int = Field(1, ge=1, description="Tensor-parallel ranks of vLLM.")
    vllm_quantization: str | None = Field(None, description="Quantisation of the served model.")
    vllm_enable_sleep_mode: bool = Field(False, description="Enable vLLM's sleep mode.")
    bridge_token: str | None = Field(
        None,
        description="Token for the server's state-changing routes; unset: the manifest's or $ATROPOS_BRIDGE_TOKEN.",
        repr=False,
        json_schema_extra=SECRET,
    )
    drain_seconds: float = Field(
        DRAIN_SECONDS, ge=0.0, description="Seconds that running requests get to end under the old weights."
    )
    in_flight: InFlight = Field("drain", description="Treatment of running requests in a publish.")
    sync_budget: float = Field(
        0.2,
        gt=0.0,
        description="Publish less often while recomputed tokens exceed this share of those "
        "generated (forward from the masters only).",
    )
    overlap_publish: bool = Field(False, description="Publish during the next batch's forward and backward.")
    keep_versions: int = Field(0, ge=0, description="Keep this many older policy versions for the alignment metrics.")
    alignment_sample_sequences: int = Field(
        16, ge=0, description="Sequences sampled per step for comparing logprobs with older versions."
    )

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
