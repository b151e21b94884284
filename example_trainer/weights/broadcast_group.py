"""The process group over which a trainer sends weights to inference servers: rank 0 sends, every server receives.

It is a group of its own beside whatever groups the trainer's ranks or vLLM's workers have. With gloo tensors travel
through host memory; with nccl from GPU to GPU (the same code over another backend, which has not been run).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Self

import torch
import torch.distributed

from example_trainer.weights.rendezvous import make_gloo_group, make_store

Backend = Literal["gloo", "nccl"]
TIMEOUT_SECONDS = 60.0
"""For all to join, and for one tensor; a member that dies or leaves is noticed at once."""

dist: Any = torch.distributed  # whose stubs leave out most of what is used here


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where and as whom to join."""

    address: str
    port: int
    rank: int
    world_size: int
    backend: Backend = "gloo"


class BroadcastGroup:
    """One membership; once an exchange has failed the group is of no use and everybody joins another."""

    def __init__(self, rendezvous: Rendezvous, device: torch.device) -> None:
        timeout = timedelta(seconds=TIMEOUT_SECONDS)
        store = make_store(
            rendezvous.address,
            rendezvous.port,
            world_size=rendezvous.world_size,
            is_master=rendezvous.rank == 0,
            timeout=timeout,
        )
        self._device = device if rendezvous.backend == "nccl" else torch.device("cpu")
        self._store: Any = store
        self._group: Any = _make_group(rendezvous, store, timeout)

    @classmethod
    def join(cls, rendezvous: Rendezvous, device: torch.device) -> Self:
        """Returns when all have joined; raises `RuntimeError` when they have not within the time allowed."""
        return cls(rendezvous, device)

    def send(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Send in order of names, as rank 0; answers with the checksum that each receiver should tell."""
        total = hashlib.blake2b(digest_size=16)
        for name in sorted(tensors):
            tensor = tensors[name].detach().to(self._device).contiguous()
            self._broadcast(tensor)
            total.update(_bytes_of(tensor))
        return total.hexdigest()

    def receive(self, described: Mapping[str, tuple[list[int], str]]) -> tuple[dict[str, torch.Tensor], str]:
        """Receive tensors of these shapes and dtypes; answers with them and their checksum."""
        total = hashlib.blake2b(digest_size=16)
        received: dict[str, torch.Tensor] = {}
        for name in sorted(described):
            shape, dtype = described[name]
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            self._broadcast(tensor)
            total.update(_bytes_of(tensor))
            received[name] = tensor
        return received, total.hexdigest()

    def close(self) -> None:
        """Leave: an exchange that waits for this member fails at every other one."""
        self._group = None
        self._store = None

    def _broadcast(self, tensor: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        group = self._group
        if group is None:
            raise RuntimeError("the broadcast group has been left")
        group.broadcast([tensor], options).wait()


def describe(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[list[int], str]]:
    """What a receiver has to know beforehand: shape and dtype by name."""
    return {name: (list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()}


def _make_group(rendezvous: Rendezvous, store: Any, timeout: timedelta) -> Any:
    place = (dist.PrefixStore("weights", store), rendezvous.rank, rendezvous.world_size)
    if rendezvous.backend == "gloo":
        return make_gloo_group(*place, host=rendezvous.address, timeout=timeout)
    return dist.ProcessGroupNCCL(*place)


def _bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.reshape(-1).cpu().view(torch.uint8).numpy().data
