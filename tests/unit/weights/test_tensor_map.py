"""From manifest pieces to views: exact, without a table of model families, or refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from example_trainer.errors import CannotShare
from example_trainer.weight_protocol.segment import PosixSegment
from example_trainer.weight_protocol.shm_header import Piece, TensorMap
from example_trainer.weights.tensor_map import StridedRegion, map_parameters, region_of, view_at
from example_trainer.weights.testing import FakeServer

FAMILIES = ["qwen2", "qwen2-tied", "llama", "phi3", "gpt2"]


def piece(memory: torch.Tensor, source: torch.Tensor) -> Piece:
    """Return the trace entry of a loader's `memory.copy_(source)`."""
    return Piece(
        storage="0",
        offset=memory.storage_offset(),
        shape=list(memory.shape),
        stride=list(memory.stride()),
        source_offset=source.storage_offset(),
        source_shape=list(source.shape),
        source_stride=list(source.stride()),
    )


def tensor_of(source: torch.Tensor, *pieces: Piece) -> TensorMap:
    return TensorMap(pieces=list(pieces), shape=list(source.shape), dtype="float32")


def seen_through(memory: torch.Tensor, region: StridedRegion) -> torch.Tensor:
    return view_at(memory.untyped_storage(), region, torch.float32)


@pytest.fixture
def serve(tiny_family, tmp_path):
    """A function that starts fake servers and returns their attached model, manifest and storages."""
    servers = []

    def start(family, **settings):
        server = FakeServer(tiny_family(family), tmp_path, **settings)
        servers.append(server)
        storages = {storage.id: PosixSegment("").attach(storage.handle) for storage in server.manifest.storages}
        model = AutoModelForCausalLM.from_pretrained(tiny_family(family), dtype=torch.float32)
        return server, model, storages

    yield start
    for server in servers:
        server.stop()


@pytest.mark.parametrize("shuffled", [False, True])
def test_adjacent_row_pieces_become_one_view_in_any_order(shuffled):
    source, memory = torch.rand(12, 4), torch.zeros(20, 4)
    pieces = []
    for first, last in [(0, 6), (6, 9), (9, 12)]:
        memory[first + 5 : last + 5].copy_(source[first:last])
        pieces.append(piece(memory[first + 5 : last + 5], source[first:last]))
    region = region_of(tensor_of(source, *(pieces[::-1] if shuffled else pieces)))
    assert region == StridedRegion("0", 20, (12, 4), (4, 1))
    assert torch.equal(seen_through(memory, region), source)


def test_pieces_cut_along_columns_become_one_view():
    source, memory = torch.rand(4, 6), torch.zeros(4, 10)
    for first, last in [(0, 2), (2, 6)]:
        memory[:, first:last].copy_(source[:, first:last])
    pieces = [piece(memory[:, a:b], source[:, a:b]) for a, b in [(0, 2), (2, 6)]]
    assert torch.equal(seen_through(memory, region_of(tensor_of(source, *pieces))), source)


@pytest.mark.parametrize("shape", [(4, 6), (5, 5)])
def test_a_transposed_load_is_seen_untransposed_even_when_square(shape):
    source = torch.rand(*shape)
    memory = source.t().contiguous()
    region = region_of(tensor_of(source, piece(memory, source.t())))
    assert torch.equal(seen_through(memory, region), source)


def test_single_rows_become_one_view():
    source = torch.rand(3, 4)
    memory = source.clone()
    pieces = [piece(memory[row : row + 1], source[row : row + 1]) for row in range(3)]
    assert torch.equal(seen_through(memory, region_of(tensor_of(source, *pieces))), source)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([((0, 4), (0, 4)), ((4, 8), (6, 10))], "not adjacent"),
        ([((0, 4), (0, 4))], "cover 16 of 32"),
        ([((0, 4), (0, 4)), ((2, 6), (2, 6))], "some twice"),
    ],
)
def test_pieces_with_gaps_holes_or_overlaps_are_refused(rows, reason):
    source, memory = torch.rand(8, 4), torch.zeros(16, 4)
    pieces = [piece(memory[c:d], source[a:b]) for (a, b), (c, d) in rows]
    with pytest.raises(ValueError, match=reason):
        region_of(tensor_of(source, *pieces))


