"""A stand-in for the vLLM server, for tests: its shared tensors and bridge protocol, without vLLM.

Weights are laid out as vLLM lays them out (fused qkv and gate_up, padded vocabulary, transposed
Conv1D) in a real shared-memory segment, and logprobs come from a Hugging Face forward that reads
them there, so that a wrong slice or a torn write shows as it would with the real server.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from example_trainer.model import PolicyOptions, load_policy
from example_trainer.weights.layout import ParamMapping, Piece, TensorMap
from example_trainer.weights.manifest import BridgeManifest, process_start_time, write_manifest
from example_trainer.weights.segment import PosixSegment
from example_trainer.weights.tensor_map import map_parameters
from example_trainer.weights.versions import SegmentHeader, SharedFile

_FUSED = (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj")))
_VOCABULARY_PADDING = 64


class FakeServer:
    """One start of a server: tensors in shared memory, a manifest, and answers to bridge requests."""

    def __init__(self, model: Path, manifest_dir: Path, *, dtype: str = "float32", url: str = "") -> None:
        self.boot_id = secrets.token_hex(8)
        self.policy_version: int | None = None
        self.open_publish: str | None = None
        self.last_end: tuple[str, dict[str, Any]] | None = None
        self.drop_next_answer_to: str | None = None
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.generated_tokens = 0
        self._segment = PosixSegment(self.boot_id)
        self._header_file = SharedFile.create(self.boot_id, "header", SegmentHeader.nbytes())
        self.header = SegmentHeader.initialise(self._header_file.path)
        self._model = load_policy(
            PolicyOptions(model_name=str(model), dtype=dtype, device="cpu", master_weights="none")
        )
        self.manifest = self._export(str(model), dtype, url)
        self.manifest_path = write_manifest(self.manifest, manifest_dir)
        storages = {storage.id: self._segment.attach(storage.handle) for storage in self.manifest.storages}
        self._model.attach(map_parameters(self._model.module, self.manifest, storages), forwards_from_masters=False)

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and JSON for a request."""
        self.requests.append((path, body))
        route = path.rpartition("/bridge/")[2] if "/bridge/" in path else path.strip("/")
        handlers = {
            "info": self._info,
            "publish/begin": self._begin,
            "publish/renew": lambda _: (200, {}),
            "publish/end": self._end,
            "publish/abort": self._abort,
            "generate": self._generate,
            "debug": self._debug,
        }
        handler = handlers.get(route)
        return handler(body) if handler else (404, {"detail": f"no such route: {path}"})

    def stop(self) -> None:
        self.header.close()
        self._header_file.remove()
        self._segment.close()

    def _info(self, _: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        state = self.header.state()
        return 200, {
            "model": self.manifest.model,
            "boot_id": self.boot_id,
            "sharing": True,
            "policy_version": self.policy_version,
            "manifest_path": str(self.manifest_path),
            "paused": self.open_publish is not None,
            "torn": state.torn,
            "dtype": self.manifest.dtype,
            "max_model_len": 256,
            "lora": False,
        }

    def _begin(self, _: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.open_publish is not None:
            return 409, {"detail": "another publish is open"}
        self.open_publish = secrets.token_hex(4)
        return 200, {
            "publish_id": self.open_publish,
            "drained": 0,
            "paused_requests": 0,
            "pause_seconds": 0.0,
            "generated_tokens_total": self.generated_tokens,
        }

    def _end(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.last_end is not None and body.get("publish_id") == self.last_end[0]:
            return 200, self.last_end[1]
        state = self.header.state()
        if body.get("publish_id") != self.open_publish or state.torn or state.version != body.get("version"):
            return 409, {"detail": f"the header says {state}, the request {body}"}
        self.open_publish = None
        self.policy_version = int(body["version"])
        answer = {"version": self.policy_version, "recomputed_tokens": 0, "fence_seconds": 0.001}
        self.last_end = (body["publish_id"], answer)
        return 200, answer

    def _abort(self, _: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.open_publish = None
        return 200, {}

    @torch.no_grad()
    def _generate(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Random continuations with the logprobs that the shared weights give them now."""
        if self.policy_version is None or self.header.state().torn:
            return 503, {"detail": "no policy"}
        prompt = list(body["prompt"]["prompt_token_ids"])
        count, length = int(body.get("n", 1)), int(body["max_tokens"])
        outputs = torch.randint(int(self._model.hf_config.vocab_size), (count, length))
        tokens = torch.cat([torch.tensor(prompt).expand(count, -1), outputs], dim=1)
        logits = self._model.module(input_ids=tokens).logits[:, len(prompt) - 1 : -1].float()
        logprobs = logits.log_softmax(-1).gather(-1, outputs[..., None]).squeeze(-1)
        self.generated_tokens += outputs.numel()
        return 200, {
            "token_ids": outputs.tolist(),
            "logprobs": logprobs.tolist(),
            "policy_versions": [[[0, length, self.policy_version]]] * count,
            "finish_reasons": ["length"] * count,
            "boot_id": self.boot_id,
        }

    def _debug(self, _: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        total = hashlib.blake2b(digest_size=16)
        for name in sorted(self._parameters):
            data: Any = self._parameters[name].detach().contiguous().flatten().view(torch.uint8).numpy()
            total.update(hashlib.blake2b(data, digest_size=16).digest())
        return 200, {"checksum": total.hexdigest()}

    def _export(self, model: str, dtype: str, url: str) -> BridgeManifest:
        weights = {name: tensor.clone() for name, tensor in self._model.checkpoint_tensors().items()}
        transposed = {name for name in weights if ".c_" in name and name.endswith(".weight")}  # GPT-2's Conv1D
        parameters, sources = _lay_out_as_vllm(weights, transposed)
        exported = self._segment.export(parameters)
        self._parameters, handle = parameters, exported.storages[0].handle
        tensors = {}
        for name, (parameter, first_row) in sources.items():
            home = exported.placements[parameter]
            tensors[name] = _trace(weights[name], home.offset, home.stride, first_row, name in transposed)
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


def _lay_out_as_vllm(
    weights: Mapping[str, torch.Tensor], transposed: set[str]
) -> tuple[dict[str, torch.Tensor], dict[str, tuple[str, int]]]:
    """The parameters as vLLM has them, and for each checkpoint tensor the parameter and row where it begins."""
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


def _trace(weight: torch.Tensor, offset: int, stride: tuple[int, ...], first_row: int, transposed: bool) -> TensorMap:
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


class ServedFake:
    """A `FakeServer` on a port, which can be restarted there as a crashed server would be."""

    def __init__(self, model: Path, manifest_dir: Path, *, dtype: str = "float32") -> None:
        self._settings = (model, manifest_dir, dtype)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply({})

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                self._reply(json.loads(self.rfile.read(length) or b"{}"))

            def _reply(self, body: dict[str, Any]) -> None:
                status, answer = outer.server.answer(self.path, body)
                if outer.server.drop_next_answer_to == self.path:
                    outer.server.drop_next_answer_to = None
                    self.close_connection = True
                    return
                data = json.dumps(answer).encode()
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
        self.server = self._start()
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def restart(self) -> None:
        """As after a crash: new tensors with the base weights, another boot id, no version."""
        self.server.stop()
        self.server = self._start()

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
        self.server.stop()

    def _start(self) -> FakeServer:
        model, manifest_dir, dtype = self._settings
        return FakeServer(model, manifest_dir, dtype=dtype, url=self.url)


@contextmanager
def served_fake(model: Path, manifest_dir: Path, *, dtype: str = "float32") -> Iterator[ServedFake]:
    """A fake server for the length of the block."""
    served = ServedFake(model, manifest_dir, dtype=dtype)
    try:
        yield served
    finally:
        served.close()
