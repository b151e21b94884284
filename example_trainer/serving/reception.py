"""What a server has of a broadcast: its membership in the group, and the weights that lie aside until all have theirs.

Joining and receiving wait for the trainer and for every other server, which may die meanwhile, so both happen in a
thread of their own and the engine goes on decoding under the old weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from example_trainer.weights.broadcast_group import BroadcastGroup, Rendezvous


class Reception:
    """One membership; whatever fails ends it, which the other members notice at once."""

    def __init__(self, group_id: str, rendezvous: Rendezvous, device: torch.device) -> None:
        self.group_id = group_id
        self.transfer_id: str | None = None
        """Of the weights that lie aside or are on their way here."""
        self.aside: dict[str, torch.Tensor] = {}
        self.before: dict[torch.Tensor, torch.Tensor] = {}
        """The model's own tensors, each with a copy in host memory, until it is settled which of the two are served."""
        self._group: BroadcastGroup | None = None
        self._told: dict[str, Any] | None = None
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
        """`{"running": true}`, or what the exchange has come to; raises what ended it."""
        if self._error is not None:
            raise RuntimeError(f"{self._error}") from self._error
        return self._told or {"running": True}

    def forget(self) -> None:
        """Let go of what lies aside and of the copy of what was before."""
        self.aside, self.before = {}, {}

    def leave(self) -> None:
        """End the membership; an exchange that is still waiting ends by itself and is of no effect."""
        self.forget()
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _start(self, exchange: Callable[[], dict[str, Any]]) -> None:
        self._told = None

        def run() -> None:
            try:
                self._told = exchange()
            except Exception as error:  # noqa: BLE001 - told to whoever asks how far it has come
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
    """Parameters and buffers, each once."""
    return list({id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values())
