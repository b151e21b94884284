"""The inference server's options: its own and the common ones of vLLM, readable without importing vLLM.

Any other option is passed on to vLLM's own parser, both from the command line and from the `vllm:` section of a run
file.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from atropos_api.common.cliconfig import load_config_with_rest
from atropos_api.common.files import named_path
from atropos_api.common.identity import EVERYWHERE, Address, host_in_url
from atropos_api.common.observability import LogForm
from atropos_api.common.secrets import SECRET, TokenSource
from atropos_api.wire.servers import ServerMode
from example_trainer.options.vllm_settings import as_arguments
from example_trainer.processes.gpus import DEVICES, serves_from_gpu
from example_trainer.weight_protocol.manifest import given_token

PLUGIN = "atropos_die_with_parent"
"""Name of the plugin that vLLM's processes need, as `pyproject.toml` declares it."""

PROG = "vllm_api_server"
DESCRIPTION = """\
Serve a model with vLLM: its OpenAI API under /v1, token-exact generation under /generate with the policy version of
every token, and /bridge for a trainer that shares the weights. Every other option of vLLM is accepted too."""

SHARING_HOW_TO = "start the server with --share-weights, VLLM_ENABLE_SHARED_WEIGHTS=1 or NUM_INFERENCE_NODES=0"
_GIBIBYTE = 1 << 30
_MEBIBYTE = 1 << 20
_ADAPTER_SLOTS = 4
MOST_LOGPROBS = 256
"""Alternatives a token that a request may ask for; vLLM's 20 are too few for the sampling masks of top_p or top_k."""
_HOST_ADAPTERS_PER_SLOT = 4
_ON_A_GPU = {
    # Triton multiplies float32 matrices in TF32 by default, with 10 bits of mantissa: vLLM's attention in float32 was
    # off by 1.6e-2 in a simulation, where the parity check allows 1.7e-4. It changes no 16-bit product.
    "TRITON_F32_DEFAULT": "ieee",
    # A forked engine core inherits vLLM's note that plugins are loaded and loads none: it would outlive a killed server
    # with all of the GPU's memory, and would not report why it failed (`failure_cause.register`).
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # It gives no logprobs of the processed distribution, so it is never used here; it would be compiled at the start,
    # which takes minutes, nvcc and a download.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
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
        "broker_url",
        "broker_token",
        "broker_token_file",
        "policy",
        "server_id",
        "advertise_url",
        "gpu_memory_utilization",
        "head_dtype",
        "log_format",
    }
)


