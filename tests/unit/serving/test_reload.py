"""A running server reads a checkpoint under its own fence, however long that takes, and never while it sleeps."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from example_trainer.serving import state as server_state
from example_trainer.serving.config import ServerConfig
from example_trainer.serving.fence import Fence
from example_trainer.serving.problems import Problem
from example_trainer.serving.state import ServerState
from example_trainer.serving.vllm.patches import end_broken_reload
from example_trainer.weight_protocol.checkpoint_files import CheckpointFile, CheckpointSource

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),  # in vLLM
]


class ReadingEngine:
    """An engine with the calls that a reload and sleep need; it reads a checkpoint for `seconds`."""

    def __init__(self):
        self.read, self.seconds, self.missed, self.async_llm = [], 0.0, [], self
        self.lacking = None

    async def call_workers(self, method, path, lacking):
        assert method == "atropos_reload"
        self.read.append(path)
        self.lacking = lacking
        await asyncio.sleep(self.seconds)
        return [{"missed": []}, {"missed": self.missed}, {"missed": self.missed}]

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
        adapters=SimpleNamespace(active=None, changing=asyncio.Lock()),
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


@pytest.mark.parametrize(("held", "is_served"), [(["a"], False), (["a", "b"], True)], ids=["a part", "all"])
async def test_no_version_is_served_of_which_a_part_comes_from_the_version_before(state, tmp_path, held, is_served):
    """VLLM leaves the parameters that a checkpoint lacks as they are, for instance while it is still being copied."""
    save_file({name: torch.zeros(1) for name in held}, tmp_path / "model.safetensors")
    state.checkpoint_shapes, state.engine.missed = {"a": (1,), "b": (1,)}, ["b"]
    if is_served:  # what vLLM calls its parameters need not be what a checkpoint that has all tensors calls them
        await state.reload(str(tmp_path), 2, drain_seconds=0.0)
    else:
        with pytest.raises(Problem, match="1 of the model's parameters are not in it: b"):
            await state.reload(str(tmp_path), 2, drain_seconds=0.0)
    assert (state.fence.policy_version, state.fence.torn) == ((2, False) if is_served else (None, True))
    assert state.engine.lacking == ({} if is_served else {"b": (1,)}), "the worker asks the model if it needs them"


class FusedLayer(torch.nn.Module):
    """A layer with three tensors of a checkpoint in one parameter, as vLLM has q, k and v."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        self.qkv.weight_loader = self.load

    def load(self, param, weight, part):
        param.data.narrow(0, part, 1).copy_(weight)


class FusedModel(torch.nn.Module):
    """A model that vLLM reloads."""

    def __init__(self):
        super().__init__()
        from vllm.model_executor.model_loader.reload import layerwise

        self.layer, self._vllm = FusedLayer(), layerwise
        layerwise.record_metadata_for_reloading(self)

    def reload(self, *weights):
        self._vllm.initialize_layerwise_reload(self)
        parameter = dict(self.named_parameters())["layer.qkv"]
        for part, weight in enumerate(weights):
            parameter.weight_loader(parameter, torch.tensor([weight]), part)
        if len(weights) < 3:
            raise OSError("the disk is gone")
        self._vllm.finalize_layerwise_reload(self, SimpleNamespace(dtype=torch.float32))


def test_after_a_reload_that_broke_off_the_next_one_is_whole():
    """VLLM counted what had arrived before: the last part of a fused parameter was then dropped."""
    model = FusedModel()
    model.reload(1.0, 2.0, 3.0)
    with pytest.raises(OSError, match="the disk is gone"):
        model.reload(4.0)
    end_broken_reload(model)
    assert model.layer.qkv.tolist() == [1.0, 2.0, 3.0]
    model.reload(7.0, 8.0, 9.0)
    assert model.layer.qkv.tolist() == [7.0, 8.0, 9.0]
