"""A stand-in for the vLLM server without vLLM, for tests of the weight bridges.

`FakeServer` has its weights in vLLM's layout (fused qkv and gate_up, padded vocabulary, transposed Conv1D; each piece
traced) in a real shared-memory segment, and a Hugging Face forward reads them there for the logprobs, so that a wrong
slice or a torn write shows as it would with the real server. Its fence is the server's own, over an engine that decodes
step by step: leases, lapses and aborts are real. `config_of` is a trainer's configuration for a server.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import torch

from example_trainer.config import TrainingConfig
from example_trainer.model import load_policy
from example_trainer.modeling.loading import PolicyOptions
from example_trainer.serving.admission import AdmissionGate
from example_trainer.serving.fence import Fence
from example_trainer.serving.problems import PROBLEM_PREFIX, Problem
from example_trainer.serving.testing import StubEngine
from example_trainer.weight_protocol.checksums import combined_checksum
from example_trainer.weight_protocol.manifest import BridgeManifest, process_start_time, write_manifest
from example_trainer.weight_protocol.segment import PosixSegment
from example_trainer.weight_protocol.shm_header import ParamMapping, Piece, SegmentHeader, SharedFile, TensorMap
from example_trainer.weights.tensor_map import map_parameters

_FUSED = (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj")))
_VOCABULARY_PADDING = 64


def lay_out_as_vllm(
    weights: Mapping[str, torch.Tensor], transposed: set[str]
) -> tuple[dict[str, torch.Tensor], dict[str, tuple[str, int]]]:
    """Return the parameters in vLLM's layout, and for each checkpoint tensor its parameter and first row."""
    gathered: dict[str, list[torch.Tensor]] = {}
    sources: dict[str, tuple[str, int]] = {}
    for name, weight in weights.items():
        parameter = name
        for fused, parts in _FUSED:
            for part in parts:
                parameter = parameter.replace(part, fused)
        rows = gathered.setdefault(parameter, [])
        sources[name] = (parameter, sum(len(row) for row in rows))
        rows.append(weight.t().contiguous() if name in transposed else weight)
    parameters = {name: torch.cat(rows) for name, rows in gathered.items()}
    vocabulary = {name for name in parameters if name.endswith(("embed_tokens.weight", "lm_head.weight", "wte.weight"))}
    parameters.update({name: _pad_rows(parameters[name]) for name in vocabulary})
    return parameters, sources


def _pad_rows(weight: torch.Tensor) -> torch.Tensor:
    missing = -len(weight) % _VOCABULARY_PADDING
    return torch.cat([weight, weight.new_zeros(missing, *weight.shape[1:])])


def trace(weight: torch.Tensor, offset: int, stride: tuple[int, ...], first_row: int, transposed: bool) -> TensorMap:
    source = weight.t() if transposed else weight
    piece = Piece(
        storage="0",
        offset=offset + first_row * stride[0],
        shape=list(source.shape),
        stride=list(stride),
        source_offset=0,
        source_shape=list(source.shape),
        source_stride=list(source.stride()),
    )
    return TensorMap(pieces=[piece], shape=list(weight.shape), dtype=str(weight.dtype).removeprefix("torch."))


Moment = Literal["request", "answer"]

T = TypeVar("T")
WHOLE_OUTPUT = 1 << 20
"""Tokens per step that are enough to compute any output in one step."""