class ServerConfig(BaseModel):
    """The inference server's start options; all other keys are vLLM's."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())

    model: str = Field(
        description="Model directory, or its name on the hub.", json_schema_extra={"aliases": ["model_name"]}
    )
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(9001, description="Port to listen on.", ge=0, le=65535)
    drain_seconds: float = Field(
        0.0, description="Seconds that running requests get to end when the server is stopped.", ge=0
    )
    share_weights: bool | None = Field(
        None,
        description="Share weights with a local trainer; also VLLM_ENABLE_SHARED_WEIGHTS=1 or NUM_INFERENCE_NODES=0.",
    )
    policy_version: int | None = Field(
        None, description="Version to stamp on replies, for a server whose weights do not change.", ge=0
    )
    await_policy: bool = Field(
        False,
        description="Serve nothing until a trainer has sent its first adapter or weights; also NUM_INFERENCE_NODES=N.",
    )
    await_model: bool = Field(
        False,
        description="Wait until a trainer has written --model, for example the base of --load-in-4bit at "
        "RUN_DIR/served/base, and load it then.",
    )
    adapter: Path | None = Field(
        None, description="Directory of a LoRA adapter to serve from the start, as --policy-version."
    )
    max_adapter_mib: int = Field(1024, description="Largest adapter that may be sent, in MiB.", ge=1)
    bridge_dir: Path | None = Field(
        None, description="Directory for vllm_bridge_config.json; else $LOGDIR, else the current one."
    )
    bridge_token: str | None = Field(
        None,
        description="Token that permits changing the weights; else $ATROPOS_BRIDGE_TOKEN, else random.",
        json_schema_extra=SECRET,
    )
    broker_url: Address | None = Field(
        None,
        description="Broker to register with, for environments and trainers that follow its registry; the server then "
        "answers only once a trainer has proven its weights, or at once with --policy-version.",
    )
    broker_token: str | None = Field(
        None, description="Token of that broker; else $ATROPOS_TOKEN.", json_schema_extra=SECRET
    )
    broker_token_file: Path | None = Field(
        None, description="File with that token, read again when it is refused; else $ATROPOS_TOKEN_FILE."
    )
    policy: str = Field("default", min_length=1, max_length=200, description="Policy that a registered server serves.")
    server_id: str | None = Field(
        None, description="Name of a registered server, kept over its restarts; else this machine's name and the port."
    )
    advertise_url: Address | None = Field(
        None, description="Address of a registered server, where others reach it by another than --host and --port."
    )
    allowed_hosts: list[str] = Field(
        [],
        description="Public host names under which the server accepts requests, besides this machine's; * for any.",
    )
    gpu_memory_utilization: float | None = Field(
        None, description="Share of the GPU's memory to use; on a CPU, share of one GiB for the KV cache.", gt=0, le=1
    )
    kv_cache_memory_bytes: int | None = Field(None, description="Size of the KV cache, instead of a share.", gt=0)
    dtype: str = Field("auto", description="Type of weights and activations.")
    head_dtype: Literal["float32", "auto"] = Field(
        "float32",
        description="Type of the output head's product, which a trainer computes in float32; auto: vLLM's own, dtype.",
    )
    max_model_len: int | None = Field(
        None, description="Maximum length of prompt and output together, in tokens.", gt=0
    )
    max_num_seqs: int | None = Field(None, description="Maximum number of sequences decoded at once.", gt=0)
    seed: int = Field(
        0,
        description="Seed of the engine, for requests without one; of a server that registers or awaits a policy it "
        "follows from its name and port, unless it is given.",
    )
    enforce_eager: bool | None = Field(None, description="Do not compile the model; the default on a CPU.")
    tensor_parallel_size: int = Field(1, description="GPUs that each layer is split over.", ge=1)
    pipeline_parallel_size: int = Field(1, description="GPUs that the layers are distributed over.", ge=1)
    quantization: str | None = Field(None, description="Quantisation method of the weights.")
    enable_lora: bool = Field(False, description="Serve adapters.")
    max_loras: int | None = Field(
        None,
        description="Maximum adapters in one batch, and number of newest versions kept; 4 if adapters are served.",
        ge=1,
    )
    max_lora_rank: int | None = Field(None, description="Largest rank of an adapter.", ge=1)
    enable_sleep_mode: bool = Field(False, description="Allow the server to release its memory on request.")
    enable_cumem_allocator: bool = Field(
        False, description="Allocate GPU memory in vLLM's own way, as sleep mode does."
    )
    served_model_name: list[str] | None = Field(None, description="Names under which /v1 serves the model.")
    tokenizer: str | None = Field(None, description="Tokenizer directory or name, if not the model's.")
    trust_remote_code: bool = Field(False, description="Run code that comes with the model.")
    enable_prefix_caching: bool | None = Field(None, description="Reuse the KV of common prompt prefixes.")
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs", "processed_logits", "raw_logits"] = Field(
        "processed_logprobs", description="Which logprobs replies carry; a trainer recomputes the processed ones."
    )
    generation_config: str = Field(
        "vllm",
        description="Sampling defaults of requests to /v1: vllm has none, so that they are sampled from the policy "
        "itself; auto takes those of the model's generation_config.json, or name a folder with another.",
    )
    log_format: LogForm = "text"
    uvicorn_log_level: str = Field("warning", description="Log level of the HTTP server.")

    _find_paths = field_validator("model", "tokenizer", "adapter", "bridge_dir", mode="before")(named_path)

    @property
    def is_local(self) -> bool:
        """True if model and tokenizer are directories, so that nothing is asked of the hub."""
        named = [self.tokenizer] if self.await_model else [self.model, self.tokenizer]
        return all(Path(name).is_dir() for name in named if name is not None)

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
        asked = environ.get("VLLM_ENABLE_SHARED_WEIGHTS", "").lower() not in {"", "0", "false", "no", "off"}
        return not self.awaits_policy(environ) and (asked or "NUM_INFERENCE_NODES" in environ)

    def awaits_policy(self, environ: Mapping[str, str]) -> bool:
        """Return True if a trainer sends the first policy: to one of NUM_INFERENCE_NODES servers, or a registered
        one.
        """
        is_node = environ.get("NUM_INFERENCE_NODES", "0") not in {"", "0"} or self.broker_url is not None
        return self.await_policy or (is_node and self.share_weights is None and self.policy_version is None)

    def engine_seed(self, environ: Mapping[str, str]) -> int:
        """Return the engine's seed: another one for each server of a policy, unless it is given.

        Idle servers with one seed would answer a prompt with the same tokens, and a group would hold them twice.
        """
        is_one_of_several = self.broker_url is not None or self.awaits_policy(environ)
        if not is_one_of_several or "seed" in self.model_fields_set:
            return self.seed
        return zlib.crc32(f"{socket.gethostname()}:{self.port}/{self.server_id}".encode()) >> 1

    def identify(self, boot_id: str, environ: Mapping[str, str], *, encrypted: bool) -> RegistrationIdentity:
        """Return this server as it registers at a broker."""
        awaits = self.awaits_policy(environ)
        scheme: Literal["http", "https"] = "https" if encrypted else "http"
        own_url = None if self.host in EVERYWHERE else f"{scheme}://{host_in_url(self.host)}:{self.port}"
        return RegistrationIdentity(
            server_id=self.server_id or _as_server_id(f"{socket.gethostname()}:{self.port}"),
            boot_id=boot_id,
            first_lease_id=secrets.token_hex(8),
            policy=self.policy,
            mode="fixed" if not awaits else "adapters" if self.enable_lora else "weights",
            url=self.advertise_url or own_url,
            scheme=scheme,
            port=self.port,
        )

    def manifest_directory(self, environ: Mapping[str, str]) -> Path:
        return self.bridge_dir or Path(environ.get("LOGDIR") or ".").resolve()

    def token(self, environ: Mapping[str, str]) -> str | None:
        return given_token(self.bridge_token, environ)

    def stores_token(self, environ: Mapping[str, str]) -> bool:
        """Return True if this user's trainers find the token in a file: one that is given is for those of one run."""
        return self.token(environ) is None and (self.enable_lora or self.awaits_policy(environ))

    def broker_source(self, environ: Mapping[str, str]) -> TokenSource:
        """Return the token that the broker asks for."""
        return TokenSource.settle(self.broker_token, self.broker_token_file, environ, flag="--broker-token-file")

    def warnings(self, *, on_gpu: bool) -> list[str]:
        """Return a sentence for each setting that is valid but often a mistake where vLLM serves from a GPU, or not."""
        if self.enable_lora and self.enforce_eager and on_gpu:
            text = (
                "--enforce-eager with --enable-lora gives up the speed of CUDA graphs, and adapters do not need it: "
                "they are copied into buffers that the graphs read; leave --enforce-eager out"
            )
            return [text]
        return []


