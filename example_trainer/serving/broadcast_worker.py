"""Mixed into vLLM's worker: receives weights over a process group, first aside, then into the model.

What has arrived lies aside until every server has told the same checksum, so that a broadcast that breaks off changes
nothing. Loading is vLLM's own, which knows how it fuses and splits; it happens inside the fence of a publish, and a
copy of what was there before is kept until that publish has ended, so that all servers can go back together.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from example_trainer.serving.reception import Reception
from example_trainer.weights.broadcast_group import Rendezvous


class BroadcastWorker:
    """Methods that the API process calls by name through `collective_rpc`; replies are JSON text."""

    model_runner: Any
    device: torch.device
    _atropos_reception: Reception | None = None

    def atropos_join_broadcast(
        self, group_id: str, address: str, port: int, rank: int, world_size: int, backend: Any
    ) -> str:
        """Begin to join the trainer and the other servers, once; what an earlier group left aside is forgotten."""
        if self._atropos_reception is None or self._atropos_reception.group_id != group_id:
            self.atropos_leave_broadcast()
            place = Rendezvous(address, port, rank, world_size, backend)
            self._atropos_reception = Reception(group_id, place, self.device)
        return json.dumps({})

    def atropos_receive_broadcast(self, transfer_id: str, described: dict[str, tuple[list[int], str]]) -> str:
        """Begin to receive one set of weights aside, once."""
        reception = self._joined()
        if reception.transfer_id != transfer_id:
            reception.receive(transfer_id, described, self.model_runner.model)
        return json.dumps({})

    def atropos_broadcast_progress(self) -> str:
        """How far what was begun has come; at its end the rank, or the checksum of what has arrived."""
        return json.dumps(self._joined().progress())

    def atropos_leave_broadcast(self) -> str:
        """End the membership, if there is one."""
        reception, self._atropos_reception = self._atropos_reception, None
        if reception is not None:
            reception.leave()
        return json.dumps({})

    def atropos_load_broadcast(self) -> str:
        """Load what lies aside into the model; the scheduler stands still meanwhile."""
        reception = self._joined()
        if not reception.aside:
            raise RuntimeError("nothing has been received")
        model = self.model_runner.model
        with torch.no_grad():
            loaded = model.load_weights(iter(reception.aside.items()))
        reception.aside = {}
        missed = sorted({name for name, _ in model.named_parameters()} - set(loaded)) if loaded is not None else []
        if missed:
            raise RuntimeError(
                f"{len(missed)} of the model's parameters were not among what was sent: {missed[0]}, ..."
            )
        return json.dumps({"loaded": len(loaded or ())})

    def atropos_settle_broadcast(self, keep: bool) -> str:
        """Keep what was loaded, or put back, bit by bit, what was there before."""
        reception = self._joined()
        if not keep:
            if not reception.before:
                raise RuntimeError("no copy of the weights before is left")
            with torch.no_grad():
                for tensor, before in reception.before.items():
                    tensor.copy_(before)
        reception.forget()
        return json.dumps({})

    def _joined(self) -> Reception:
        if self._atropos_reception is None:
            raise RuntimeError("no broadcast group has been joined")
        return self._atropos_reception
