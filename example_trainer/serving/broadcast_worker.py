"""Mixed into vLLM's worker: receives weights over a process group, first aside, then into the model.

What has arrived lies aside until every server has told the same checksum, so that a broadcast that breaks off changes
nothing. Loading is vLLM's own, which knows how it fuses and splits; it happens inside the fence of a publish.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from example_trainer.weights.broadcast_group import BroadcastGroup, Rendezvous


class BroadcastWorker:
    """Methods that the API process calls by name through `collective_rpc`; replies are JSON text."""

    model_runner: Any
    device: torch.device

    def atropos_join_broadcast(self, address: str, port: int, rank: int, world_size: int, backend: Any) -> str:
        """Join the trainer and the other servers; what an earlier group left aside is forgotten."""
        self._atropos_group: BroadcastGroup | None = None
        self._atropos_aside: dict[str, torch.Tensor] = {}
        rendezvous = Rendezvous(address, port, rank, world_size, backend)
        self._atropos_group = BroadcastGroup.join(rendezvous, self.device)
        return json.dumps({"rank": rank})

    def atropos_receive_broadcast(self, described: dict[str, tuple[list[int], str]]) -> str:
        """Receive one set of weights aside; answers with its checksum."""
        if self._atropos_group is None:
            raise RuntimeError("no broadcast group has been joined")
        self._atropos_aside, digest = self._atropos_group.receive(described)
        return json.dumps({"digest": digest})

    def atropos_load_broadcast(self) -> str:
        """Load what lies aside into the model; the scheduler stands still meanwhile."""
        aside, self._atropos_aside = self._atropos_aside, {}
        if not aside:
            raise RuntimeError("nothing has been received")
        with torch.no_grad():
            loaded = self.model_runner.model.load_weights(iter(aside.items()))
        return json.dumps({"loaded": len(loaded or aside)})