def test_pieces_in_different_storages_and_reshaped_ones_are_refused():
    source, memory = torch.rand(8, 4), torch.zeros(8, 4)
    apart = [piece(memory[:4], source[:4]), replace(piece(memory[4:], source[4:]), storage="1")]
    with pytest.raises(ValueError, match="different storages"):
        region_of(tensor_of(source, *apart))
    interleaved = source.view(4, 2, 4).transpose(0, 1)[0]
    with pytest.raises(ValueError, match="reshapes"):
        region_of(tensor_of(source, piece(memory[:4], interleaved)))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_of_a_family_is_mapped_exactly(serve, tiny_family, family):
    server, model, storages = serve(family)
    views = map_parameters(model, server.manifest, storages)
    stored = load_file(tiny_family(family) / "model.safetensors")
    assert views.keys() == stored.keys()
    assert all(torch.equal(views[name], stored[name]) for name in stored)


def test_views_are_the_servers_memory_and_not_copies(serve):
    server, model, storages = serve("llama")
    views = map_parameters(model, server.manifest, storages)
    key = server.manifest.tensors["model.layers.1.self_attn.k_proj.weight"].pieces[0]
    whole = torch.empty(0, dtype=torch.float32).set_(storages["0"], 0, (storages["0"].nbytes() // 4,), (1,))
    views["model.layers.1.self_attn.k_proj.weight"][0, 3] = 42.0
    assert whole[key.offset + 3] == 42.0


def test_vocabulary_padding_is_sliced_off_when_the_manifest_has_it(serve):
    server, model, storages = serve("llama")
    entry = server.manifest.tensors["lm_head.weight"]
    padded = [320, 128]
    grown = replace(entry.pieces[0], shape=padded, source_shape=padded)
    server.manifest.tensors["lm_head.weight"] = replace(entry, shape=padded, pieces=[grown])
    assert map_parameters(model, server.manifest, storages)["lm_head.weight"].shape == (300, 128)


def test_a_missing_tensor_is_refused_by_name_and_nothing_is_filled_in(serve):
    server, model, storages = serve("llama")
    del server.manifest.tensors["model.layers.2.mlp.up_proj.weight"]
    server.manifest.unmapped.append("model.layers.2.mlp.up_proj.weight")
    del server.manifest.tensors["model.norm.weight"]
    with pytest.raises(CannotShare) as caught:
        map_parameters(model, server.manifest, storages)
    assert "2 of 30 tensors" in str(caught.value)
    assert "model.norm.weight: the server does not have" in str(caught.value)
    assert "model.layers.2.mlp.up_proj.weight: the server could not tell" in str(caught.value)


def test_a_wrong_shape_and_a_quantised_dtype_are_refused(serve):
    server, model, storages = serve("llama")
    tensors = server.manifest.tensors
    tensors["model.norm.weight"] = tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["lm_head.weight"] = replace(tensors["lm_head.weight"], dtype="float8_e4m3fn")
    with pytest.raises(CannotShare) as caught:
        map_parameters(model, server.manifest, storages)
    assert "model.norm.weight: it has shape (96, 128) at the server and (128,)" in str(caught.value)
    assert "lm_head.weight: it is stored as float8_e4m3fn" in str(caught.value)


def test_ties_are_judged_by_memory_and_not_by_config(serve):
    server, model, storages = serve("qwen2-tied")
    server.manifest.tied.clear()
    server.manifest.tensors["lm_head.weight"] = server.manifest.tensors["model.embed_tokens.weight"]
    assert "lm_head.weight" not in map_parameters(model, server.manifest, storages)
    first = server.manifest.tensors["model.embed_tokens.weight"].pieces[0]
    elsewhere = replace(first, offset=first.offset + 128)
    server.manifest.tensors["lm_head.weight"] = replace(server.manifest.tensors["lm_head.weight"], pieces=[elsewhere])
    with pytest.raises(CannotShare, match=r"ties it to model\.embed_tokens\.weight"):
        map_parameters(model, server.manifest, storages)


def test_tensors_that_only_the_server_ties_are_refused(serve):
    server, model, storages = serve("qwen2")
    server.manifest.tied["lm_head.weight"] = "model.embed_tokens.weight"
    with pytest.raises(CannotShare, match=r"same memory as model\.embed_tokens\.weight"):
        map_parameters(model, server.manifest, storages)


def test_experts_that_transformers_merges_are_refused_by_name(serve, tiny_family):
    server, _, storages = serve("llama")
    mixtral = AutoModelForCausalLM.from_pretrained(tiny_family("mixtral"), dtype=torch.float32)
    with pytest.raises(
        CannotShare, match=r"layers\.0\.mlp\.experts\.gate_up_proj: transformers merges it from several"
    ):
        map_parameters(mixtral, server.manifest, storages)


def test_a_place_outside_the_storage_is_refused_and_never_grows_it(serve):
    _, _, storages = serve("llama")
    beyond = StridedRegion("0", storages["0"].nbytes() // 4 - 3, (4,), (1,))
    with pytest.raises(CannotShare, match="storage 0"):
        view_at(storages["0"], beyond, torch.float32)
