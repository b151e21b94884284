"""The inference server's options: its own and the common ones of vLLM, readable without importing vLLM.

Any other option is passed on to vLLM's own parser, both from the command line and from the `vllm:` section of a run
file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from atropos_api.common.cliconfig import load_config_with_rest
from atropos_api.common.secrets import SECRET

NVIDIA_DEVICE = Path("/dev/nvidia0")
PROG = "vllm_api_server"
DESCRIPTION = """\
Serve a model with vLLM: its OpenAI API under /v1, token-exact generation under /generate with the policy version of
every token, and /bridge for a trainer that shares the weights. Every other option of vLLM is accepted too."""

SHARING_HOW_TO = "start the server with --share-weights, VLLM_ENABLE_SHARED_WEIGHTS=1 or NUM_INFERENCE_NODES=0"
_GIBIBYTE = 1 << 30
_MEBIBYTE = 1 << 20
_ADAPTER_SLOTS = 4
_HOST_ADAPTERS_PER_SLOT = 4
_JSON_LISTS = frozenset({"allowed_origins", "allowed_methods", "allowed_headers"})
"""Lists that vLLM's parser takes as JSON."""
_OWN_FIELDS = frozenset(
    {
        "share_weights",
        "drain_seconds",
        "policy_version",
        "await_policy",
        "await_model",
        "adapter",
        "max_adapter_mib",
        "bridge_dir",
        "bridge_token",
        "allowed_hosts",
        "gpu_memory_utilization",
    }
)


class ServerConfig(BaseModel):
    """The inference server's start options; all other keys are vLLM's."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str = Field(
        description="model directory, or its name on the hub", json_schema_extra={"aliases": ["model_name"]}
    )
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(9001, description="port to listen on", ge=0, le=65535)
    drain_seconds: float = Field(
        0.0, description="seconds that running requests get to end when the server is stopped", ge=0
    )
    share_weights: bool | None = Field(
        None,
        description="share weights with a local trainer; also VLLM_ENABLE_SHARED_WEIGHTS=1 or NUM_INFERENCE_NODES=0",
    )
    policy_version: int | None = Field(
        None, description="version to stamp on replies, for a server whose weights do not change", ge=0
    )
    await_policy: bool = Field(
        False,
        description="serve nothing until a trainer has sent its first adapter or weights; also NUM_INFERENCE_NODES=N",
    )
    await_model: bool = Field(
        False,
        description="wait until a trainer has written --model, for example the base of --load-in-4bit at "
        "RUN_DIR/served/base, and load it then",
    )
    adapter: Path | None = Field(
        None, description="directory of a LoRA adapter to serve from the start, as --policy-version"
    )
    max_adapter_mib: int = Field(1024, description="largest adapter that may be sent, in MiB", ge=1)
    bridge_dir: Path | None = Field(
        None, description="directory for vllm_bridge_config.json; else $LOGDIR, else the current one"
    )
    bridge_token: str | None = Field(
        None,
        description="token that permits changing the weights; else $ATROPOS_BRIDGE_TOKEN, else random",
        json_schema_extra=SECRET,
    )
    allowed_hosts: list[str] = Field(
        [],
        description="public host names under which the server accepts requests, besides this machine's; * for any",
    )
    gpu_memory_utilization: float | None = Field(
        None, description="share of the GPU's memory to use; on a CPU, share of one GiB for the KV cache", gt=0, le=1
    )
    kv_cache_memory_bytes: int | None = Field(None, description="size of the KV cache, instead of a share", gt=0)
    dtype: str = Field("auto", description="type of weights and activations")
    max_model_len: int | None = Field(None, description="maximum length of prompt and output together, in tokens", gt=0)
    max_num_seqs: int | None = Field(None, description="maximum number of sequences decoded at once", gt=0)
    seed: int = Field(0, description="seed of the engine, for requests without one")
    enforce_eager: bool | None = Field(None, description="do not compile the model; the default on a CPU")
    tensor_parallel_size: int = Field(1, description="GPUs that each layer is split over", ge=1)
    pipeline_parallel_size: int = Field(1, description="GPUs that the layers are distributed over", ge=1)
    quantization: str | None = Field(None, description="quantisation method of the weights")
    enable_lora: bool = Field(False, description="serve adapters")
    max_loras: int | None = Field(
        None,
        description="maximum adapters in one batch, and number of newest versions kept; 4 if adapters are served",
        ge=1,
    )
    max_lora_rank: int | None = Field(None, description="largest rank of an adapter", ge=1)
    enable_sleep_mode: bool = Field(False, description="allow the server to release its memory on request")
    served_model_name: list[str] | None = Field(None, description="names under which /v1 serves the model")
    tokenizer: str | None = Field(None, description="tokenizer directory or name, if not the model's")
    trust_remote_code: bool = Field(False, description="run code that comes with the model")
    enable_prefix_caching: bool | None = Field(None, description="reuse the KV of common prompt prefixes")
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs", "processed_logits", "raw_logits"] = Field(
        "processed_logprobs", description="which logprobs replies carry; a trainer recomputes the processed ones"
    )
    uvicorn_log_level: str = Field("warning", description="log level of the HTTP server")

    @property
    def is_local(self) -> bool:
        """True if model and tokenizer are directories, so that nothing is asked of the hub."""
        named = [self.tokenizer] if self.await_model else [self.model, self.tokenizer]
        return all(Path(name).expanduser().is_dir() for name in named if name is not None)

    @property
    def adapter_slots(self) -> int:
        """Number of adapters that one batch may mix, and of newest versions that stay loaded."""
        return self.max_loras or _ADAPTER_SLOTS

    @property
    def adapter_path(self) -> str | None:
        """The adapter's absolute path, because vLLM takes any other path for a name on the hub."""
        return None if self.adapter is None else str(self.adapter.absolute())

    @property
    def max_adapter_bytes(self) -> int:
        return self.max_adapter_mib * _MEBIBYTE

    def shares(self, environ: Mapping[str, str]) -> bool:
        """Return True if weights are exported: the flag decides, else either variable of the environment."""
        if self.share_weights is not None:
            return self.share_weights
        asked = environ.get("VLLM_ENABLE_SHARED_WEIGHTS", "0") not in {"", "0", "false"}
        return not self.awaits_policy(environ) and (asked or "NUM_INFERENCE_NODES" in environ)

    def awaits_policy(self, environ: Mapping[str, str]) -> bool:
        """Return True if a trainer sends the first policy, as it does to one of NUM_INFERENCE_NODES servers."""
        is_node = environ.get("NUM_INFERENCE_NODES", "0") not in {"", "0"}
        return self.await_policy or (is_node and self.share_weights is None and self.policy_version is None)

    def manifest_directory(self, environ: Mapping[str, str]) -> Path:
        return self.bridge_dir or Path(environ.get("LOGDIR") or ".").resolve()

    def token(self, environ: Mapping[str, str]) -> str | None:
        return self.bridge_token or environ.get("ATROPOS_BRIDGE_TOKEN") or None

    def warnings(self, gpu: Path = NVIDIA_DEVICE) -> list[str]:
        """Return a sentence for each setting that is valid but often a mistake; `gpu` is there on a GPU machine."""
        if self.enable_lora and self.enforce_eager and gpu.exists():
            text = (
                "--enforce-eager with --enable-lora gives up the speed of CUDA graphs, and adapters do not need it: "
                "they are copied into buffers that the graphs read; leave --enforce-eager out"
            )
            return [text]
        return []


