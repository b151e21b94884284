"""A real vLLM server for the tests of this folder: one start per configuration and session, on a tiny random model."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from example_trainer.processes.cleanup import SHARED_MEMORY, mapped_files
from example_trainer.processes.ports import free_port
from example_trainer.weight_protocol.manifest import BridgeManifest, load_manifest
from example_trainer.weight_protocol.shm_header import SegmentHeader

from . import executors, publishing

REPOSITORY = Path(__file__).resolve().parents[2]
VOCABULARY = 300
CONTEXT = 4096
START_LIMIT_SECONDS = 180.0
CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Qwen2 in fp32 with a byte-level tokenizer."""
    directory = tmp_path_factory.mktemp("models") / "tiny-qwen2"
    make_tiny_qwen2(directory)
    return directory


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """With ATROPOS_EXECUTORS=all, run the tests of the servers and of the weights with each way to run the engine."""
    folder = metafunc.definition.path.parent.name
    has_own = metafunc.definition.path.name in {"test_executors.py", "test_tensor_parallel.py"}
    if executors.LONG and folder in {"serving", "weights"} and "executor" in metafunc.fixturenames and not has_own:
        metafunc.parametrize("executor", list(executors.EXECUTORS), indirect=True, scope="session")


@pytest.fixture(scope="session")
def executor(request: pytest.FixtureRequest) -> Iterator[str]:
    """The way to run the engine, for all servers started from now on; vLLM's own for a CPU by default."""
    name = getattr(request, "param", executors.DEFAULT)
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in executors.environment(name).items():
            patch.setenv(variable, value)
        yield name


@pytest.fixture(scope="session")
def start_server(
    executor: str, tiny_qwen2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., VllmServer]]:
    """Starts servers that are stopped with the session."""
    servers: list[VllmServer] = []

    def start(
        *flags: str,
        model: Path | None = None,
        port: int | None = None,
        launcher: Sequence[str] | None = None,
        environ: dict[str, str] | None = None,
    ) -> VllmServer:
        directory = tmp_path_factory.mktemp("server")
        server = VllmServer.start(
            model or tiny_qwen2, directory, flags, port=port, launcher=launcher, environ=environ or {}
        )
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def shared_server(start_server: Callable[..., VllmServer]) -> VllmServer:
    """A server that shares its weights, one version published."""
    server = start_server("--share-weights")
    server.publish()
    return server


@pytest.fixture(scope="session")
def plain_server(start_server: Callable[..., VllmServer]) -> VllmServer:
    """A server whose weights do not change, started as version 7; it reads long prompts in parts."""
    return start_server("--policy-version", "7", "--max-num-batched-tokens", "256")


