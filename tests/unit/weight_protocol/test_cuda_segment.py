"""The error of sharing without CUDA IPC names the missing feature and the remedy, and quotes torch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from example_trainer.weight_protocol import segment as module
from example_trainer.weight_protocol.segment import CudaSegment
from example_trainer.weight_protocol.shm_header import SharedMemoryError

TORCHS = "CUDA error: operation not supported\nCUDA kernel errors might be asynchronously reported"
HANDLE = {
    "gpu_uuid": "5a3e",
    "memory": "AA==",
    "size_bytes": 4,
    "offset_bytes": 0,
    "counter": "AA==",
    "counter_offset": 0,
    "event": "AA==",
    "event_required": True,
}


def fail(*_):
    raise RuntimeError(TORCHS)


def tells(error: SharedMemoryError) -> None:
    text = str(error)
    assert "CUDA error: operation not supported. Sharing needs CUDA IPC" in text
    assert "asynchronously" not in text
    for word in ("WSL", "confidential", "exclusive", "--ipc=", "--weight-bridge-mode none"):
        assert word in text


def test_memory_that_cannot_be_mapped_is_reported_with_the_cause_and_the_way_out(monkeypatch):
    monkeypatch.setattr(module, "_device_of_uuid", lambda _: 0)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", fail)
    with pytest.raises(SharedMemoryError, match="the trainer cannot map the server's memory on GPU 5a3e") as raised:
        CudaSegment().attach(HANDLE)
    tells(raised.value)


def test_memory_that_cannot_be_exported_is_reported_in_the_same_way():
    storage = SimpleNamespace(_share_cuda_=fail, data_ptr=lambda: 7)
    tensor = SimpleNamespace(device="cuda:0", untyped_storage=lambda: storage)
    with pytest.raises(SharedMemoryError, match="the server cannot export its memory on cuda:0") as raised:
        CudaSegment().export({"weight": tensor})
    tells(raised.value)


def test_segments_that_grow_are_refused_though_no_variable_asks_for_them(monkeypatch):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        with pytest.raises(SharedMemoryError, match=r"expandable_segments:True.*remove the setting"):
            CudaSegment().export({})
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    assert CudaSegment().export({}).storages == []


def test_a_torch_that_does_not_tell_its_settings_exports(monkeypatch):
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")
    assert CudaSegment().export({}).storages == []
