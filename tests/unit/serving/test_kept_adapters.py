"""Adapters that vLLM has evicted are loaded again as they were, and no two adapters have one number."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from example_trainer.serving import adapters as serving_adapters
from example_trainer.serving.adapters import Adapters

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"  # in vLLM's imports
)


def read(_, request):
    """Load as vLLM does: the content is that of the path at the time of the call."""
    directory = Path(request.lora_path)
    return (directory / "adapter_config.json").read_text(), (directory / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize("then", ["gone", "of another adapter"])
def test_an_evicted_adapter_is_loaded_from_what_its_directory_held(then, tmp_path):
    """The engine ended at an adapter whose directory was gone, and answered with another that had come to it."""
    from vllm.lora.request import LoRARequest

    from example_trainer.serving.vllm.adapter_worker import AdapterWorker, kept_by, load_from_directory

    directory = tmp_path / "adapter"
    directory.mkdir()
    (directory / "adapter_config.json").write_text("first")
    (directory / "adapter_model.safetensors").write_bytes(b"tensors")
    (directory / "optimizer.pt").write_bytes(b"not read by vLLM")
    manager, request = SimpleNamespace(remove_adapter=lambda _: True), LoRARequest("a", 7, str(directory))
    first = load_from_directory(read, manager, request)
    shutil.rmtree(directory)
    if then != "gone":
        directory.mkdir()
        (directory / "adapter_config.json").write_text("second")
        (directory / "adapter_model.safetensors").write_bytes(b"others")
    assert load_from_directory(read, manager, request) == first == ("first", b"tensors")
    assert (kept_by(manager).disk_loads, kept_by(manager).files[7].keys()) == (
        1,
        {"adapter_config.json", "adapter_model.safetensors"},
    )
    if then != "gone":
        later = LoRARequest("b", 8, str(directory))
        assert load_from_directory(read, manager, later) == ("second", b"others"), "a new adapter from the same path"
    worker = AdapterWorker()
    worker.model_runner = SimpleNamespace(lora_manager=manager)
    worker.atropos_drop_adapter(7, str(directory))
    assert 7 not in kept_by(manager).files


@pytest.mark.anyio
async def test_an_adapter_of_the_command_line_is_served_and_keeps_its_number(tmp_path):
    """vLLM numbers those of `--lora-modules` from 1: the first one loaded here was answered with the first of those."""
    from vllm.lora.request import LoRARequest

    (tmp_path / "adapter_config.json").write_text("{}")
    given = LoRARequest("given", 1, "/given")
    called = []

    async def call_worker(method, *arguments):
        called.append((method, *arguments))
        return {"adapts_head": True}

    engine = SimpleNamespace(call_worker=call_worker)
    models = SimpleNamespace(lora_requests={"given": given})
    adapters = Adapters(engine, models, enabled=True, model_names=["m"], boot_id="b", keep=4)
    assert adapters.named("given").request is given
    assert engine.serves_adapter("given")
    await adapters.load("loaded", str(tmp_path), None, activate=False)
    numbers = [adapters.named(name).request.lora_int_id for name in ("given", "loaded")]
    assert numbers[1] > 1000 > numbers[0]
    assert called == [("atropos_load_adapter", "loaded", numbers[1], str(tmp_path))]
    assert [engine.adapts_head(name) for name in ("given", "loaded", "unknown")] == [False, True, False]


@pytest.mark.anyio
async def test_an_adapter_of_the_command_line_that_changes_the_output_head_is_known_for_it():
    """Its prompt logprobs were answered on a GPU, where vLLM computes them without that part of it."""
    from vllm.lora.request import LoRARequest

    called = []

    async def call_worker(method, name, number, path):
        called.append((method, name, number, path))
        return {"adapts_head": name == "with"}

    engine = SimpleNamespace(call_worker=call_worker)
    given = {name: LoRARequest(name, number, f"/{name}") for number, name in enumerate(("with", "without"), 1)}
    models = SimpleNamespace(lora_requests=given)
    adapters = Adapters(engine, models, enabled=True, model_names=["m"], boot_id="b", keep=4)
    await adapters.look_at_given()
    assert called == [("atropos_load_adapter", "with", 1, "/with"), ("atropos_load_adapter", "without", 2, "/without")]
    assert [engine.adapts_head(name) for name in ("with", "without")] == [True, False]
    assert adapters.named("with").request is given["with"]


@pytest.mark.anyio
async def test_a_retired_adapter_is_dropped_only_if_it_was_unused_at_two_looks(monkeypatch):
    """A stop string ends a request for vLLM's server a moment before its engine hears of it."""
    from vllm.lora.request import LoRARequest

    monkeypatch.setattr(serving_adapters, "_LOOK_SECONDS", 0)
    looks, told = [{"a"}, set(), {"a"}, set(), set(), {"a"}], []

    async def call_worker(method, *_):
        told.append((method, len(looks)))
        return {}

    engine = SimpleNamespace(
        adapters_in_use=lambda: looks.pop(0), call_worker=call_worker, forget_adapter=lambda _: None
    )
    models = SimpleNamespace(lora_requests={"a": LoRARequest("a", 1, "/a")})
    adapters = Adapters(engine, models, enabled=True, model_names=["m"], boot_id="b", keep=4)
    await adapters.unload("a")
    await adapters._dropping
    assert told == [("atropos_drop_adapter", 1)]
    assert adapters.status()["retired"] == []