def read_config(argv: Sequence[str]) -> tuple[ServerConfig, list[str]]:
    """Return the server's own options, and the arguments left for vLLM."""
    return load_config_with_rest(ServerConfig, argv, prog=PROG, description=DESCRIPTION, section="vllm")


def vllm_arguments(config: ServerConfig, rest: Sequence[str], *, on_cpu: bool) -> list[str]:
    """Return the command line for vLLM's own parser."""
    values: dict[str, Any] = {
        name: value for name, value in config.model_dump().items() if name not in _OWN_FIELDS and value is not None
    }
    values.setdefault("disable_uvicorn_access_log", True)
    if config.enable_lora:
        values["max_loras"] = config.adapter_slots
        # Kept in host memory, so that an old adapter with a long request is not read again each time it is evicted.
        values.setdefault("max_cpu_loras", _HOST_ADAPTERS_PER_SLOT * config.adapter_slots)
    if on_cpu:
        values.setdefault("enforce_eager", True)
        values.setdefault("kv_cache_memory_bytes", kv_budget_on_cpu(config.gpu_memory_utilization))
    elif config.gpu_memory_utilization is not None:
        values["gpu_memory_utilization"] = config.gpu_memory_utilization
    arguments = [argument for name, value in values.items() for argument in _as_arguments(name, value)]
    return [*arguments, *rest]


def kv_budget_on_cpu(share: float | None) -> int:
    """Return the bytes of KV cache on a CPU: a share of one GiB, where vLLM would take that share of all memory."""
    return int(_GIBIBYTE * (share if share is not None else 0.5))


def prepare_environment(environ: dict[str, str] | os._Environ[str], *, model_is_local: bool) -> None:
    """Set the variables that vLLM and torch read when they are imported; those that the user has set stay."""
    environ.setdefault("OMP_NUM_THREADS", "1")  # with the worker inside the engine core, vLLM binds no threads
    environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    environ.setdefault(
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "120"
    )  # the default of 5 s breaks clients that reuse connections
    environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not NVIDIA_DEVICE.exists():
        # Otherwise the sampler compiles small kernels even in eager mode: 20 s, and it needs a C++ compiler.
        environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if model_is_local:
        environ.setdefault("HF_HUB_OFFLINE", "1")


def _as_arguments(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return [flag]
    if value is False:
        field = ServerConfig.model_fields.get(name)
        return [] if field is not None and field.default is False else [flag.replace("--", "--no-", 1)]
    if isinstance(value, dict) or name in _JSON_LISTS:
        return [flag, json.dumps(value)]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [flag, str(value)]
