"""Gradients of masters in host memory: moved during the backward, and the same to the last bit."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from example_trainer.modeling.side_streams import HostGradients
from example_trainer.weight_protocol.pinned_memory import PinnedBlocks


def gradients_of(count, dtype=torch.bfloat16):
    return [torch.randn(5, 7, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in range(count)]


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_sum_of_all_micro_batches_is_bit_equal_to_adding_each_at_once(count, dtype):
    moved, added = nn.Parameter(torch.zeros(5, 7)), torch.zeros(5, 7)
    on_their_way = HostGradients(torch.device("cpu"))
    for number, gradient in enumerate(gradients_of(count, dtype)):
        added = gradient.to(torch.float32, copy=True) if number == 0 else added.add_(gradient)
        on_their_way.take("w", gradient, moved)
        gradient.zero_()  # its memory belongs to another tensor when it is added
    on_their_way.add_all({"w": moved})
    assert moved.grad.dtype == torch.float32
    assert torch.equal(moved.grad, added)
    on_their_way.add_all({"w": moved})
    assert torch.equal(moved.grad, added), "each is added once"


def test_gradients_of_a_mini_batch_that_was_not_finished_are_not_in_the_next():
    moved = nn.Parameter(torch.zeros(5, 7))
    on_their_way = HostGradients(torch.device("cpu"))
    first, second = gradients_of(2)
    on_their_way.take("w", first, moved)
    on_their_way.drop()
    on_their_way.take("w", second, moved)
    on_their_way.add_all({"w": moved})
    assert torch.equal(moved.grad, second.float())


def test_the_masters_gradients_stay_allocated_from_step_to_step():
    moved, on_their_way, places = nn.Parameter(torch.zeros(5, 7)), HostGradients(torch.device("cpu")), set()
    for gradient in gradients_of(3):
        on_their_way.take("w", gradient, moved)
        on_their_way.add_all({"w": moved})
        assert torch.equal(moved.grad, gradient.float()), "nothing of the last step is left in it"
        places.add(moved.grad.data_ptr())
        moved.grad = None
    assert len(places) == 1


class OnGpu:
    """A gradient that claims to be on a GPU and records its calls."""

    device, dtype, shape = torch.device("cuda", 0), torch.bfloat16, (2,)

    def __init__(self, calls):
        self.calls = calls

    def record_stream(self, stream):
        self.calls.append(("kept for", stream.name))


def test_a_gradient_leaves_the_gpu_in_its_own_dtype_pinned_and_beside_the_backward(monkeypatch):
    calls, made = [], []

    class Pinned(torch.Tensor):
        def copy_(self, _, non_blocking=False):
            calls.append(("copy", non_blocking))
            return self

    def empty(_, shape, dtype):
        made.append((shape, dtype))
        return torch.tensor([3, 4]).to(dtype).as_subclass(Pinned)

    side = SimpleNamespace(name="side", wait_stream=lambda stream: calls.append(("wait in side for", stream)))
    event = SimpleNamespace(
        record=lambda stream: calls.append(("record in", stream.name)), synchronize=lambda: calls.append(("wait",))
    )
    monkeypatch.setattr(PinnedBlocks, "empty", empty)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: side)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "default")
    master = nn.Parameter(torch.zeros(2))
    on_their_way = HostGradients(torch.device("cuda", 0))
    on_their_way.take("w", OnGpu(calls), master)
    begun = [("wait in side for", "default"), ("copy", True), ("record in", "side"), ("kept for", "side")]
    assert (made, calls) == ([((2,), torch.bfloat16)], begun), "the backward has not waited"
    on_their_way.add_all({"w": master})
    assert calls == [*begun, ("wait",)]
    assert master.grad.tolist() == [3, 4]
