"""The process group over which whole weights are sent: rank 0 is the trainer, every server receives.

It is separate from the groups of the trainer's ranks and of vLLM's workers. With gloo, buckets travel through host
memory; with nccl, from GPU to GPU. A member that is gone is noticed at once by gloo. NCCL does not notice it, and
torch's own watchdog would end the whole process after its time limit; here it is off, each wait has a limit of its own
(to meet at the store, to connect, to send a bucket), and `close` aborts what still waits. An aborted NCCL operation
ends without an error, so the group remembers that it was aborted.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Self

import torch
import torch.distributed
from torch import Tensor

from example_trainer.weight_protocol.buckets import Bucket, transfer_checksum
from example_trainer.weight_protocol.checksums import tensor_checksum
from example_trainer.weight_protocol.pinned_memory import PinnedBlocks
from example_trainer.weight_protocol.transfer import environment, make_gloo_group, make_store

Backend = Literal["gloo", "nccl"]

TIMEOUT_SECONDS = 60.0
"""Limit for all members to join, and for one bucket."""
_POLL_SECONDS = 0.001

NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""Variables that torch reads when it makes a group. By default its watchdog ends the process if a peer is gone."""

dist: Any = torch.distributed  # its stubs lack most of the names that are used here


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The address at which to join a process group, and the rank to join as."""

    address: str
    port: int
    rank: int
    world_size: int
    backend: Backend = "gloo"


class BroadcastGroup:
    """One process's membership in the group. After a failed exchange the group is unusable and all join a new one."""

    def __init__(self, rendezvous: Rendezvous, device: torch.device, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        timeout = timedelta(seconds=timeout_seconds)
        store = make_store(
            rendezvous.address,
            rendezvous.port,
            world_size=rendezvous.world_size,
            is_master=rendezvous.rank == 0,
            timeout=timeout,
        )
        self.device = device if rendezvous.backend == "nccl" else torch.device("cpu")
        """The device of the buffers that are sent and received."""
        self.pins = self.device.type == "cpu" and device.type == "cuda"
        """True if these are pinned, because weights are copied between them and a GPU."""
        self.timeout_seconds = timeout_seconds
        """Limit of one bucket; it may change from one transfer to the next."""
        self._backend = rendezvous.backend
        self._closing = threading.Lock()
        self._store: Any = store
        _wait_for_members(store, rendezvous, timeout)
        self._group: Any = _make_group(rendezvous, store, timeout)
        if rendezvous.backend == "nccl":
            self._connect()

    @classmethod
    def join(cls, rendezvous: Rendezvous, device: torch.device, timeout_seconds: float = TIMEOUT_SECONDS) -> Self:
        """Return when all members have joined; raise `RuntimeError` if they have not within the time allowed."""
        return cls(rendezvous, device, timeout_seconds)

    def send(self, buckets: Sequence[Bucket], packed: Callable[[int], Tensor]) -> str:
        """Send each bucket as rank 0 and return the checksum that every receiver should report.

        `packed` returns a bucket's buffer by its number. It is called when the bucket before has been sent, so that
        one is in memory at a time.
        """
        sums: list[int] = []
        for number in range(len(buckets)):
            buffer = packed(number)
            self._broadcast(buffer)
            sums.append(tensor_checksum(buffer))
        return transfer_checksum(buckets, sums)

    def receive(self, buckets: Sequence[Bucket]) -> tuple[dict[str, Tensor], str]:
        """Receive the buckets; return their tensors, as views of the buffers, with the checksum."""
        received: dict[str, Tensor] = {}
        sums: list[int] = []
        blocks = PinnedBlocks()
        for bucket in buckets:
            buffer = blocks.empty([bucket.nbytes], torch.uint8) if self.pins else bucket.empty(self.device)
            self._broadcast(buffer)
            sums.append(tensor_checksum(buffer))
            received |= bucket.unpack(buffer)
        return received, transfer_checksum(buckets, sums)

    def close(self) -> None:
        """Leave the group, from any thread: an exchange that waits for this member fails at every member."""
        with self._closing:
            group, self._group, self._store = self._group, None, None
        if group is not None and self._backend == "nccl":
            group.abort()

    def _connect(self) -> None:
        """Exchange one byte, as NCCL connects its members in the first exchange, and end if that lasts too long.

        NCCL waits without end for a member that ends meanwhile, and a group that has not connected cannot be aborted.
        So the exchange has a thread of its own, which stays behind.
        """
        group, failures = self._group, list[Exception]()

        def exchange() -> None:
            try:
                with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
                    byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
                    group.broadcast([byte], _from_the_trainer(self.timeout_seconds)).wait()
            except Exception as error:  # noqa: BLE001 - raised below, in the thread that asked
                failures.append(error)

        thread = threading.Thread(target=exchange, name="connect broadcast group", daemon=True)
        thread.start()
        thread.join(self.timeout_seconds)
        if thread.is_alive():
            self._group = None
            raise RuntimeError(f"NCCL did not connect the members in {self.timeout_seconds:g} s: one of them is gone")
        if failures:
            raise failures[0]

    def _broadcast(self, buffer: Tensor) -> None:
        options = _from_the_trainer(self.timeout_seconds)
        group = self._group
        if group is None:
            raise RuntimeError(_LEFT)
        work: Any = None
        try:
            with self._abort_at_limit() as fired:
                work = group.broadcast([buffer], options)
                while self._backend == "nccl" and self._group is not None and not work.is_completed():
                    time.sleep(_POLL_SECONDS)
                if self._group is not None:
                    work.wait()
        finally:
            # The traceback of an error would keep both, and gloo closes its connections with the last reference: the
            # other members waited for their limit of 60 s before they learned that the exchange had failed.
            del group, work
        if fired.is_set():
            raise RuntimeError(f"a bucket was not sent in {self.timeout_seconds:g} s: a member of the group is gone")
        if self._group is None:
            raise RuntimeError(_LEFT)

    @contextlib.contextmanager
    def _abort_at_limit(self) -> Iterator[threading.Event]:
        """Abort a group of NCCL if the block runs longer than the limit, and set the event; gloo has its own limit.

        It is done from another thread, because this one may wait in an operation.
        """
        fired = threading.Event()
        if self._backend != "nccl":
            yield fired
            return

        def abort() -> None:
            fired.set()
            self.close()

        timer = threading.Timer(self.timeout_seconds, abort)
        timer.daemon = True
        timer.start()
        try:
            yield fired
        finally:
            timer.cancel()


_LEFT = "the broadcast group has been left"


def gpu_uuid(device: torch.device) -> str | None:
    """Return the UUID of the GPU (or its MIG slice) behind `device`, equal in all processes; None on a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def _wait_for_members(store: Any, rendezvous: Rendezvous, timeout: timedelta) -> None:
    """Return when all members have come to the store; raise `RuntimeError` after the timeout.

    NCCL has no limit of its own: without this, a process would wait for ever for a member that does not come.
    """
    store.set(f"member/{rendezvous.rank}", "here")
    try:
        store.wait([f"member/{rank}" for rank in range(rendezvous.world_size)], timeout)
    except RuntimeError as error:
        raise RuntimeError(
            f"not all {rendezvous.world_size} members of the broadcast group joined in {timeout.total_seconds():g} s"
        ) from error


def _from_the_trainer(limit_seconds: float) -> Any:
    """Return torch's options of a broadcast from rank 0 that does not block the caller."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    options.asyncOp = True
    options.timeout = timedelta(seconds=limit_seconds)
    return options


def _make_group(rendezvous: Rendezvous, store: Any, timeout: timedelta) -> Any:
    place = (dist.PrefixStore("weights", store), rendezvous.rank, rendezvous.world_size)
    if rendezvous.backend == "gloo":
        return make_gloo_group(*place, host=rendezvous.address, timeout=timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout  # noqa: SLF001 - torch gives it no other name
    with environment(NCCL_SETTINGS):
        return dist.ProcessGroupNCCL(*place, options)
