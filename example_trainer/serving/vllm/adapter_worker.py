"""A mixin for vLLM's worker: adapters that arrive as tensors are served from memory and never read from a disk.

vLLM loads an adapter by its path, at the first use and again after each eviction. An adapter sent as bytes is kept here
under a path that names no file (`memory:...`), and vLLM's loading looks here first. The content of vLLM's stacked
buffers is then compared with the sent tensors, so that a wrong slice or a missing tensor is found at once. The files of
an adapter loaded from a directory are kept too: the directory may hold other files by the time of an eviction, or be
gone, which ended the engine. Disk loads are counted: there should be one for each adapter that was loaded by path.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import compress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.lora.worker_manager import WorkerLoRAManager

from atropos_api.common.malloc import return_freed_memory
from example_trainer.weight_protocol.transfer import MEMORY_PATH, AdapterPayload

_KEPT = "atropos_kept"
_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""The files of an adapter that vLLM reads."""

Tensors = dict[str, torch.Tensor]


@dataclass(slots=True)
class KeptAdapters:
    """The adapters sent to one worker, by their path, and the files of others, by number.

    `disk_loads` is the number of loads from a disk.
    """

    payloads: dict[str, bytes] = field(default_factory=dict)
    files: dict[int, dict[str, bytes]] = field(default_factory=dict)
    disk_loads: int = 0


@dataclass(frozen=True, slots=True)
class AdapterBuffer:
    """vLLM's buffer of one adapter tensor, `[slots, 1, rows, columns]`, and the scale applied to the tensor.

    `module` is vLLM's layer, and `index` the number of the buffer among the layer's. With tensor parallelism the buffer
    takes a part of the tensor.
    """

    module: Any
    index: int
    scale: float
    is_a: bool

    @property
    def stacked(self) -> torch.Tensor:
        buffers = self.module.lora_a_stacked if self.is_a else self.module.lora_b_stacked
        found: torch.Tensor = buffers[self.index]
        return found

    def own_part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor that vLLM gives to this rank."""
        if self._ranks == 1:
            return tensor
        cut = self.module.slice_lora_a if self.is_a else self.module.slice_lora_b
        buffers = len(self.module.lora_a_stacked)
        if buffers == 1:
            whole: torch.Tensor = cut(tensor)
            return whole
        given: list[torch.Tensor | None] = [None] * buffers
        given[self.index] = tensor
        parts: list[torch.Tensor] = cut(given)
        return parts[self.index]

    def slot(self, number: int, part: torch.Tensor) -> torch.Tensor:
        rows, columns = part.shape
        return self.stacked[number, 0, :rows, :columns]

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor has the buffer's size on the model's side, and at most its rank on the other."""
        rows, columns = self.stacked.shape[-2:]
        if tensor.ndim != 2:
            return False
        part = self.own_part(tensor)
        given, rank = (part.shape[1], part.shape[0]) if self.is_a else (part.shape[0], part.shape[1])
        fits_here = given == (columns if self.is_a else rows) and rank <= (rows if self.is_a else columns)
        return bool(fits_here and self._ends_here(tensor))

    def _ends_here(self, tensor: torch.Tensor) -> bool:
        """Return False on the last rank if vLLM's cut into ranks leaves out the last rows or columns of the tensor."""
        if self._ranks == 1 or self.module.tp_rank != self._ranks - 1:
            return True
        side = 1 if self.is_a else 0
        positions = torch.arange(tensor.shape[side])
        grid = (positions[None] if self.is_a else positions[:, None]).expand(tensor.shape)
        return int(self.own_part(grid).max()) == tensor.shape[side] - 1

    @property
    def _ranks(self) -> int:
        return int(getattr(self.module, "tp_size", 1))


