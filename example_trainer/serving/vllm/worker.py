"""A mixin for vLLM's worker: it shares the live parameters and maps each checkpoint tensor to its place in them.

vLLM imports this module in the worker before it loads the model, so changes made here at import apply to the load. On a
CPU the packed copies that vLLM would compute with are switched off: they would hide the parameters, and a change of the
shared tensors would have no effect.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.platforms import current_platform

from example_trainer.serving.checkpoint_shapes import Shapes, read_checkpoint_shapes
from example_trainer.serving.vllm import adapter_worker, patches
from example_trainer.serving.vllm.adapter_worker import AdapterWorker
from example_trainer.serving.vllm.broadcast_worker import BroadcastWorker
from example_trainer.serving.vllm.cpu_adapters import install_adapters_on_cpu
from example_trainer.serving.vllm.load_tracing import (
    Copy,
    Trace,
    check_reload,
    needed_parts,
    noting_missed,
    trace_load_weights,
)
from example_trainer.weight_protocol.checksums import combined_checksum, tensor_checksum
from example_trainer.weight_protocol.segment import Exported, SharedSegment, StridedRegion, make_segment
from example_trainer.weight_protocol.shm_header import ParamMapping, Piece, SegmentHeader, SharedFile, TensorMap

logger = logging.getLogger(__name__)

_CHECKSUM_SAMPLE = 8

adapter_worker.install()

patches.install_logprob_token_ids()

patches.install_output_lengths()

patches.install_quantised_heads()

patches.install_thinking_budgets()


def keep_linear_weights_unpacked() -> None:
    """Make linear layers on a CPU compute with `layer.weight` itself instead of a private packed copy."""
    from vllm.model_executor.layers import utils

    def use_plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:  # noqa: ARG001  vLLM's signature
        vars(layer)["cpu_linear"] = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = use_plain_linear


class SharedWeightsWorker(AdapterWorker, BroadcastWorker):
    """Methods that the API process calls by name through `atropos_call`; replies are JSON text."""

    model_runner: Any
    reload_weights: Callable[..., None]
    device: torch.device
    rank: int
    """The worker's rank among those of its server; vLLM sets it."""

    def atropos_call(self, method: str, *arguments: Any) -> dict[str, str | None]:
        """Call one of the other methods, and return its reply or the text of its error.

        vLLM's executor of several processes raises the first rank's error and leaves the other ranks' replies in their
        queues, where the next call would take them for its own. So no error is raised across the processes.
        """
        try:
            return {"reply": getattr(self, method)(*arguments), "error": None}
        except Exception as error:
            logger.debug("%s failed on rank %d", method, self.rank, exc_info=True)
            return {"reply": None, "error": str(error) or type(error).__name__}

    def atropos_reload(self, path: str, lacking: Shapes) -> str:
        """Read a checkpoint into the model, as vLLM reads it; return the parameters that it has no weights for.

        Nothing is read if one of the tensors that it lacks is a part of a parameter: vLLM misses only whole parameters,
        and would leave that part without values. A quantised model has parameters that no checkpoint holds, so nothing
        is said of one.
        """
        model = self.model_runner.get_model()
        check_reload(model)
        if missing := self._needed_parts(model, path, lacking):
            return json.dumps({"missed": missing})
        try:
            with noting_missed(model) as missed:
                self.reload_weights(weights_path=path)
        except BaseException:
            patches.end_broken_reload(model)
            raise
        return json.dumps({"missed": missed if self.model_runner.model_config.quantization is None else []})

    def _needed_parts(self, model: Any, path: str, lacking: Shapes) -> list[str]:
        config = self.model_runner.model_config
        if not lacking or config.quantization is not None:
            return []
        try:
            return needed_parts(model.load_weights, read_checkpoint_shapes(path), lacking, config.dtype)
        except Exception:  # a model's loader may need values, and raises anything without them
            first = next(iter(lacking))
            logger.warning("%s lacks %s: it is not known if the model needs it", path, first, exc_info=True)
            return []

    def atropos_share(self, boot_id: str, model: str, revision: str | None) -> str:
        """Export the parameters and trace the checkpoint's tensors into them."""
        module = self.model_runner.model
        shapes = read_checkpoint_shapes(model, revision)
        trace = trace_load_weights(module.load_weights, shapes, self.model_runner.model_config.dtype)
        shared = dict(_tensors_to_share(module, trace))
        # The trace has addresses from before the move, so the old addresses are kept together with the new places.
        before = {name: _address(tensor) for name, tensor in shared.items()}
        segment = make_segment(_device_name(self.device), boot_id)
        exported = segment.export(shared)
        header_file = SharedFile.create(boot_id, "header", SegmentHeader.nbytes())
        header = SegmentHeader.initialise(header_file.path)
        self._atropos_shared: tuple[dict[str, torch.Tensor], SharedSegment, SharedFile] = (shared, segment, header_file)
        header.close()
        tied = _tied_names(before, trace)
        return json.dumps(
            {
                "device": _device_name(self.device),
                "header_path": str(header_file.path),
                "storages": [asdict(storage) for storage in exported.storages],
                "param_mappings": _describe_parameters(shared, exported),
                "tensors": _describe_tensors(trace, shared, before, exported),
                "tied": tied,
                "unmapped": _describe_unmapped(trace, before, tied),
            }
        )

    def atropos_head_dtype(self) -> str:
        """Return the dtype in which the output head has computed its logits; null if the model has a way of its own."""
        modules = self.model_runner.model.modules()
        found = {module.head_dtype for module in modules if isinstance(module, LogitsProcessor)}
        return json.dumps(_dtype_name(found.pop()) if len(found) == 1 else None)

    def atropos_checksum(self) -> str:
        """Return a checksum over the shared tensors as the server sees them now, and one for each of the first few."""
        shared, segment, _ = self._atropos_shared
        segment.synchronise()
        first = sorted(shared)[:_CHECKSUM_SAMPLE]
        single = {name: f"{tensor_checksum(shared[name]):016x}" for name in first}
        return json.dumps({"checksum": combined_checksum(shared), "per_tensor": single})


