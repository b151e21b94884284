"""The tracer records how a loader fills tensors: fused, padded, tied, transposed and partly loaded ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from example_trainer.serving.vllm.load_tracing import check_reload, needed_parts, noting_missed, trace_load_weights

FUSED = {"q": 0, "k": 4, "v": 6}


class Loader:
    """A loader like vLLM's: q, k and v into one parameter, an embedding into a padded one, a fused tensor in parts."""

    def __init__(self):
        self.qkv = torch.nn.Parameter(torch.full((8, 3), 7.0), requires_grad=False)
        self.embedding = torch.nn.Parameter(torch.full((16, 3), 7.0), requires_grad=False)
        self.gate_up = torch.nn.Parameter(torch.full((8, 3), 7.0), requires_grad=False)
        self.transposed = torch.nn.Parameter(torch.full((3, 5), 7.0), requires_grad=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            if name in FUSED:
                self.qkv.data.narrow(0, FUSED[name], tensor.shape[0]).copy_(tensor)
            elif name == "embedding":
                self.embedding[: tensor.shape[0]].data.copy_(tensor)
                self.embedding[tensor.shape[0] :].data.fill_(0)
            elif name == "tied":
                self.embedding.data.copy_(tensor)
            elif name == "gate_up":
                for half in (0, 1):
                    self.gate_up.data[half * 4 : half * 4 + 4].copy_(tensor[half * 4 : half * 4 + 4])
            elif name == "swapped":
                self.gate_up.data[4:].copy_(tensor[:4])
                self.gate_up.data[:4].copy_(tensor[4:])
            elif name == "transposed":
                self.transposed.data.copy_(tensor.t())
            elif name == "half":
                self.qkv.data[:4].copy_(tensor[:4])
            elif name == "doubled":
                self.qkv.data.copy_(tensor * 2)


@pytest.fixture
def loader():
    return Loader()


def trace(loader, **shapes):
    return trace_load_weights(loader.load_weights, shapes, torch.float32)


def test_fused_parameters_are_found_by_their_rows(loader):
    found = trace(loader, q=(4, 3), k=(2, 3), v=(2, 3)).copies
    assert [found[name][0].target_offset for name in "qkv"] == [0, 12, 18]
    assert {found[name][0].target_storage for name in "qkv"} == {loader.qkv.untyped_storage().data_ptr()}


def test_nothing_is_loaded_while_tracing(loader):
    trace(loader, q=(4, 3), embedding=(10, 3))
    assert torch.equal(loader.qkv, torch.full((8, 3), 7.0))
    assert torch.equal(loader.embedding, torch.full((16, 3), 7.0))


def test_padding_of_the_vocabulary_is_left_out(loader):
    (copy,) = trace(loader, embedding=(10, 3)).copies["embedding"]
    assert (copy.target_offset, copy.shape) == (0, (10, 3))


def test_parts_that_lie_side_by_side_become_one(loader):
    (copy,) = trace(loader, gate_up=(8, 3)).copies["gate_up"]
    assert copy.shape == copy.source_shape == (8, 3)


def test_parts_that_changed_places_stay_apart(loader):
    first, second = trace(loader, swapped=(8, 3)).copies["swapped"]
    assert (first.source_offset, first.target_offset) == (0, 12)
    assert (second.source_offset, second.target_offset) == (12, 0)


def test_a_transposed_tensor_keeps_its_strides(loader):
    (copy,) = trace(loader, transposed=(5, 3)).copies["transposed"]
    assert (copy.shape, copy.source_stride, copy.target_stride) == ((3, 5), (1, 3), (5, 1))


@pytest.mark.parametrize(
    ("name", "reason"), [("half", "12 of its 24"), ("doubled", "changes its values"), ("unknown", "does not load it")]
)
def test_what_is_not_loaded_one_to_one_is_named_with_the_reason(loader, name, reason):
    found = trace(loader, **{name: (8, 3)})
    assert reason in found.unmapped[name]
    assert name not in found.copies


@pytest.mark.parametrize(
    ("lacking", "needed"),
    [
        ({"k": (2, 3)}, ["k"]),
        ({"k": (2, 3), "v": (2, 3)}, ["k", "v"]),
        ({"tied": (16, 3)}, []),
        ({"unknown": (2, 3)}, []),
        ({"embedding": (10, 3)}, ["embedding"]),
    ],
)
def test_a_part_of_a_fused_parameter_that_a_checkpoint_lacks_is_found_and_a_tied_tensor_is_not(loader, lacking, needed):
    whole = {"q": (4, 3), "k": (2, 3), "v": (2, 3), "embedding": (10, 3)}
    held = {name: shape for name, shape in whole.items() if name not in lacking}
    assert needed_parts(loader.load_weights, held, lacking, torch.float32) == needed
    assert torch.equal(loader.qkv, torch.full((8, 3), 7.0)), "nothing is loaded"


class Model(torch.nn.Module):
    """A model that says which of its parameters it has loaded, or nothing."""

    def __init__(self, *, tells):
        super().__init__()
        self.first, self.second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
        self._tells = tells

    def load_weights(self, weights):
        loaded = {name for name, _ in weights}
        return loaded if self._tells else None


@pytest.mark.parametrize(("tells", "expected"), [(True, ["second"]), (False, [])])
def test_the_parameters_that_a_load_leaves_as_they_were_are_named(tells, expected):
    model = Model(tells=tells)
    with noting_missed(model) as missed:
        assert model.load_weights([("first", torch.ones(1))]) == ({"first"} if tells else None)
    assert missed == expected
    assert "load_weights" not in vars(model)


@pytest.mark.parametrize(("kernels", "reloads"), [("CPU", False), ("FLASHINFER_CUTLASS", True), ("TRITON", True)])
def test_a_mixture_of_experts_is_not_reloaded_where_vllm_would_leave_the_experts_in_another_order(kernels, reloads):
    layer = torch.nn.Linear(2, 2)
    layer.quant_method = SimpleNamespace(unquantized_backend=SimpleNamespace(name=kernels))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), layer)
    if reloads:
        check_reload(model)
    else:
        with pytest.raises(RuntimeError, match="cannot reload a mixture of experts on a CPU"):
            check_reload(model)