@cache
def install() -> None:
    """Make vLLM's loading of adapters look at the kept ones first, once per process."""
    load = WorkerLoRAManager._load_adapter  # noqa: SLF001  the only function with which vLLM loads an adapter

    def load_adapter(manager: Any, request: Any) -> Any:
        kept = kept_by(manager)
        if not request.lora_path.startswith(MEMORY_PATH):
            return load_from_directory(load, manager, request)
        payload = kept.payloads.get(request.lora_path)
        if payload is None:
            raise ValueError(f"the adapter {request.lora_name} has been dropped; send the request to the current one")
        return build(manager, request.lora_int_id, AdapterPayload.read(payload))

    WorkerLoRAManager._load_adapter = load_adapter  # noqa: SLF001


def load_from_directory(load: Callable[[Any, Any], Any], manager: Any, request: Any) -> Any:
    """Load an adapter from its directory; after an eviction, from what the directory held then."""
    kept = kept_by(manager)
    files = kept.files.get(request.lora_int_id)
    if files:
        with TemporaryDirectory() as directory:
            for name, content in files.items():
                Path(directory, name).write_bytes(content)
            return load(manager, msgspec.structs.replace(request, lora_path=directory))
    kept.disk_loads += 1
    loaded = load(manager, request)
    found = [path for name in _FILES if (path := Path(request.lora_path, name)).is_file()]
    kept.files[request.lora_int_id] = {path.name: path.read_bytes() for path in found}
    return loaded


def kept_by(manager: Any) -> KeptAdapters:
    kept = getattr(manager, _KEPT, None)
    if kept is None:
        kept = KeptAdapters()
        setattr(manager, _KEPT, kept)
    return kept


class AdapterWorker:
    """Methods that the API process calls by name through `atropos_call`; replies are JSON text."""

    model_runner: Any

    def atropos_load_adapter(self, name: str, number: int, path: str) -> str:
        """Load an adapter from a directory into a slot; return whether it changes the output head."""
        self.model_runner.add_lora(LoRARequest(name, number, path))
        loaded = self.model_runner.lora_manager._adapter_manager.get_adapter(number)  # noqa: SLF001
        return json.dumps({"adapts_head": any(module.endswith("lm_head") for module in loaded.loras)})

    def atropos_add_adapter(self, name: str, number: int, path: str, payload: bytes) -> str:
        """Load a sent adapter into a slot and compare the slot with the sent tensors.

        If it does not fit, raise and restore the previous state.
        """
        manager = self.model_runner.lora_manager
        kept_by(manager).payloads[path] = payload
        try:
            manager.add_adapter(LoRARequest(name, number, path))
            digest = _check_slot(manager, number, AdapterPayload.read(payload))
        except BaseException:
            self.atropos_drop_adapter(number, path)
            raise
        return json.dumps({"digest": digest})

    def atropos_check_adapter(self, number: int, path: str) -> str:
        """Return a kept adapter's checksum, and the names of its tensors for which its slot holds other values."""
        manager = self.model_runner.lora_manager
        payload = AdapterPayload.read(kept_by(manager).payloads[path])
        manager._adapter_manager.activate_adapter(number)  # noqa: SLF001  it may have been evicted from its slot
        return json.dumps({"digest": payload.digest(), "misplaced": misplaced(manager, number, payload)})

    def atropos_drop_adapter(self, number: int, path: str) -> str:
        """Remove an adapter that no request uses any more."""
        manager = self.model_runner.lora_manager
        kept_by(manager).payloads.pop(path, None)
        kept_by(manager).files.pop(number, None)
        removed = manager.remove_adapter(number)
        return_freed_memory()
        return json.dumps({"removed": bool(removed)})

    def atropos_adapter_counters(self) -> str:
        manager = self.model_runner.lora_manager
        kept = kept_by(manager)
        return json.dumps(
            {
                "adapter_disk_loads_total": kept.disk_loads,
                "adapters_in_memory": len(kept.payloads),
                "adapter_bytes": sum(map(len, kept.payloads.values())),
                "adapters_registered": len(manager.list_adapters()),
            }
        )