@dataclass(frozen=True, kw_only=True, slots=True)
class RegistrationIdentity:
    """A server process as it registers at a broker."""

    server_id: str
    boot_id: str
    first_lease_id: str
    policy: str
    mode: ServerMode
    url: str | None
    """The server's address; None: the broker takes the host from which the server calls."""
    scheme: Literal["http", "https"]
    port: int


def _as_server_id(name: str) -> str:
    """Return a name with the characters that a server id may not have replaced."""
    return re.sub(r"[^A-Za-z0-9._:~-]", "-", name).lstrip("-._:~")[:200] or "server"


def read_config(argv: Sequence[str]) -> tuple[ServerConfig, list[str]]:
    """Return the server's own options, and the arguments left for vLLM."""
    return load_config_with_rest(ServerConfig, argv, prog=PROG, description=DESCRIPTION, section="vllm")


def vllm_arguments(config: ServerConfig, rest: Sequence[str], *, on_cpu: bool) -> list[str]:
    """Return the command line for vLLM's own parser."""
    off_by_default = {name for name, field in ServerConfig.model_fields.items() if field.default is False}
    values: dict[str, Any] = {
        name: value
        for name, value in config.model_dump(exclude=set(_OWN_FIELDS)).items()
        if value is not None and not (value is False and name in off_by_default)
    }
    values["seed"] = config.engine_seed(os.environ)
    values.setdefault("disable_uvicorn_access_log", True)
    values.setdefault("max_logprobs", MOST_LOGPROBS)
    if config.enable_lora:
        values["max_loras"] = config.adapter_slots
        # Kept in host memory, so that an old adapter with a long request is not read again each time it is evicted.
        values.setdefault("max_cpu_loras", _HOST_ADAPTERS_PER_SLOT * config.adapter_slots)
    if on_cpu:
        values.setdefault("enforce_eager", True)
        values.setdefault("kv_cache_memory_bytes", kv_budget_on_cpu(config.gpu_memory_utilization))
    elif config.gpu_memory_utilization is not None:
        values["gpu_memory_utilization"] = config.gpu_memory_utilization
    return [*as_arguments(values), *rest]


def with_head_dtype(overrides: Any, head_dtype: str) -> Any:
    """Return vLLM's `hf_overrides` with the dtype of the output head, unless they name one already.

    vLLM's own head rounds the logits to the model's dtype: logits of 16 to 32 are 0.125 apart in bf16. The trainer
    keeps fp32 from the head on, so each logprob would carry that rounding.
    """
    if head_dtype == "auto" or not isinstance(overrides, dict | None):
        return overrides
    return {"head_dtype": head_dtype, **(overrides or {})}


def kv_budget_on_cpu(share: float | None) -> int:
    """Return the bytes of KV cache on a CPU: a share of one GiB, where vLLM would take that share of all memory."""
    return int(_GIBIBYTE * (share if share is not None else 0.5))


def prepare_environment(
    environ: dict[str, str] | os._Environ[str], *, model_is_local: bool, devices: Path = DEVICES
) -> None:
    """Set the variables that vLLM, torch and Triton read when they are imported; those that the user has set stay."""
    environ.setdefault("OMP_NUM_THREADS", "1")  # with the worker inside the engine core, vLLM binds no threads
    environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    environ.setdefault(
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "120"
    )  # the default of 5 s breaks clients that reuse connections
    # vLLM binds one worker to each NUMA node, and refuses to start more workers than there are nodes. On a CPU only.
    environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if serves_from_gpu(environ, devices):
        for name, value in _ON_A_GPU.items():
            environ.setdefault(name, value)
    else:
        # Otherwise the sampler compiles small kernels even in eager mode: 20 s, and it needs a C++ compiler.
        environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if model_is_local:
        environ.setdefault("HF_HUB_OFFLINE", "1")
    if (allowed := environ.get("VLLM_PLUGINS")) is not None and PLUGIN not in allowed.split(","):
        environ["VLLM_PLUGINS"] = ",".join(filter(None, [allowed, PLUGIN]))
