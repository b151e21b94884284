"""A mixin for vLLM's worker: it receives weights over a process group, first apart, then loads them into the model.

Received weights are not loaded until every server has reported the same checksum, so that an interrupted broadcast
changes nothing. vLLM's own loading is used, which knows how it fuses and splits; it happens inside the fence of a
publish, and a copy of the previous weights is kept until that publish has ended, so that all servers can return to them
together. Joining and receiving wait for the trainer and for every other server, any of which may be killed meanwhile,
so both run in a thread of their own and the engine continues decoding under the old weights.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import torch

from example_trainer.weight_protocol.transfer import BroadcastGroup, Rendezvous


class BroadcastReceiver:
    """One membership in a group; any failure ends it, which the other members notice at once."""

    def __init__(self, group_id: str, rendezvous: Rendezvous, device: torch.device) -> None:
        self.group_id = group_id
        self.transfer_id: str | None = None
        """Id of the weights that are being received, or are received and not loaded."""
        self.aside: dict[str, torch.Tensor] = {}
        self.before: dict[torch.Tensor, torch.Tensor] = {}
        """The model's own tensors, each with a copy in host memory, until the publish has ended or been undone."""
        self._group: BroadcastGroup | None = None
        self._report: dict[str, Any] | None = None
        self._error: Exception | None = None
        self._start(lambda: self._join(rendezvous, device))

    def receive(self, transfer_id: str, described: dict[str, tuple[list[int], str]], model: torch.nn.Module) -> None:
        """Begin to receive one set of weights, and to copy those that the model has now."""
        if self._group is None:
            raise RuntimeError("no broadcast group has been joined")
        self.forget()
        self.transfer_id = transfer_id
        self._start(lambda: self._receive(described, model))

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
        self.forget()
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _start(self, exchange: Callable[[], dict[str, Any]]) -> None:
        self._report = None

        def run() -> None:
            try:
                self._report = exchange()
            except Exception as error:  # noqa: BLE001 - `progress` raises it
                self._error = error
                self.leave()

        threading.Thread(target=run, name="broadcast", daemon=True).start()

    def _join(self, rendezvous: Rendezvous, device: torch.device) -> dict[str, Any]:
        self._group = BroadcastGroup.join(rendezvous, device)
        return {"rank": rendezvous.rank}

    def _receive(self, described: dict[str, tuple[list[int], str]], model: torch.nn.Module) -> dict[str, Any]:
        assert self._group is not None
        arrived, digest = self._group.receive(described)
        self.before = {tensor: tensor.detach().to("cpu", copy=True) for tensor in own_tensors(model)}
        self.aside = arrived
        return {"digest": digest}


def own_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return parameters and buffers, each once."""
    return list({id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values())


class BroadcastWorker:
    """Methods that the API process calls by name through `collective_rpc`; replies are JSON text."""

    model_runner: Any
    device: torch.device
    _atropos_reception: BroadcastReceiver | None = None

    def atropos_join_broadcast(
        self, group_id: str, address: str, port: int, rank: int, world_size: int, backend: Any
    ) -> str:
        """Begin to join the trainer and the other servers, once; weights received in an earlier group are discarded."""
        if self._atropos_reception is None or self._atropos_reception.group_id != group_id:
            self.atropos_leave_broadcast()
            place = Rendezvous(address, port, rank, world_size, backend)
            self._atropos_reception = BroadcastReceiver(group_id, place, self.device)
        return json.dumps({})

    def atropos_receive_broadcast(self, transfer_id: str, described: dict[str, tuple[list[int], str]]) -> str:
        """Begin to receive one set of weights without loading them, once."""
        reception = self._joined()
        if reception.transfer_id != transfer_id:
            reception.receive(transfer_id, described, self.model_runner.model)
        return json.dumps({})

    def atropos_broadcast_progress(self) -> str:
        """Return the progress of the exchange; at its end the rank, or the checksum of the received weights."""
        return json.dumps(self._joined().progress())

    def atropos_leave_broadcast(self) -> str:
        """End the membership, if there is one."""
        reception, self._atropos_reception = self._atropos_reception, None
        if reception is not None:
            reception.leave()
        return json.dumps({})

    def atropos_load_broadcast(self) -> str:
        """Load the received weights into the model; the scheduler is paused meanwhile."""
        reception = self._joined()
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

    def atropos_settle_broadcast(self, keep: bool) -> str:
        """Keep the loaded weights, or restore the previous ones bit by bit."""
        reception = self._joined()
        if not keep:
            if not reception.before:
                raise RuntimeError("no copy of the previous weights is left")
            with torch.no_grad():
                for tensor, before in reception.before.items():
                    tensor.copy_(before)
        reception.forget()
        return json.dumps({})

    def _joined(self) -> BroadcastReceiver:
        if self._atropos_reception is None:
            raise RuntimeError("no broadcast group has been joined")
        return self._atropos_reception
