"""A mixin for vLLM's worker: it receives weights over a process group, first apart, then loads them into the model.

Received weights are not loaded until every server has reported the same checksum, so that an interrupted broadcast
changes nothing. vLLM's own loading is used, which knows how it fuses and splits: each worker of a server receives whole
tensors and loads its part of them. It happens inside the fence of a publish, and a copy of the previous weights is kept
until that publish has ended, so that all servers can return to them together. Joining and receiving wait for the
trainer and for every other server, any of which may be killed meanwhile, so both run in a thread of their own, and the
engine continues decoding under the old weights. On a GPU the copy of the previous weights has a stream of its own.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import torch

from example_trainer.serving.vllm.load_tracing import experts_kernels
from example_trainer.weight_protocol.broadcast_group import BroadcastGroup, Rendezvous, gpu_uuid
from example_trainer.weight_protocol.buckets import Bucket, TensorEntry
from example_trainer.weight_protocol.pinned_memory import PinnedBlocks


class BroadcastReceiver:
    """One membership in a group; any failure ends it, which the other members notice at once."""

    def __init__(self, group_id: str, rendezvous: Rendezvous, device: torch.device) -> None:
        self.group_id = group_id
        self.transfer_id: str | None = None
        """Id of the weights that are being received, or are received and not loaded."""
        self.aside: dict[str, torch.Tensor] = {}
        self.before: dict[torch.Tensor, torch.Tensor] = {}
        """The model's own tensors, each with a copy in host memory, until the publish has ended or been undone."""
        self._device = device
        self._group: BroadcastGroup | None = None
        self._left = False
        """True once the membership has ended: a join that ends later leaves at once."""
        self._changing = threading.Lock()
        self._report: dict[str, Any] | None = None
        self._error: Exception | None = None
        self._start(lambda: self._join(rendezvous))

    def receive(self, transfer_id: str, buckets: list[Bucket], model: torch.nn.Module) -> None:
        """Begin to receive one set of weights, and to copy those that the model has now."""
        if self._group is None:
            raise RuntimeError("no broadcast group has been joined")
        self.forget()
        self.transfer_id = transfer_id
        self._start(lambda: self._receive(buckets, model))

    def progress(self) -> dict[str, Any]:
        """Return `{"running": true}`, or the result of the exchange; raise the error that ended it."""
        if self._error is not None:
            raise RuntimeError(f"{self._error}") from self._error
        return self._report or {"running": True}

    def forget(self) -> None:
        """Discard the received weights and the copy of the previous ones."""
        self.aside, self.before = {}, {}

    def leave(self) -> None:
        """End the membership; an exchange that is still waiting fails by itself and has no effect."""
        with self._changing:
            self._left = True
            group, self._group = self._group, None
        self.forget()
        if group is not None:
            group.close()

    def _start(self, exchange: Callable[[], dict[str, Any]]) -> None:
        self._report = None

        def run() -> None:
            try:
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)  # a new thread begins on the first GPU
                self._report = exchange()
            except Exception as error:  # noqa: BLE001 - `progress` raises it
                self._error = error
                self.leave()

        threading.Thread(target=run, name="broadcast", daemon=True).start()

    def _join(self, rendezvous: Rendezvous) -> dict[str, Any]:
        group = BroadcastGroup.join(rendezvous, self._device)
        with self._changing:
            if not self._left:
                self._group = group
                return {"rank": rendezvous.rank, "gpu": gpu_uuid(self._device)}
        group.close()
        raise RuntimeError("the group was left while its members joined")

    def _receive(self, buckets: list[Bucket], model: torch.nn.Module) -> dict[str, Any]:
        assert self._group is not None
        arrived, digest = self._group.receive(buckets)
        before = copied_to_host(own_tensors(model), self._device)
        with self._changing:
            if self._left:
                raise RuntimeError("the group was left while weights were received")
            self.before, self.aside = before, arrived
        return {"digest": digest}


