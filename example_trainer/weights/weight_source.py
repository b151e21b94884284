"""The weights that a broadcast sends, one packed bucket at a time, and the forward that its parity check needs.

A policy that one process holds whole and one that is sharded over ranks look the same here. In the second case all
ranks call the methods in the same order: each takes part in gathering, and only rank 0 keeps and packs the result. At
any time rank 0 holds one bucket, and every rank one whole weight in addition to its shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from example_trainer.errors import UnsupportedModel
from example_trainer.modeling.loading import cast_floating, persistent_buffers, to_checkpoint_layout
from example_trainer.modeling.policy import Policy
from example_trainer.weight_protocol.buckets import BUCKET_BYTES, TensorEntry, entry_of, fill_buckets
from example_trainer.weights.logprob_parity import Agreement, Difference, ProbeSample, compare_sharded


class WeightSource:
    """The weights of a policy in the layout of a checkpoint, divided into buckets that never change."""

    def __init__(self, policy: Policy, *, limit_bytes: int = BUCKET_BYTES) -> None:
        """Plan the buckets; raise `UnsupportedModel` for a model whose weights cannot be sent one by one."""
        self._policy = policy
        parts = {name: self._entries(name) for name in self._names()}
        self._check(parts)
        filled = fill_buckets(parts, limit_bytes)
        self._parts = [names for names, _ in filled]
        """The parameters and buffers of each bucket, by their names in the module."""
        self.buckets = [bucket for _, bucket in filled]
        self._held: Tensor | None = None
        """Pinned memory of the largest bucket's size, through which the weights of a GPU leave it; else None."""

    def packed(self, number: int, device: torch.device) -> Tensor:
        """Return a bucket's buffer on `device`, with the weights as they are now; the next call may use its memory."""
        buffer = self._buffer(number, device)
        places = self.buckets[number].unpack(buffer)
        for name in self._parts[number]:
            weight = self._weight(name)
            for stored_name, tensor in to_checkpoint_layout(self._policy.module, {name: weight}).items():
                places.pop(stored_name).copy_(tensor, non_blocking=True)
        if self._held is not None:
            torch.cuda.current_stream(self._policy.device).synchronize()
        return buffer

    def _buffer(self, number: int, device: torch.device) -> Tensor:
        if device.type != "cpu" or self._policy.device.type != "cuda":
            return self.buckets[number].empty(device)
        if self._held is None:
            most = max(bucket.nbytes for bucket in self.buckets)
            self._held = torch.empty(most, dtype=torch.uint8, pin_memory=True)
        return self._held[: self.buckets[number].nbytes].zero_()

    def help_gather(self, number: int) -> None:
        """Take part in gathering a bucket that rank 0 packs."""
        for name in self._parts[number]:
            if name in self._policy.parameter_names:
                self._policy.whole_weight(name, self._policy.dtype, keep=False)

    def compare(self, samples: Sequence[ProbeSample], limit: Difference | None) -> Agreement:
        """Compare a server's logprobs with those of a sharded policy's forward, in which every rank takes part."""
        return compare_sharded(self._policy, samples, limit)

    def _names(self) -> Iterator[str]:
        yield from self._policy.parameter_names
        yield from persistent_buffers(self._policy.module)

    def _weight(self, name: str) -> Tensor:
        policy = self._policy
        if name not in policy.parameter_names:
            return policy.module.get_buffer(name).detach()  # in its own dtype, in which forwards compute with it
        weight = policy.whole_weight(name, policy.dtype, keep=True)
        assert weight is not None
        return weight

    def _like(self, name: str) -> Tensor:
        """Return a tensor without values of the shape and dtype that `_weight` returns."""
        policy = self._policy
        if name not in policy.parameter_names:
            return torch.empty_like(policy.module.get_buffer(name), device="meta")
        own = policy.module.get_parameter(name)
        return cast_floating(torch.empty(own.shape, dtype=own.dtype, device="meta"), policy.dtype)

    def _entries(self, name: str) -> list[TensorEntry]:
        stored = to_checkpoint_layout(self._policy.module, {name: self._like(name)})
        return [entry_of(stored_name, tensor) for stored_name, tensor in sorted(stored.items())]

    def _check(self, parts: dict[str, list[TensorEntry]]) -> None:
        """Raise `UnsupportedModel` if a checkpoint has tensors that are made from several parameters together."""
        together = to_checkpoint_layout(self._policy.module, {name: self._like(name) for name in parts})
        expected = sorted(entry_of(name, tensor) for name, tensor in together.items())
        if expected != sorted(entry for entries in parts.values() for entry in entries):
            raise UnsupportedModel(
                f"{type(self._policy.module).__name__}: its checkpoint merges several parameters into one tensor, so "
                "they cannot be sent one by one; use --weight-bridge-mode none"
            )