def _tensors_to_share(module: torch.nn.Module, trace: Trace) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all parameters, and those buffers that the checkpoint is loaded into."""
    yield from module.named_parameters(remove_duplicate=False)
    loaded = {copy.target_storage for copies in trace.copies.values() for copy in copies}
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if buffer.numel() and buffer.untyped_storage().data_ptr() in loaded:
            yield name, buffer


def _address(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())


def _describe_parameters(shared: dict[str, torch.Tensor], exported: Exported) -> dict[str, Any]:
    handles = {storage.id: storage.handle for storage in exported.storages}
    return {
        name: asdict(
            ParamMapping(
                ipc_handle={**handles[place.storage], "offset": place.offset, "stride": list(place.stride)},
                shape=list(place.shape),
                dtype=_dtype_name(shared[name].dtype),
            )
        )
        for name, place in exported.placements.items()
    }


def _describe_tensors(
    trace: Trace, shared: dict[str, torch.Tensor], before: dict[str, tuple[int, int]], exported: Exported
) -> dict[str, Any]:
    """Return each traced copy, moved from its traced address to its place in the exported storages."""
    bases: dict[int, tuple[StridedRegion, int, torch.dtype]] = {}
    for name, (storage, offset) in before.items():
        bases.setdefault(storage, (exported.placements[name], offset, shared[name].dtype))
    described: dict[str, Any] = {}
    for name, copies in trace.copies.items():
        if any(copy.target_storage not in bases for copy in copies):
            trace.unmapped[name] = "it is loaded into memory that is not a parameter of the model"
            continue
        dtype = bases[copies[0].target_storage][2]
        pieces = [_describe_piece(copy, *bases[copy.target_storage][:2]) for copy in copies]
        entry = TensorMap(pieces=pieces, shape=list(trace.shapes[name]), dtype=_dtype_name(dtype))
        described[name] = asdict(entry)
    return described


def _describe_piece(copy: Copy, base: StridedRegion, base_offset: int) -> Piece:
    return Piece(
        storage=base.storage,
        offset=base.offset + copy.target_offset - base_offset,
        shape=list(copy.shape),
        stride=list(copy.target_stride),
        source_offset=copy.source_offset,
        source_shape=list(copy.source_shape),
        source_stride=list(copy.source_stride),
    )


def _tied_names(before: dict[str, tuple[int, int]], trace: Trace) -> dict[str, str]:
    """Return parameters in the same memory as one in the checkpoint, whatever the configuration says about tying."""
    owners = {before[name]: name for name in trace.copies if name in before}
    return {name: owners[place] for name, place in before.items() if place in owners and owners[place] != name}


def _describe_unmapped(trace: Trace, before: dict[str, tuple[int, int]], tied: dict[str, str]) -> list[str]:
    """Return checkpoint tensors and parameters that cannot be shared exactly, with the reason."""
    found = [
        f"{name}: {reason}"
        for name, reason in trace.unmapped.items()
        if name not in tied and "rotary_emb." not in name  # old checkpoints hold tables that are now computed
    ]
    loaded = {copy.target_storage for copies in trace.copies.values() for copy in copies}
    found.extend(f"{name}: not in the checkpoint" for name, (storage, _) in before.items() if storage not in loaded)
    return found


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


if current_platform.is_cpu():
    keep_linear_weights_unpacked()
    patches.install_seeds_on_cpu()
    install_adapters_on_cpu()