def copied_to_host(tensors: list[torch.Tensor], device: torch.device) -> dict[torch.Tensor, torch.Tensor]:
    """Return a copy of each tensor in host memory; a GPU makes it in a stream that decoding does not wait for."""
    if device.type != "cuda":
        return {tensor: tensor.detach().clone() for tensor in tensors}
    stream, blocks = torch.cuda.Stream(device), PinnedBlocks()  # type: ignore[no-untyped-call]  # untyped in torch
    with torch.cuda.stream(stream):
        copies = {
            tensor: blocks.empty(tensor.shape, tensor.dtype).copy_(tensor.detach(), non_blocking=True)
            for tensor in tensors
        }
    stream.synchronize()
    return copies


def own_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return parameters and buffers, each once."""
    return list({id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values())


class BroadcastWorker:
    """Methods that the API process calls by name through `collective_rpc`; replies are JSON text."""

    model_runner: Any
    device: torch.device
    rank: int
    """Number of this worker among the server's."""
    _atropos_reception: BroadcastReceiver | None = None

    def atropos_join_broadcast(
        self, group_id: str, address: str, port: int, rank: int, world_size: int, backend: Any
    ) -> str:
        """Begin to join the trainer and the other servers, once; weights received in an earlier group are discarded.

        `rank` is that of this server's first worker.
        """
        if (kernels := experts_kernels(self.model_runner.model)) is not None:
            raise RuntimeError(
                f"vLLM has rearranged the model's experts for its kernels {kernels}, and a broadcast only loads: train "
                "with --weight-bridge-mode none or lora_only, or on a GPU start the server with --moe-backend triton"
            )
        if self._atropos_reception is None or self._atropos_reception.group_id != group_id:
            self.atropos_leave_broadcast()
            place = Rendezvous(address, port, rank + self.rank, world_size, backend)
            self._atropos_reception = BroadcastReceiver(group_id, place, self.device)
        return json.dumps({})

    def atropos_receive_broadcast(self, transfer_id: str, layouts: list[list[TensorEntry]]) -> str:
        """Begin to receive one set of weights without loading them, once."""
        reception = self._joined()
        if reception.transfer_id != transfer_id:
            buckets = [Bucket(tuple((name, list(shape), dtype) for name, shape, dtype in each)) for each in layouts]
            reception.receive(transfer_id, buckets, self.model_runner.model)
        return json.dumps({})

    def atropos_broadcast_progress(self) -> str:
        """Return the progress of the exchange; at its end the rank and GPU, or the checksum of what was received."""
        return json.dumps(self._joined().progress())

    def atropos_leave_broadcast(self) -> str:
        """End the membership, if there is one."""
        reception, self._atropos_reception = self._atropos_reception, None
        if reception is not None:
            reception.leave()
        return json.dumps({})

    def atropos_load_broadcast(self, transfer_id: str) -> str:
        """Load the weights received in this transfer into the model; the scheduler is paused meanwhile."""
        reception = self._received(transfer_id)
        if not reception.aside:
            raise RuntimeError("nothing has been received")
        model = self.model_runner.model
        with torch.no_grad():
            loaded = model.load_weights(iter(reception.aside.items()))
        reception.aside = {}
        missed = sorted({name for name, _ in model.named_parameters()} - set(loaded)) if loaded is not None else []
        if missed:
            raise RuntimeError(f"{len(missed)} of the model's parameters were not sent: {missed[0]}, ...")
        return json.dumps({"loaded": len(loaded or ())})

    def atropos_settle_broadcast(self, transfer_id: str, keep: bool) -> str:
        """Keep the weights loaded from this transfer, or restore the previous ones bit by bit."""
        reception = self._received(transfer_id)
        if not keep:
            if not reception.before:
                raise RuntimeError("no copy of the previous weights is left")
            with torch.no_grad():
                for tensor, before in reception.before.items():
                    tensor.copy_(before)
        reception.forget()
        return json.dumps({})

    def _received(self, transfer_id: str) -> BroadcastReceiver:
        """Return the membership if that transfer is its last; another trainer may have joined and sent its own since.

        Its weights would be served as a version of the first one.
        """
        reception = self._joined()
        if reception.transfer_id != transfer_id:
            raise RuntimeError("the weights of this transfer are gone: another group has been joined since")
        return reception

    def _joined(self) -> BroadcastReceiver:
        if self._atropos_reception is None:
            raise RuntimeError("no broadcast group has been joined")
        return self._atropos_reception
