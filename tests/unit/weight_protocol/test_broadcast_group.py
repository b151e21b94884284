"""The process group of a broadcast: gloo between threads, and how NCCL's groups are made, limited and aborted.

There is no NCCL on a CPU, so its group is a recorder with torch's interface; `tests/gpu` has the real one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from example_trainer.processes.ports import free_port
from example_trainer.processes.tree import wait_until
from example_trainer.weight_protocol import broadcast_group
from example_trainer.weight_protocol.broadcast_group import NCCL_SETTINGS, TIMEOUT_SECONDS, BroadcastGroup, Rendezvous
from example_trainer.weight_protocol.buckets import Bucket

CPU = torch.device("cpu")
BUCKETS = [Bucket((("a", [3, 2], "float32"), ("b", [5], "bfloat16"))), Bucket((("c", [1], "int64"),))]


def pack(number: int) -> torch.Tensor:
    buffer = BUCKETS[number].empty(CPU)
    for at, view in enumerate(BUCKETS[number].unpack(buffer).values()):
        view.fill_(1 + number + at)
    return buffer


def test_two_receivers_get_the_tensors_and_the_checksum_of_the_sender() -> None:
    port = free_port()
    with ThreadPoolExecutor(3) as pool:
        places = [Rendezvous("127.0.0.1", port, rank, 3) for rank in range(3)]
        sender, *receivers = pool.map(lambda place: BroadcastGroup.join(place, CPU), places)
        sent = pool.submit(sender.send, BUCKETS, pack)
        answers = list(pool.map(lambda group: group.receive(BUCKETS), receivers))
    for tensors, digest in answers:
        assert digest == sent.result()
        assert {name: (list(each.shape), each.flatten()[0].item()) for name, each in tensors.items()} == {
            "a": ([3, 2], 1),
            "b": ([5], 2),
            "c": ([1], 2),
        }
    for group in (sender, *receivers):
        group.close()


def test_weights_for_a_gpu_are_received_into_shared_blocks_of_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, torch would round each bucket up to a power of two: 116 GB for 66 of a 32B model."""
    made: list[list[int]] = []

    class Blocks:
        def empty(self, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
            made.append(shape)
            return torch.zeros(shape, dtype=dtype)

    monkeypatch.setattr(broadcast_group, "PinnedBlocks", Blocks)
    group = object.__new__(BroadcastGroup)
    group.pins, group.device = True, CPU
    monkeypatch.setattr(group, "_broadcast", lambda buffer: buffer.fill_(1))
    tensors, _ = group.receive(BUCKETS)
    assert made == [[bucket.nbytes] for bucket in BUCKETS]
    assert tensors["c"].item() == 0x0101010101010101


def test_a_member_that_is_gone_ends_the_wait_of_the_others_though_the_senders_error_is_kept() -> None:
    """A publish that is tried again keeps its last error; a receiver may not wait for its limit of a minute then."""
    port = free_port()
    with ThreadPoolExecutor(3) as pool:
        places = [Rendezvous("127.0.0.1", port, rank, 3) for rank in range(3)]
        sender, receiver, gone = pool.map(lambda place: BroadcastGroup.join(place, CPU), places)
        gone.close()
        del gone
        with pytest.raises(RuntimeError) as kept:
            again_and_again(lambda: sender.send(BUCKETS, pack))
        sender.close()
        waiting = pool.submit(again_and_again, lambda: receiver.receive(BUCKETS))
        assert wait_until(waiting.done, TIMEOUT_SECONDS / 2)
        receiver.close()
    assert isinstance(waiting.exception(), RuntimeError)
    assert kept.value.__traceback__ is not None


def test_a_member_that_never_comes_ends_the_wait_of_the_others_at_their_limit() -> None:
    port, limit = free_port(), 0.5
    places = [Rendezvous("127.0.0.1", port, rank, 3) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(BroadcastGroup.join, place, CPU, limit) for place in places]
        for wait in waits:
            with pytest.raises(RuntimeError, match=r"not all 3 members of the broadcast group joined in 0\.5 s"):
                wait.result(10)


def again_and_again(exchange: Callable[[], Any]) -> None:
    """Repeat it until it fails: what was sent first may fit into the buffers of the connection."""
    while True:
        exchange()


class NcclGroup:
    """Records the calls to NCCL; an operation lasts until `done` is set or the group is aborted."""

    def __init__(self, _store: Any, rank: int, size: int, options: Any) -> None:
        self.place, self.limit = (rank, size), options._timeout
        self.settings = {name: os.environ.get(name) for name in NCCL_SETTINGS}
        self.done, self.aborted = threading.Event(), threading.Event()

    def broadcast(self, _tensors: Any, _options: Any) -> Any:
        return SimpleNamespace(is_completed=lambda: self.done.is_set() or self.aborted.is_set(), wait=lambda: None)

    def abort(self) -> None:
        self.aborted.set()


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> BroadcastGroup:
    NcclGroup.Options = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setattr(broadcast_group.dist, "ProcessGroupNCCL", NcclGroup, raising=False)
    return BroadcastGroup(Rendezvous("127.0.0.1", free_port(), 0, 1, "nccl"), CPU, timeout_seconds=0.3)


def test_torchs_watchdog_cannot_end_the_process_and_the_environment_is_restored(nccl: BroadcastGroup) -> None:
    assert nccl._group.settings == NCCL_SETTINGS
    assert nccl._group.limit.total_seconds() == 0.3
    assert not set(NCCL_SETTINGS) & set(os.environ)


def test_members_that_nccl_cannot_connect_end_the_wait_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    ends, started = threading.Event(), time.monotonic()
    monkeypatch.setattr(NcclGroup, "broadcast", lambda *_: ends.wait())
    monkeypatch.setattr(NcclGroup, "Options", SimpleNamespace, raising=False)
    monkeypatch.setattr(broadcast_group.dist, "ProcessGroupNCCL", NcclGroup, raising=False)
    place = Rendezvous("127.0.0.1", free_port(), 0, 1, "nccl")
    with pytest.raises(RuntimeError, match=r"NCCL did not connect the members in 0\.3 s"):
        BroadcastGroup.join(place, CPU, 0.3)
    assert time.monotonic() - started < 10
    ends.set()


def test_an_operation_with_a_member_that_is_gone_is_aborted_at_its_limit_and_raises(nccl: BroadcastGroup) -> None:
    group, started = nccl._group, time.monotonic()
    with pytest.raises(RuntimeError, match=r"was not sent in 0\.3 s: a member of the group is gone"):
        nccl.send(BUCKETS, pack)
    assert group.aborted.is_set()
    assert time.monotonic() - started < 10
    with pytest.raises(RuntimeError, match="has been left"):
        nccl.send(BUCKETS, pack)


def test_an_operation_that_is_aborted_by_leaving_raises_although_nccl_reports_no_error(nccl: BroadcastGroup) -> None:
    group = nccl._group
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(nccl.receive, BUCKETS)
        nccl.close()
        with pytest.raises(RuntimeError, match="has been left"):
            waiting.result()
    assert group.aborted.is_set()


def test_an_operation_that_ends_in_time_is_not_aborted(nccl: BroadcastGroup) -> None:
    nccl._group.done.set()
    assert len(nccl.send(BUCKETS, pack)) == 32
    assert not nccl._group.aborted.is_set()
