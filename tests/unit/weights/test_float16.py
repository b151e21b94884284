"""float16 on its way to a server: both sides compute in it, the proof has limits for it, and other dtypes are found."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from example_trainer.errors import CannotShare, WrongDtype
from example_trainer.model import load_policy
from example_trainer.modeling.loading import SERVED_DTYPES, PolicyOptions, served_dtype_of, stored_config
from example_trainer.modeling.lora import AdapterOptions
from example_trainer.vllm_manager import VllmOptions
from example_trainer.weights import lora_only, restart
from example_trainer.weights.attachment import _refuse_unfit
from example_trainer.weights.broadcast import BroadcastBridge, BroadcastOptions
from example_trainer.weights.logprob_parity import _WIDER, TOLERANCES, compare
from example_trainer.weights.lora_only import HotswapOptions, LoraHotswapBridge
from example_trainer.weights.restart import RestartBridge, RestartOptions

from .test_logprob_parity import agrees, policy_of, sampled_by
from .test_shared_vllm import served_equals_masters, train_one_step

URL = "http://127.0.0.1:9"


def test_every_dtype_that_is_served_has_limits_that_widen_with_its_rounding():
    assert set(TOLERANCES) == set(_WIDER) == set(SERVED_DTYPES)
    by_precision = sorted(SERVED_DTYPES, key=lambda dtype: torch.finfo(dtype).eps)
    assert by_precision == sorted(SERVED_DTYPES, key=lambda dtype: TOLERANCES[dtype].mean)
    assert all(torch.finfo(wider).eps < torch.finfo(dtype).eps for dtype, wider in _WIDER.items())


def test_float16_is_allowed_what_float16_rounds_and_not_more(tiny_model):
    policy = policy_of(tiny_model("llama"), "float16")
    assert agrees(policy, sampled_by(policy_of(tiny_model("llama"), "float32"))), "as a server that rounds elsewhere"
    assert compare(policy, sampled_by(policy)).limit.mean < TOLERANCES[torch.bfloat16].mean
    assert not agrees(policy, sampled_by(policy_of(tiny_model("llama"), "bfloat16"))), "nor as one that serves bf16"


@pytest.mark.parametrize("from_masters", [False, True], ids=["views", "masters"])
@pytest.mark.parametrize("family", ["qwen2-tied", "llama", "gpt2"])
def test_float16_is_served_from_fp32_masters(shared, family, from_masters):
    _, bridge = shared(family, dtype="float16", forwards_from_masters=from_masters, policy={"dtype": "auto"})
    policy = bridge.prepare()
    bridge.publish(1)
    train_one_step(policy)
    bridge.publish(2)
    assert policy.dtype == torch.float16
    assert {master.dtype for master in policy.masters.values()} == {torch.float32}
    assert served_equals_masters(policy)


def test_a_server_of_float16_cannot_share_weights_that_have_no_masters(shared):
    _, bridge = shared("llama", dtype="float16", policy={"dtype": "auto", "master_weights": "none"})
    with pytest.raises(WrongDtype, match="use --master-weights fp32"):
        bridge.prepare()


@pytest.mark.parametrize(("dtype", "fits"), [("float16", True), ("torch.bfloat16", True), ("float8_e4m3fn", False)])
def test_a_server_of_a_dtype_that_is_not_trained_is_refused(dtype, fits):
    manifest, info = SimpleNamespace(dtype=dtype, url=URL), SimpleNamespace(lora=False)
    if fits:
        _refuse_unfit(manifest, info)
    else:
        with pytest.raises(CannotShare, match="float8_e4m3fn, which cannot be trained"):
            _refuse_unfit(manifest, info)


@pytest.fixture
def half_model(tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tiny_model("qwen2"), dtype=torch.float16).save_pretrained(tmp_path / "half")
    return tmp_path / "half"


def test_the_adapter_s_own_server_is_started_in_the_dtype_of_the_trainer_s_base(half_model, tmp_path, monkeypatch):
    """Else vLLM's own auto would serve an fp32 checkpoint in bf16, which differs from ours."""
    started = []
    vllm = VllmOptions(port=9, log_path=tmp_path / "log", served_model_name="m", tokenizer="m")
    for dtype in ("auto", "float32"):
        policy = PolicyOptions(model_name=str(half_model), dtype=dtype, device="cpu", adapter=AdapterOptions(r=2))
        bridge = LoraHotswapBridge(HotswapOptions(policy=policy, server_url=URL, adapters_dir=tmp_path, vllm=vllm))
        monkeypatch.setattr(bridge, "_start_own", lambda options: started.append(options.dtype))
        monkeypatch.setattr(bridge, "connect", lambda *_: None)
        assert bridge.prepare().dtype == served_dtype_of(policy, stored_config(policy))
    assert started == ["float16", "float32"]


def swapping(policy, directory, dtype, monkeypatch):
    """A `lora_only` bridge to a server that computes in `dtype`."""
    server = SimpleNamespace(identify=lambda: SimpleNamespace(dtype=dtype), close=lambda: None)
    monkeypatch.setattr(lora_only, "_try_connect", lambda *_: server)
    return LoraHotswapBridge(HotswapOptions(policy=policy, server_url=URL, adapters_dir=directory))


def broadcasting(policy, directory, dtype, monkeypatch):
    """A broadcast bridge to a server that computes in `dtype`."""
    client = SimpleNamespace(url=URL, close=lambda: None)
    bridge = BroadcastBridge(BroadcastOptions(policy=policy, server_urls=[URL]))
    monkeypatch.setattr(bridge, "_connect", lambda _: (client, SimpleNamespace(dtype=dtype)))
    return bridge


@pytest.mark.parametrize("bridge_to", [swapping, broadcasting])
@pytest.mark.parametrize(("served", "fits"), [("float16", True), (None, True), ("bfloat16", False)])
def test_a_server_of_another_dtype_is_refused_with_the_flag_to_change(
    half_model, tmp_path, monkeypatch, bridge_to, served, fits
):
    adapter = AdapterOptions(r=2) if bridge_to is swapping else None
    policy = PolicyOptions(model_name=str(half_model), dtype="auto", device="cpu", adapter=adapter)
    bridge = bridge_to(policy, tmp_path, served, monkeypatch)
    if fits:
        assert bridge.prepare().dtype == torch.float16
    else:
        with pytest.raises(WrongDtype, match=r"computes in bfloat16, the trainer in float16.* with --dtype float16"):
            bridge.prepare()
    bridge.close()


def test_a_started_server_that_serves_another_dtype_than_it_was_told_is_refused(half_model, tmp_path, monkeypatch):
    policy = PolicyOptions(model_name=str(half_model), dtype="auto", device="cpu")
    vllm = VllmOptions(port=9, log_path=tmp_path / "log", served_model_name="m", tokenizer="m")
    bridge = RestartBridge(RestartOptions(policy=policy, vllm=vllm, weights_dir=tmp_path / "served"))
    manager = SimpleNamespace(url=URL, close=lambda: None)
    asked = []
    monkeypatch.setattr(restart, "VllmManager", lambda options: asked.append(options.dtype) or manager)
    monkeypatch.setattr(bridge, "_serve", lambda *_: (SimpleNamespace(dtype="bfloat16"), 0.0))
    bridge.prepare()
    with pytest.raises(WrongDtype, match="computes in bfloat16"):
        bridge.publish(1)
    assert asked == ["float16"]
    stored = load_policy(PolicyOptions(model_name=str(tmp_path / "served/policy-v1"), dtype="auto", device="cpu"))
    assert stored.dtype == torch.float16