@dataclass
class VllmServer:
    """A running server, and a trainer's side that only writes into its tensors."""

    process: subprocess.Popen[bytes]
    url: str
    log_path: Path
    directory: Path
    model: Path
    client: httpx.Client = field(repr=False)
    views: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def start(
        cls,
        model: Path,
        directory: Path,
        flags: Sequence[str],
        *,
        port: int | None = None,
        launcher: Sequence[str] | None = None,
        environ: dict[str, str],
    ) -> VllmServer:
        port = port or free_port()
        command = [*(launcher or [sys.executable, "-m", "example_trainer.vllm_api_server"])]
        command += ["--model", str(model), "--port", str(port), "--dtype", "float32", "--bridge-dir", str(directory)]
        log_path = directory / "log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [*command, "--kv-cache-memory-bytes", str(64 << 20), *flags],
                cwd=REPOSITORY,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=plain_environment() | environ,
            )
        url = f"http://127.0.0.1:{port}"
        # No connection is closed as surplus: httpcore may close one that a thread has just been given (EBADF, once in
        # 100 publishes under 64 callers).
        # The server closes idle connections after 5 s, which is httpx's limit too: one of them was used at that moment.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
        client = httpx.Client(base_url=url, timeout=120, limits=limits)
        server = cls(process, url, log_path, directory, model, client)
        server.wait_until_healthy()
        return server

    @property
    def manifest_path(self) -> Path:
        return self.directory / "vllm_bridge_config.json"

    @property
    def manifest(self) -> BridgeManifest:
        return load_manifest(self.manifest_path)

    @property
    def version(self) -> int | None:
        return self.info()["policy_version"]

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_LIMIT_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            with contextlib.suppress(httpx.TransportError):
                if self.client.get("/health").status_code == 200:
                    return
            time.sleep(0.1)
        self.stop()
        raise AssertionError(f"the server did not become healthy:\n{self.log_path.read_text()[-4000:]}")

    def info(self) -> dict[str, Any]:
        return self.get("/bridge/info")

    def debug(self) -> dict[str, Any]:
        return self.get("/bridge/debug")

    def checksum(self) -> str:
        headers = {"Authorization": f"Bearer {self.manifest.bridge_token}"}
        answer = self.client.get("/bridge/debug?checksum=true", headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()["checksum"]

    def get(self, path: str) -> dict[str, Any]:
        answer = self.client.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def generate(self, prompt: str | list[int], **fields: Any) -> dict[str, Any]:
        answer = self.post("/generate", {"prompt": prompt, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        return self.client.post(path, json=body, headers=headers)

    def bridge(self, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        token = self.manifest.bridge_token if self.manifest_path.exists() else ""
        return self.post(f"/bridge/{path}", body or {}, Authorization=f"Bearer {token}")

    def begin(self, **fields: Any) -> dict[str, Any]:
        answer = self.bridge("publish/begin", fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def header(self) -> SegmentHeader:
        return SegmentHeader(Path(self.manifest.header_path))

    def publish(
        self, write: Callable[[], object] | None = None, *, version: int | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Make one whole publish, by default of the next version; return the answers of its begin and its end."""
        version = version or (self.version or 0) + 1
        begun = self.begin(**fields)
        header = self.header()
        header.begin_write(version)
        if write is not None:
            write()
        header.end_write(version)
        header.close()
        answer = self.bridge("publish/end", {"publish_id": begun["publish_id"], "version": version})
        assert answer.status_code == 200, answer.text
        return begun | answer.json()

    def weights(self) -> dict[str, Any]:
        """Views into the server's own tensors by checkpoint name, one list of pieces each."""
        if not self.views:
            self.views = attach(self.manifest)
        return self.views

    def write(self, weights: dict[str, Any]) -> None:
        for name, pieces in self.weights().items():
            flat = weights[name].reshape(-1)
            for view, start, count in pieces:
                view.copy_(flat[start : start + count].view(view.shape))

    def kill(self) -> None:
        """Send SIGKILL to the whole group; the next start removes the shared files of its kind that are left."""
        family = [self.process.pid, *(child.pid for child in psutil.Process(self.process.pid).children(recursive=True))]
        mapped = set().union(*map(mapped_files, family))
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)
        self.client.close()
        self.views.clear()
        for name in mapped:
            if name.startswith("sem.mp-"):  # R39: the resource tracker, which would have removed it, is dead too
                (SHARED_MEMORY / name).unlink(missing_ok=True)

    def stop(self) -> None:
        """Stop the server as the launcher does: SIGTERM, a time limit, SIGKILL to the group."""
        self.client.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)


def attach(manifest: BridgeManifest) -> dict[str, Any]:
    import torch

    from example_trainer.weight_protocol.segment import make_segment

    segment = make_segment(manifest.device)
    storages = {storage.id: segment.attach(storage.handle) for storage in manifest.storages}
    views: dict[str, Any] = {}
    for name, entry in manifest.tensors.items():
        dtype = getattr(torch, entry.dtype)
        views[name] = [
            (
                torch.empty(0, dtype=dtype).set_(storages[piece.storage], piece.offset, piece.shape, piece.stride),
                piece.source_offset,
                int(torch.Size(piece.shape).numel()),
            )
            for piece in entry.pieces
        ]
    return views


def plain_environment() -> dict[str, str]:
    """Return this process's environment without variables that turn sharing on or redirect files."""
    dropped = {"VLLM_ENABLE_SHARED_WEIGHTS", "NUM_INFERENCE_NODES", "LOGDIR", "ATROPOS_BRIDGE_TOKEN"}
    return {name: value for name, value in os.environ.items() if name not in dropped}


def make_tiny_qwen2(directory: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    pieces = ["<eos>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [f"<extra{number}>" for number in range(VOCABULARY - len(pieces))]
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"eos_token": "<eos>", "unk_token": "<unk>", "chat_template": CHAT_TEMPLATE}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(directory)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        eos_token_id=0,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)  # sharper than an untrained model, so that versions differ clearly
    model.save_pretrained(directory)


@pytest.fixture(scope="session")
def make_reference() -> type[Reference]:
    return Reference


@pytest.fixture(scope="session")
def reference(tiny_qwen2: Path) -> Reference:
    return Reference(tiny_qwen2)


@pytest.fixture(scope="session")
def publishes_under() -> Callable[..., Any]:
    return publishing.publish_under


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., None]:
    return publishing.wait_until


@pytest.fixture(scope="session")
def errors_of(reference: Reference) -> Callable[..., list[float]]:
    return partial(publishing.errors_of, reference)


class Reference:
    """The same model in Hugging Face's implementation, which gives the right logprobs of each version."""

    def __init__(self, directory: Path) -> None:
        import torch
        from transformers import Qwen2ForCausalLM

        self.model = Qwen2ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.base = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def variant(self, number: int) -> dict[str, Any]:
        """Return weights clearly different from those of every other number; 0 is the checkpoint's own."""
        import torch

        if number == 0:
            return self.base
        noise = torch.Generator().manual_seed(number)
        return {
            name: tensor * (1 + 0.2 * torch.randn(tensor.shape, generator=noise)) for name, tensor in self.base.items()
        }

    def logprobs(self, weights: dict[str, Any], prompt: list[int], output: list[int]) -> list[float]:
        """Return the logprob of each output token, given everything before it, under these weights."""
        import torch

        self.model.load_state_dict(weights)
        tokens = torch.tensor([prompt + output])
        with torch.no_grad():
            scores = torch.log_softmax(self.model(tokens).logits[0], dim=-1)
        first = len(prompt) - 1
        return [float(scores[first + index, token]) for index, token in enumerate(output)]