def build(manager: Any, number: int, payload: AdapterPayload) -> LoRAModel:
    """Return the adapter in vLLM's form; raise `ValueError` for one that this model or this vLLM cannot take."""
    helper = PEFTHelper.from_dict(payload.config)
    helper.validate_legal(manager.lora_config)
    tensors = payload.tensors()
    _check(manager, helper, tensors)
    return LoRAModel.from_lora_tensors(
        number,
        tensors,
        helper,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=_name_mapper(manager),
    )


def _check_slot(manager: Any, number: int, payload: AdapterPayload) -> str:
    """Return the payload's checksum, after checking that its slot holds exactly its tensors."""
    if wrong := misplaced(manager, number, payload):
        raise ValueError(f"{len(wrong)} tensors are misplaced in vLLM's buffers: {', '.join(wrong[:3])}")
    return payload.digest()


def misplaced(manager: Any, number: int, payload: AdapterPayload) -> list[str]:
    """Return the tensors of the payload for which the slot in vLLM's buffers holds other values.

    The outcome of all comparisons is read at once: on a GPU each read waits for the stream that decodes, and there are
    about 400 tensors.
    """
    inner = manager._adapter_manager  # noqa: SLF001  vLLM offers no view of its slots
    index = inner.lora_index_to_id.index(number)
    helper = PEFTHelper.from_dict(payload.config)
    names, differences = [], []
    for name, buffer, tensor in _with_buffers(manager, helper, payload.tensors()):
        part = buffer.own_part(tensor)
        expected = part.to(manager.lora_config.lora_dtype)
        if buffer.scale != 1.0:
            expected = expected * buffer.scale
        found = buffer.slot(index, part)
        names.append(name)
        differences.append((found != expected.to(device=found.device, dtype=found.dtype)).any())
    return list(compress(names, torch.stack(differences).tolist())) if differences else []


def _check(manager: Any, helper: PEFTHelper, tensors: Tensors) -> None:
    seen: dict[str, set[bool]] = {}
    for name, buffer, tensor in _with_buffers(manager, helper, tensors):
        if not buffer.fits(tensor):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, its buffer {tuple(buffer.stacked.shape[2:])}")
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name} holds values that are not finite")
        seen.setdefault(parse_fine_tuned_lora_name(name)[0], set()).add(buffer.is_a)
    if unpaired := [module for module, halves in seen.items() if len(halves) != 2]:
        raise ValueError(f"{unpaired[0]} has only one of lora_A and lora_B")
    if not seen:
        raise ValueError("the adapter holds no tensors")


def _with_buffers(
    manager: Any, helper: PEFTHelper, tensors: Tensors
) -> Iterator[tuple[str, AdapterBuffer, torch.Tensor]]:
    """Yield each tensor with its buffer; raise `ValueError` for a module that takes no adapter."""
    inner = manager._adapter_manager  # noqa: SLF001
    slices = {part: (packed, i) for packed, parts in inner.packed_modules.items() for i, part in enumerate(parts)}
    for name, tensor in tensors.items():
        module_name, is_a = parse_fine_tuned_lora_name(name, _name_mapper(manager))
        packed, index = slices.get(module_name, (module_name, 0))
        module = inner.modules.get(packed)
        if module is None:
            raise ValueError(f"{name}: this model supports no adapter there, only for {_supported_modules(inner)}")
        scale = 1.0 if is_a else helper.get_rank_and_scaling(parse_fine_tuned_lora_name(name)[0])[1]
        yield name, AdapterBuffer(module, index, scale, is_a), tensor


def _supported_modules(inner: Any) -> str:
    parts = {part for parts in inner.packed_modules.values() for part in parts}
    names = parts | {name for name in inner.modules if name not in inner.packed_modules}
    return ", ".join(sorted({name.rpartition(".")[2] for name in names}))


def _name_mapper(manager: Any) -> Any:
    mapper = getattr(manager._adapter_manager.model, "hf_to_vllm_mapper", None)  # noqa: SLF001
    return None if mapper is None else mapper.get_rename_mapper()
