"""One copy of the weights for two processes: POSIX shared memory on a CPU, CUDA IPC on a GPU, behind one interface.

The server exports the storages of its parameters and describes each by a handle of plain JSON; the trainer turns a
handle into a storage over the same memory. On a CPU the server's tensors are first moved into shared memory, with the
parameter objects unchanged; on a GPU they are not moved, because captured CUDA graphs hold their addresses.
"""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from example_trainer.weight_protocol.shm_header import SharedFile, SharedMemoryError, Storage

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class StridedRegion:
    """The location of a tensor: elements `offset + sum(index * stride)` of a storage. Equal regions are one memory."""

    storage: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """The result of an export: the storages to attach to and each tensor's place in them."""

    storages: list[Storage]
    placements: dict[str, StridedRegion]


class SharedSegment(ABC):
    """Shares tensors with other processes of this user on this machine."""

    @abstractmethod
    def export(self, tensors: Mapping[str, torch.Tensor]) -> Exported:
        """Make the tensors reachable from other processes; several names may share a storage."""

    @abstractmethod
    def attach(self, handle: Mapping[str, Any]) -> torch.UntypedStorage:
        """Return the memory behind a handle that another process exported."""

    @abstractmethod
    def synchronise(self) -> None:
        """Return once other processes can read everything that this thread has written so far."""

    def close(self) -> None:  # noqa: B027  nothing to undo where the memory has another owner
        """Release what `export` allocated."""


class PosixSegment(SharedSegment):
    """Tensors in one file under `/dev/shm`."""

    def __init__(self, boot_id: str) -> None:
        self._boot_id = boot_id
        self._file: SharedFile | None = None

    def export(self, tensors: Mapping[str, torch.Tensor]) -> Exported:
        starts, total = _lay_out(tensors)
        self._file = SharedFile.create(self._boot_id, "weights", total)
        shared = _map_file(self._file.path, total)
        # A tensor may appear under several names, so all places are computed before any tensor is moved.
        placements = {name: _place(tensor, start_bytes=starts[_key(tensor)]) for name, tensor in tensors.items()}
        moves = {id(tensor): (tensor, placements[name]) for name, tensor in tensors.items()}
        for tensor, placement in moves.values():
            view = torch.empty(0, dtype=tensor.dtype).set_(shared, placement.offset, placement.shape, placement.stride)
            view.copy_(tensor.data)
            tensor.data = view
        handle = {"kind": "posix", "path": str(self._file.path), "nbytes": total}
        return Exported(storages=[Storage(id="0", handle=handle, nbytes=total)], placements=placements)

    def attach(self, handle: Mapping[str, Any]) -> torch.UntypedStorage:
        return _map_file(Path(handle["path"]), int(handle["nbytes"]))

    def synchronise(self) -> None:
        """Do nothing: writes to shared memory are visible at once."""

    def close(self) -> None:
        if self._file is not None:
            self._file.remove()
            self._file = None


class CudaSegment(SharedSegment):
    """Tensors that stay in GPU memory and are shared by CUDA IPC handles; the exporter must keep them alive.

    It has not been run with vLLM in this project's own tests, which have no GPU build of vLLM.
    """

    def __init__(self) -> None:
        self._devices: set[torch.device] = set()
        """The GPUs that the storages lie on, which need not be the current one."""

    def export(self, tensors: Mapping[str, torch.Tensor]) -> Exported:
        """Describe each storage; raise `SharedMemoryError` if the driver or torch's allocator cannot share it."""
        _refuse_expandable_segments()
        storages: dict[tuple[str, int], Storage] = {}
        placements: dict[str, StridedRegion] = {}
        for name, tensor in tensors.items():
            if _key(tensor) not in storages:  # a storage's handle can be requested only once
                storages[_key(tensor)] = _describe_cuda_storage(tensor, str(len(storages)))
                self._devices.add(tensor.device)
            placements[name] = _place(tensor, storage=storages[_key(tensor)].id)
        return Exported(storages=list(storages.values()), placements=placements)

    def attach(self, handle: Mapping[str, Any]) -> torch.UntypedStorage:
        """Map a storage of the server's; raise `SharedMemoryError` where the driver offers no CUDA IPC."""
        index = _device_of_uuid(handle["gpu_uuid"])
        self._devices.add(torch.device("cuda", index))
        # The arguments are torch's own, as `torch.multiprocessing.reductions.rebuild_cuda_tensor` passes them.
        arguments = (
            index,
            base64.b64decode(handle["memory"]),
            handle["size_bytes"],
            handle["offset_bytes"],
            base64.b64decode(handle["counter"]),
            handle["counter_offset"],
            base64.b64decode(handle["event"]),
            handle["event_required"],
        )
        try:
            attached: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(*arguments)  # noqa: SLF001  the only way torch offers
        except RuntimeError as error:
            raise _no_cuda_ipc(
                f"the trainer cannot map the server's memory on GPU {handle['gpu_uuid']}", error
            ) from error
        return attached

    def synchronise(self) -> None:
        """Wait for this thread's current stream on each GPU that holds a storage: what writes it is enqueued there.

        Streams of other threads, such as the next step's, are not waited for.
        """
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()


