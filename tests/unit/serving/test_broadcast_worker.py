"""A worker's membership in a broadcast: its rank, and what it keeps of a group that it has left."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from example_trainer.serving.vllm import broadcast_worker
from example_trainer.serving.vllm.broadcast_worker import BroadcastReceiver, BroadcastWorker, copied_to_host
from example_trainer.weight_protocol.broadcast_group import Rendezvous

CPU = torch.device("cpu")


class Group:
    """A group whose members meet, or whose weights arrive, once it is told so."""

    def __init__(self):
        self.arrives, self.closed = threading.Event(), False

    def receive(self, _):
        assert self.arrives.wait(20)
        return {"w": torch.ones(2)}, "digest"

    def close(self):
        self.closed = True


@pytest.fixture
def meeting(monkeypatch):
    """The group that a worker joins, and the event that lets it meet the others."""
    group, met = Group(), threading.Event()
    places = []

    def join(place, _):
        places.append(place)
        assert met.wait(20)
        return group

    monkeypatch.setattr(broadcast_worker.BroadcastGroup, "join", join)
    return SimpleNamespace(group=group, met=met, places=places)


def ended(receiver):
    """Wait until the exchange has failed; return the error."""
    for _ in range(2000):
        if receiver._error is not None:
            return str(receiver._error)
        time.sleep(0.01)
    raise TimeoutError


def test_a_group_that_is_left_while_it_is_joined_is_closed_when_it_meets(meeting):
    """Else its NCCL communicator stays, and is never aborted."""
    receiver = BroadcastReceiver("g", Rendezvous("127.0.0.1", 1, 1, 2), CPU)
    receiver.leave()
    meeting.met.set()
    assert "left while its members joined" in ended(receiver)
    assert meeting.group.closed
    assert receiver._group is None


def test_weights_that_arrive_in_a_group_that_was_left_are_not_kept(meeting):
    receiver = BroadcastReceiver("g", Rendezvous("127.0.0.1", 1, 1, 2), CPU)
    meeting.met.set()
    while "rank" not in receiver.progress():
        time.sleep(0.01)
    receiver.receive("t", [], torch.nn.Linear(2, 2))
    receiver.leave()
    meeting.group.arrives.set()
    assert "left while weights were received" in ended(receiver)
    assert (receiver.aside, receiver.before) == ({}, {})


@pytest.mark.parametrize(
    "call",
    [
        lambda worker: worker.atropos_load_broadcast("own"),
        lambda worker: worker.atropos_settle_broadcast("own", False),
        lambda worker: worker.atropos_settle_broadcast("own", True),
    ],
    ids=["load", "restore", "keep"],
)
def test_a_trainer_neither_loads_nor_takes_back_the_weights_that_another_one_has_sent(call):
    """It would have served them as its own version, or the other's copy of its own as the version before."""
    model = torch.nn.Linear(2, 2, bias=False)
    model.load_weights = lambda weights: [model.weight.data.copy_(tensor) for _, tensor in weights]
    worker = BroadcastWorker()
    worker.model_runner = SimpleNamespace(model=model)
    worker._atropos_reception = reception = SimpleNamespace(
        transfer_id="other",
        aside={"weight": torch.ones(2, 2)},
        before={model.weight: torch.zeros(2, 2)},
        forget=lambda: reception.__dict__.update(aside={}, before={}),
    )
    was = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match="another group has been joined since"):
        call(worker)
    assert torch.equal(model.weight, was)
    assert reception.aside
    assert reception.before


def test_each_worker_of_a_server_joins_after_the_one_before(meeting):
    for rank in range(3):
        worker = BroadcastWorker()
        worker.rank, worker.device, worker.model_runner = rank, CPU, SimpleNamespace(model=torch.nn.Linear(2, 2))
        assert json.loads(worker.atropos_join_broadcast("g", "127.0.0.1", 1, 4, 9, "gloo")) == {}
    meeting.met.set()
    assert sorted(place.rank for place in meeting.places) == [4, 5, 6]
    assert {place.world_size for place in meeting.places} == {9}


@pytest.mark.parametrize(("kernels", "joins"), [("CPU", False), ("FLASHINFER_CUTLASS", False), ("TRITON", True)])
def test_a_server_whose_kernels_read_experts_in_another_order_than_they_are_loaded_joins_no_broadcast(
    meeting, kernels, joins
):
    layer = torch.nn.Linear(2, 2)
    layer.quant_method = SimpleNamespace(unquantized_backend=SimpleNamespace(name=kernels))
    worker = BroadcastWorker()
    worker.rank, worker.device, worker.model_runner = 0, CPU, SimpleNamespace(model=torch.nn.Sequential(layer))
    if joins:
        worker.atropos_join_broadcast("g", "127.0.0.1", 1, 1, 2, "gloo")
    else:
        with pytest.raises(RuntimeError, match=f"for its kernels {kernels}, and a broadcast only loads"):
            worker.atropos_join_broadcast("g", "127.0.0.1", 1, 1, 2, "gloo")
    meeting.met.set()


def test_the_copy_of_the_models_weights_shares_no_memory_with_them():
    weight = torch.ones(3)
    copies = copied_to_host([weight], CPU)
    weight.fill_(2)
    assert copies[weight].tolist() == [1.0, 1.0, 1.0]


def test_on_a_gpu_the_copies_are_pinned_and_made_in_a_stream_of_their_own(monkeypatch):
    calls = []

    class Stream:
        def __init__(self, device):
            calls.append(("stream on", str(device)))

        def __enter__(self):
            calls.append("enter")

        def __exit__(self, *_):
            calls.append("leave")

        def synchronize(self):
            calls.append("wait")

    class Copy:
        def copy_(self, tensor, *, non_blocking):
            calls.append(("copy", non_blocking))
            return tensor.clone()

    def empty(*_):
        calls.append("pinned")
        return Copy()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(broadcast_worker.PinnedBlocks, "empty", empty)
    copied_to_host([torch.ones(1)], torch.device("cuda", 1))
    assert calls == [("stream on", "cuda:1"), "enter", "pinned", ("copy", True), "leave", "wait"]
