"""Weights in packed buckets, gathered from any number of ranks, are the checkpoint's, bit by bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from example_trainer.distributed.rank0_proxy import CollectiveWeightSource, join_publish, publish_on_rank0
from example_trainer.distributed.ranks import Ranks
from example_trainer.errors import RanksFailed
from example_trainer.model import load_policy
from example_trainer.modeling.loading import PolicyOptions, Sharding
from example_trainer.testing import make_tiny_model
from example_trainer.weight_protocol.buckets import BUCKET_BYTES, Bucket, fill_buckets
from example_trainer.weights.base import PublishReport
from example_trainer.weights.logprob_parity import Agreement
from example_trainer.weights.weight_source import WeightSource
from tests.unit.distributed.ranks import run_ranks

CPU = torch.device("cpu")
SMALL = 1 << 12


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> PolicyOptions:
    model = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    return PolicyOptions(model_name=str(model), dtype="bfloat16", device="cpu")


def read_all(source: WeightSource) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for number, bucket in enumerate(source.buckets)
        for name, tensor in bucket.unpack(source.packed(number, CPU)).items()
    }


def expected(options: PolicyOptions) -> dict[str, torch.Tensor]:
    policy = load_policy(options)
    return policy.checkpoint_tensors(policy.dtype)


@pytest.mark.parametrize("limit_bytes", [1, SMALL, BUCKET_BYTES])
def test_buckets_hold_every_weight_once_and_stay_below_the_limit(options: PolicyOptions, limit_bytes: int) -> None:
    source = WeightSource(load_policy(options), limit_bytes=limit_bytes)
    found, wanted = read_all(source), expected(options)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert all(bucket.nbytes <= limit_bytes or len(bucket.entries) == 1 for bucket in source.buckets)
    assert (len(source.buckets) == 1) == (limit_bytes == BUCKET_BYTES)


def test_a_router_s_bias_is_sent_in_fp32_in_which_the_trainer_adds_it(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64}
    sizes |= {"num_hidden_layers": 2, "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 4}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("glm4_moe", **sizes)).save_pretrained(tmp_path)
    policy = load_policy(PolicyOptions(model_name=str(tmp_path), dtype="bfloat16", device="cpu"))
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    policy.module.get_buffer(bias).copy_(torch.tensor([0.1, 0.2, 0.3, 0.7]))
    found = read_all(WeightSource(policy))
    assert torch.equal(found[bias], policy.module.get_buffer(bias))
    assert found.keys() == policy.checkpoint_tensors(policy.dtype).keys()


def test_the_weights_of_a_gpu_leave_it_through_one_pinned_buffer(
    options: PolicyOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's calls are recorded: the buffer has the largest bucket's size, and a bucket is whole when sent."""
    policy, calls = load_policy(options), []
    wanted = read_all(WeightSource(policy, limit_bytes=SMALL))
    make = torch.empty

    def empty(*shape: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        if pin_memory:
            calls.append(("pinned", shape[0]))
        return make(*shape, **more)

    monkeypatch.setattr(torch, "empty", empty)
    waiting = SimpleNamespace(synchronize=lambda: calls.append("wait"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: waiting)
    source = WeightSource(policy, limit_bytes=SMALL)
    monkeypatch.setattr(policy, "device", torch.device("cuda", 0))
    found = {}
    for number, bucket in enumerate(source.buckets):
        found |= {name: tensor.clone() for name, tensor in bucket.unpack(source.packed(number, CPU)).items()}
    assert calls == [("pinned", max(bucket.nbytes for bucket in source.buckets)), *["wait"] * len(source.buckets)]
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_a_bucket_reads_the_weights_as_they_are_when_it_is_packed(options: PolicyOptions) -> None:
    policy = load_policy(options)
    source = WeightSource(policy)
    with torch.no_grad():
        for master in policy.masters.values():
            master.mul_(2)
    for name, tensor in policy.checkpoint_tensors(policy.dtype).items():
        assert torch.equal(read_all(source)[name], tensor)


def test_the_tensors_of_one_weight_are_not_cut_between_buckets_and_each_is_aligned() -> None:
    odd = [("a.0", [3], "int8"), ("a.1", [5], "bfloat16")]
    filled = fill_buckets({"a": odd, "b": [("b", [7], "float32")]}, 40)
    assert [(names, [entry[0] for entry in bucket.entries]) for names, bucket in filled] == [
        (["a"], ["a.0", "a.1"]),
        (["b"], ["b"]),
    ]
    bucket = Bucket((*odd, ("b", [7], "float32")))
    places = bucket.unpack(bucket.empty(CPU))
    assert [tensor.storage_offset() * tensor.element_size() for tensor in places.values()] == [0, 16, 32]


class Publishing:
    """The bridge of rank 0: it reads every bucket a number of times."""

    def __init__(self, source: CollectiveWeightSource, times: int, fails: bool) -> None:
        self.source, self.times, self.fails = source, times, fails
        self.read: dict[str, torch.Tensor] = {}
        self.agreement: Agreement | None = None

    def publish(self, version: int) -> PublishReport:
        for _ in range(self.times):
            self.source.packed(0, CPU)  # an attempt that a server's failure ends after one bucket
        self.read = read_all(self.source)
        prompt, outputs = [1, 2, 3], [[4, 5], [6, 7, 8]]
        self.agreement = self.source.compare([(prompt, outputs, [[0.0] * len(each) for each in outputs])], None)
        if self.fails:
            raise ValueError("a server is gone")
        return PublishReport(version=version, seconds=0.0)


def publish(ranks: Ranks, options: PolicyOptions, fails: bool) -> Any:
    policy = load_policy(options)
    if not ranks.is_main:
        source = WeightSource(policy, limit_bytes=SMALL)
        return join_publish(ranks, source).version
    source = CollectiveWeightSource(ranks, policy, limit_bytes=SMALL)
    bridge: Any = Publishing(source, 2, fails)
    version = publish_on_rank0(ranks, bridge, 7).version
    return version, bridge.read, bridge.agreement.difference.mean, len(source.buckets)


@pytest.mark.parametrize(("world_size", "tensor_parallel_size"), [(2, 1), (2, 2), (4, 2)])
def test_ranks_gather_the_checkpoint_bucket_by_bucket_however_often_rank_0_repeats(
    options: PolicyOptions, tmp_path: Path, world_size: int, tensor_parallel_size: int
) -> None:
    sharded = replace(options, sharding=Sharding(tensor_parallel_size=tensor_parallel_size))
    first, *others = run_ranks(
        world_size, tmp_path / "meeting", publish, sharded, False, tensor_parallel_size=tensor_parallel_size
    )
    version, read, difference, buckets = first
    assert [version, *others] == [7] * world_size
    assert buckets > 3
    wanted = {name: tensor.float().numpy() for name, tensor in expected(options).items()}
    assert read.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (read[name] == tensor).all(), name
    assert difference == pytest.approx(own_logprobs(options), rel=2e-2)


@torch.no_grad()
def own_logprobs(options: PolicyOptions) -> float:
    """Return the whole model's mean negative logprob of the outputs that `Publishing` compares with zeros."""
    module: Any = load_policy(options).module
    total: list[float] = []
    for output in ([4, 5], [6, 7, 8]):
        logs = module(torch.tensor([[1, 2, 3, *output]])).logits.float().log_softmax(-1)[0, 2:-1]
        total += [-float(logs[at, token]) for at, token in enumerate(output)]
    return sum(total) / len(total)


def failing(ranks: Ranks, options: PolicyOptions) -> str:
    try:
        publish(ranks, options, True)
    except (RanksFailed, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_every_rank_learns_why_a_publish_failed(options: PolicyOptions, tmp_path: Path) -> None:
    told = run_ranks(2, tmp_path / "meeting", failing, replace(options, sharding=Sharding()))
    assert told[0] == "ValueError: a server is gone"
    assert told[1].startswith("RanksFailed: rank 0 has failed")
    assert "a server is gone" in told[1]