def make_segment(device: str, boot_id: str = "") -> SharedSegment:
    """Return the segment for a device as manifests name it: `cpu`, or a GPU's UUID."""
    return PosixSegment(boot_id) if device == "cpu" else CudaSegment()


def _key(tensor: torch.Tensor) -> tuple[str, int]:
    return (str(tensor.device), tensor.untyped_storage().data_ptr())


def _lay_out(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[tuple[str, int], int], int]:
    """Return a start offset for each distinct storage, one after the other, and the total length, in bytes."""
    starts: dict[tuple[str, int], int] = {}
    end = 0
    for tensor in tensors.values():
        if _key(tensor) not in starts:
            starts[_key(tensor)] = end
            nbytes = tensor.untyped_storage().nbytes()
            end += -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return starts, end


def _place(tensor: torch.Tensor, *, storage: str = "0", start_bytes: int = 0) -> StridedRegion:
    offset = start_bytes // tensor.element_size() + int(tensor.storage_offset())
    return StridedRegion(storage, offset, tuple(tensor.shape), tuple(tensor.stride()))


def _map_file(path: Path, nbytes: int) -> torch.UntypedStorage:
    """Map an existing file after checking its size; torch would create a missing file or extend a short one."""
    try:
        if path.stat().st_size != nbytes:
            raise SharedMemoryError(
                f"{path} does not hold {nbytes} bytes, so it is not the segment that the manifest names"
            )
        mapped = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=nbytes)
    except (OSError, RuntimeError) as error:
        raise SharedMemoryError(
            f"cannot map the shared weights at {path}: {error}; is the vLLM server still running?"
        ) from error
    assert isinstance(mapped, torch.UntypedStorage)
    return mapped


def _describe_cuda_storage(tensor: torch.Tensor, storage_id: str) -> Storage:
    storage: Any = tensor.untyped_storage()
    try:
        shared = storage._share_cuda_()
    except RuntimeError as error:
        raise _no_cuda_ipc(f"the server cannot export its memory on {tensor.device}", error) from error
    (_, memory, size_bytes, offset_bytes, counter, counter_offset, event, event_required) = shared
    handle = {
        "kind": "cuda_ipc",
        "gpu_uuid": str(torch.cuda.get_device_properties(tensor.device).uuid),
        "memory": base64.b64encode(memory).decode(),
        "size_bytes": size_bytes,
        "offset_bytes": offset_bytes,
        "counter": base64.b64encode(counter).decode(),
        "counter_offset": counter_offset,
        "event": base64.b64encode(event).decode(),
        "event_required": event_required,
    }
    return Storage(id=storage_id, handle=handle, nbytes=storage.nbytes())


def _device_of_uuid(uuid: str) -> int:
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return index
    raise SharedMemoryError(f"the server's GPU {uuid} is not visible here; check CUDA_VISIBLE_DEVICES")


def _refuse_expandable_segments() -> None:
    """Raise `SharedMemoryError` if this process's allocator makes expandable segments, by whichever setting.

    A torch without this private call is not asked; the server's own start has looked at the variables that set it.
    """
    ask = getattr(torch._C, "_accelerator_getAllocatorSettings", None)  # noqa: SLF001  torch offers no other way
    settings: str = "" if ask is None else ask()
    if "expandable_segments:true" in settings.lower().replace(" ", ""):
        raise SharedMemoryError(
            f"the server's allocator is set to {settings}, and memory of expandable segments has no handle that the "
            "trainer could map: remove the setting, or train with --weight-bridge-mode none or lora_only"
        )


def _no_cuda_ipc(what: str, error: RuntimeError) -> SharedMemoryError:
    """Return the error for a failed call of CUDA IPC, with the first line of torch's own reason."""
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return SharedMemoryError(
        f"{what}: {reason}. Sharing needs CUDA IPC, which is missing under WSL, in confidential mode, on a GPU in "
        "exclusive mode (nvidia-smi -c 0 ends it), and between containers without common IPC and PID namespaces "
        "(docker run --ipc=container:NAME --pid=container:NAME); change that, or train with --weight-bridge-mode none "
        "or lora_only"
    )