class LoopThread:
    """An event loop in its own thread, for calls from other threads."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake-server", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """Cancel all running tasks, and stop the thread."""
        self.call(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class FakeServer:
    """One start of a server: tensors in shared memory, a manifest, and answers to bridge requests."""

    def __init__(
        self,
        model: Path,
        manifest_dir: Path,
        *,
        dtype: str = "float32",
        url: str = "",
        step_tokens: int = WHOLE_OUTPUT,
        step_seconds: float = 0.0,
    ) -> None:
        self.boot_id = secrets.token_hex(8)
        self.lost: dict[str, Moment] = {}
        """By path, the lost part of the next exchange: the connection breaks before or after it was carried out."""
        self.on_exchange: Callable[[str, Moment], None] = lambda *_: None
        """Called with the path of each request when it arrives, and before its answer is sent."""
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self._segment = PosixSegment(self.boot_id)
        self._header_file = SharedFile.create(self.boot_id, "header", SegmentHeader.nbytes())
        self.header = SegmentHeader.initialise(self._header_file.path)
        self._model = load_policy(PolicyOptions(model_name=str(model), dtype=dtype, device="cpu"))
        self.manifest = self._export(str(model), dtype, url)
        self.manifest_path = write_manifest(self.manifest, manifest_dir)
        storages = {storage.id: self._segment.attach(storage.handle) for storage in self.manifest.storages}
        self._model.attach(map_parameters(self._model.module, self.manifest, storages), forwards_from_masters=False)
        self._thread = LoopThread()
        self._gate = AdmissionGate()
        self.engine, self.fence = self._thread.call(self._make_fence(step_tokens, step_seconds))

    @property
    def policy_version(self) -> int | None:
        return self.fence.policy_version

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return status and JSON for a request."""
        self.requests.append((path, body))
        self.on_exchange(path, "request")
        answer = self._answer(path, body)
        self.on_exchange(path, "answer")
        return answer

    def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        route = path.rpartition("/bridge/")[2] if "/bridge/" in path else path.strip("/")
        handlers = {
            "info": self._info,
            "publish/begin": self._begin,
            "publish/renew": self._renew,
            "publish/end": self._end,
            "publish/abort": self._abort,
            "resume": self._resume,
            "generate": self._generate,
            "debug?checksum=true": self._debug,
        }
        if route not in handlers:
            return 404, {"detail": f"no such route: {path}"}
        try:
            return 200, self._thread.call(handlers[route](body))
        except Problem as problem:
            return problem.status, {"type": PROBLEM_PREFIX + problem.kind, "detail": problem.detail}
        except RuntimeError as error:
            return 500, {"detail": str(error)}

    def wait_until_lapsed(self, limit_seconds: float = 10.0) -> None:
        """Return once no publish is under way: a lease that is not renewed has to run out."""
        deadline = time.monotonic() + limit_seconds
        while self.fence.publishing:
            if time.monotonic() > deadline:
                raise TimeoutError(f"a publish is still under way after {limit_seconds:g} s")
            time.sleep(0.002)

    def stop(self) -> None:
        self._thread.close()
        self.header.close()
        self._header_file.remove()
        self._segment.close()

    async def _make_fence(self, step_tokens: int, step_seconds: float) -> tuple[StubEngine, Fence]:
        engine = StubEngine(step_tokens=step_tokens, step_seconds=step_seconds)
        return engine, Fence(engine, self._gate, header=self.header)

    async def _info(self, _: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": self.manifest.model,
            "boot_id": self.boot_id,
            "sharing": True,
            "policy_version": self.fence.policy_version,
            "manifest_path": str(self.manifest_path),
            "paused": self.fence.paused,
            "torn": self.fence.torn,
            "publishing": self.fence.publishing,
            "dtype": self.manifest.dtype,
            "max_model_len": 256,
            "lora": False,
        }

    async def _begin(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self.fence.begin(**body)

    async def _renew(self, body: dict[str, Any]) -> dict[str, Any]:
        return self.fence.renew(**body)

    async def _end(self, body: dict[str, Any]) -> dict[str, Any]:
        return dict(await self.fence.end(**body))

    async def _abort(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self.fence.abort(**body)

    async def _resume(self, _: dict[str, Any]) -> dict[str, Any]:
        await self.fence.release()
        return {"is_paused": self.fence.paused}

    async def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return random continuations with the logprobs that the shared weights give them at each step."""
        await self._gate.enter()
        try:
            prompt = list(body["prompt"]["prompt_token_ids"])
            count, length = int(body.get("n", 1)), int(body["max_tokens"])
            outputs = torch.randint(int(self._model.hf_config.vocab_size), (count, length))
            tokens = torch.cat([torch.tensor(prompt).expand(count, -1), outputs], dim=1)
            logprobs: list[list[float]] = [[] for _ in range(count)]

            def compute(start: int, end: int) -> None:
                found = self._logprobs(tokens[:, : len(prompt) + end], end - start)
                for row, more in zip(logprobs, found, strict=True):
                    row.extend(more)

            spans = await self.engine.decode(length, compute)
        finally:
            self._gate.leave()
        return {
            "token_ids": outputs.tolist(),
            "logprobs": logprobs,
            "policy_versions": [spans] * count,
            "finish_reasons": ["length"] * count,
            "boot_id": self.boot_id,
        }

    @torch.no_grad()
    def _logprobs(self, tokens: torch.Tensor, last: int) -> list[list[float]]:
        """Return the logprobs of the last tokens of each row, under the present shared weights."""
        logits = self._model.module(input_ids=tokens).logits[:, -last - 1 : -1].float()
        found: list[list[float]] = logits.log_softmax(-1).gather(-1, tokens[:, -last:, None]).squeeze(-1).tolist()
        return found

    async def _debug(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"checksum": combined_checksum(self._parameters)}

    def _export(self, model: str, dtype: str, url: str) -> BridgeManifest:
        stored = self._model.checkpoint_tensors(self._model.dtype)
        weights = {name: tensor.clone() for name, tensor in stored.items()}
        transposed = {name for name in weights if ".c_" in name and name.endswith(".weight")}  # GPT-2's Conv1D
        parameters, sources = lay_out_as_vllm(weights, transposed)
        exported = self._segment.export(parameters)
        self._parameters, handle = parameters, exported.storages[0].handle
        tensors = {}
        for name, (parameter, first_row) in sources.items():
            home = exported.placements[parameter]
            tensors[name] = trace(weights[name], home.offset, home.stride, first_row, name in transposed)
        return BridgeManifest(
            model=model,
            param_mappings={
                name: ParamMapping(
                    ipc_handle=handle | {"offset": place.offset, "stride": list(place.stride)},
                    shape=list(place.shape),
                    dtype=dtype,
                )
                for name, place in exported.placements.items()
            },
            boot_id=self.boot_id,
            pid=os.getpid(),
            pid_start_time=process_start_time(os.getpid()) or 0.0,
            url=url,
            bridge_token=secrets.token_hex(8),
            device="cpu",
            dtype=dtype,
            header_path=str(self._header_file.path),
            storages=exported.storages,
            tensors=tensors,
            tied={"lm_head.weight": "model.embed_tokens.weight"} if "lm_head.weight" not in weights else {},
            unmapped=[],
            vllm_version="fake",
            created_at=time.time(),
        )


class ServedFake:
    """A `FakeServer` on a port, which can be restarted there as after a crash."""

    def __init__(self, model: Path, manifest_dir: Path, **settings: Any) -> None:
        self._model, self._manifest_dir, self._settings = model, manifest_dir, settings
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply({})

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                self._reply(json.loads(self.rfile.read(length) or b"{}"))

            def _reply(self, body: dict[str, Any]) -> None:
                server = outer.server
                lost = server.lost.pop(self.path, None)
                if lost != "request":
                    status, answer = server.answer(self.path, body)
                if lost is not None:
                    self.close_connection = True
                    return
                data = json.dumps(answer).encode()
                with suppress(ConnectionError):  # the client may have been killed
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                return None

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self.server = self.start()
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def restart(self) -> None:
        """Restart as after a crash: new tensors with the base weights, another boot id, no version."""
        self.server.stop()
        self.server = self.start()

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
        self.server.stop()

    def start(self) -> FakeServer:
        return FakeServer(self._model, self._manifest_dir, url=self.url, **self._settings)


@contextmanager
def served_fake(model: Path, manifest_dir: Path, **settings: Any) -> Iterator[ServedFake]:
    """Run a fake server, with the settings of `FakeServer`, inside the block."""
    served = ServedFake(model, manifest_dir, **settings)
    try:
        yield served
    finally:
        served.close()


def config_of(url: str, model: str | Path, **changes: Any) -> TrainingConfig:
    """Return the configuration of a trainer of `model` whose server is at `url`.

    It is of mode `shared_vllm` and checks the first publish to each server, unless `changes` say otherwise.
    """
    address = urlsplit(url)
    usual = {"model_name": str(model), "vllm_host": address.hostname, "vllm_port": address.port}
    return TrainingConfig.model_validate(usual | {"weight_bridge_mode": "shared_vllm", "sync_check": "off"} | changes)
