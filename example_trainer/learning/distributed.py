"""The ranks of a training run: several processes that train one policy together, each on whole groups of its own.

One process is the ordinary case and needs no `torch.distributed`: `Ranks` is its form, in which every sum is what went
in. `joined_ranks` makes the form for several processes. Ranks agree on decisions and on what a step measured through
small messages over gloo; gradients travel by the device's own backend.

All ranks call the methods here in the same order, or wait for each other. What only one process can do (speak to the
broker, own a server, write a file) is led by rank 0, and the others learn its outcome, an error included.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from example_trainer.errors import RanksFailed

ValueT = TypeVar("ValueT")

_TORCHRUN_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")


class Ranks:
    """One process, which is all ranks there are."""

    rank = 0
    world_size = 1

    @property
    def is_main(self) -> bool:
        """Whether this process speaks for all."""
        return self.rank == 0

    def gather(self, value: ValueT) -> list[ValueT]:
        """Every rank's value, in rank order; small things only, they travel pickled."""
        return [value]

    def lead(self, action: Callable[[], ValueT]) -> ValueT:
        """What `action` gives at rank 0, where alone it runs; its error is raised everywhere."""
        return action()

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up the gradients of parameters that each rank holds whole."""

    def copy_from_main(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give parameters that each rank holds whole the values they have at rank 0."""

    def sum(self, values: Tensor) -> Tensor:
        """The elementwise sum over ranks of a small tensor on the CPU."""
        return values

    def most(self, count: int) -> int:
        """The largest of the ranks' counts."""
        return count

    def any(self, flag: bool) -> bool:
        """Whether one rank at least says yes."""
        return flag


class GroupRanks(Ranks):
    """One of several processes, over the process groups that `joined_ranks` has made."""

    def __init__(self, control: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._control = control

    def gather(self, value: ValueT) -> list[ValueT]:
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value, group=self._control)
        return found

    def lead(self, action: Callable[[], ValueT]) -> ValueT:
        outcome: list[Any] = [None, None]
        raised: Exception | None = None
        if self.is_main:
            try:
                outcome[0] = action()
            except Exception as error:  # noqa: BLE001 - told to the other ranks, then raised
                raised = error
                outcome[1] = f"{type(error).__name__}: {error}"
        dist.broadcast_object_list(outcome, src=0, group=self._control, device=torch.device("cpu"))
        if raised is not None:
            raise raised
        if outcome[1] is not None:
            raise RanksFailed(f"rank 0 cannot go on, so rank {self.rank} ends as well: {outcome[1]}")
        value: ValueT = outcome[0]
        return value

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)

    def copy_from_main(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            dist.broadcast(parameter.data, src=0)

    def sum(self, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=self._control)
        return total

    def most(self, count: int) -> int:
        largest = torch.tensor([count])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._control)
        return int(largest)

    def any(self, flag: bool) -> bool:
        return bool(self.most(int(flag)))


@contextmanager
def joined_ranks(
    rank: int, world_size: int, init_method: str, *, device: str, timeout_seconds: float
) -> Iterator[Ranks]:
    """Join the `world_size` processes of a run while the context lasts; raises `RanksFailed` where they do not meet.

    `init_method` is `env://` under torchrun and `accelerate launch`, else `tcp://host:port` or `file://path`. A rank
    waits for the others up to `timeout_seconds`, which has to cover the longest that rank 0 may be busy alone.
    """
    if world_size == 1:
        yield Ranks()
        return
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(_gpu(device, rank))
    _require_meeting_point(init_method, world_size)
    timeout = timedelta(seconds=timeout_seconds)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            init_method=init_method,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise RanksFailed(
            f"rank {rank} of {world_size} did not meet the others at --init-method {init_method}: {error}; start as "
            "many processes as --world-size says, each with a --trainer-rank of its own"
        ) from error
    try:
        yield GroupRanks(dist.new_group(backend="gloo", timeout=timeout))
    finally:
        dist.destroy_process_group()


def _gpu(device: str, rank: int) -> int:
    """The GPU of this process on its host: the one it names, else as the starter says, else one after the other."""
    named = torch.device("cuda" if device == "auto" else device).index
    return int(os.environ.get("LOCAL_RANK", rank % torch.cuda.device_count())) if named is None else named


def _require_meeting_point(init_method: str, world_size: int) -> None:
    missing = [name for name in _TORCHRUN_VARIABLES if name not in os.environ]
    if init_method.startswith("env://") and missing:
        raise RanksFailed(
            f"--world-size {world_size} with --init-method env:// needs {' and '.join(missing)} in the environment; "
            "start with torchrun or accelerate launch, or name a meeting point: --init-method tcp://127.0.0.1:29500"
        )
