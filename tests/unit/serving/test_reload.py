"""A running server reads a checkpoint under its own fence, however long that takes, and never while it sleeps."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from example_trainer.serving import state as server_state
from example_trainer.serving.config import ServerConfig
from example_trainer.serving.fence import Fence
from example_trainer.serving.problems import Problem
from example_trainer.serving.state import ServerState
from example_trainer.weight_protocol.checkpoint_files import CheckpointFile, CheckpointSource

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),  # in vLLM
]


class ReadingEngine:
    """An engine with the calls that a reload and sleep need; it reads a checkpoint for `seconds`."""

    def __init__(self):
        self.read, self.seconds, self.async_llm = [], 0.0, self

    async def call_worker(self, method, path):
        assert method == "atropos_reload"
        self.read.append(path)
        await asyncio.sleep(self.seconds)

    async def sleep(self, level, *, mode):
        del level, mode


@pytest.fixture
def state(engine, gate):
    return ServerState(
        config=ServerConfig(model="m", enable_sleep_mode=True),
        boot_id="boot",
        bridge_token="t",
        hostname="h",
        vllm_version="0",
        engine=ReadingEngine(),
        fence=Fence(engine, gate, header=None),
        gate=gate,
        adapters=SimpleNamespace(active=None),
    )


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"")
    return str(tmp_path)


async def test_a_checkpoint_that_is_read_for_longer_than_the_lease_is_served(state, checkpoint, monkeypatch):
    """A lease that ran out meanwhile left the weights torn, though they had been read whole."""
    monkeypatch.setattr(server_state, "_RELOAD_SECONDS", 0.1)
    state.engine.seconds = 0.3
    answer = await state.reload(checkpoint, 2, drain_seconds=0.0)
    assert (answer["version"], state.policy_version, state.fence.torn) == (2, 2, False)


async def test_a_server_that_is_sent_to_sleep_during_a_download_reads_nothing(state, tmp_path, monkeypatch):
    async def download(_, directory):
        (directory / "weights.bin").write_bytes(b"")
        await state.sleep(1)

    monkeypatch.setattr(server_state, "download", download)
    file = CheckpointFile(name="weights.bin", size_bytes=0, digest="0" * 64)
    source = CheckpointSource(files=[file], url="http://h", secret="s" * 8)
    with pytest.raises(Problem) as caught:
        await state.reload(str(tmp_path / "elsewhere"), 2, drain_seconds=0.0, source=source)
    assert (caught.value.kind, state.engine.read) == ("asleep", [])
