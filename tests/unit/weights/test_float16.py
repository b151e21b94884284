"""float16 from trainer to server: both compute in it, the proof has limits for it, and other dtypes are found."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from example_trainer.errors import CannotShare, WrongDtype
from example_trainer.model import load_policy
from example_trainer.modeling.loading import (
    SERVED_DTYPES,
    PolicyOptions,
    policy_options,
    served_dtype_of,
    stored_config,
)
from example_trainer.weights import broadcast, restart
from example_trainer.weights.attachment import _refuse_unfit
from example_trainer.weights.broadcast import BroadcastBridge
from example_trainer.weights.logprob_parity import _WIDER, TOLERANCES, compare
from example_trainer.weights.lora_only import LoraOnlyBridge
from example_trainer.weights.restart import RestartBridge
from example_trainer.weights.testing import config_of

from .test_logprob_parity import agrees, policy_of, sampled_by
from .test_shared_vllm import served_equals_masters, train_one_step

URL = "http://127.0.0.1:9"


def test_every_dtype_that_is_served_has_limits_that_widen_with_its_rounding():
    assert set(TOLERANCES) == set(_WIDER) == set(SERVED_DTYPES)
    by_precision = sorted(SERVED_DTYPES, key=lambda dtype: torch.finfo(dtype).eps)
    assert by_precision == sorted(SERVED_DTYPES, key=lambda dtype: TOLERANCES[dtype].mean)
    assert all(torch.finfo(wider).eps < torch.finfo(dtype).eps for dtype, wider in _WIDER.items())


def test_float16_is_allowed_what_float16_rounds_and_not_more(tiny_family):
    policy = policy_of(tiny_family("llama"), "float16")
    assert agrees(policy, sampled_by(policy_of(tiny_family("llama"), "float32"))), "as a server that rounds elsewhere"
    assert compare(policy, sampled_by(policy)).limit.mean < TOLERANCES[torch.bfloat16].mean
    assert not agrees(policy, sampled_by(policy_of(tiny_family("llama"), "bfloat16"))), "nor as one that serves bf16"


@pytest.mark.parametrize("forward", ["views", "masters"])
@pytest.mark.parametrize("family", ["qwen2-tied", "llama", "gpt2"])
def test_float16_is_served_from_fp32_masters(shared, family, forward):
    _, bridge = shared(family, dtype="float16", forward_weights=forward, policy={"dtype": "auto"})
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
def half_model(tiny_family, tmp_path):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tiny_family("qwen2"), dtype=torch.float16).save_pretrained(tmp_path / "half")
    return tmp_path / "half"


def test_the_adapter_s_own_server_is_started_in_the_dtype_of_the_trainer_s_base(half_model, tmp_path, monkeypatch):
    """Otherwise vLLM's `auto` would serve an fp32 checkpoint in bf16, unlike ours."""
    started = []
    for dtype in ("auto", "float32"):
        config = half_config(half_model, tmp_path, weight_bridge_mode="lora_only", dtype=dtype)
        options = policy_options(config)
        bridge = LoraOnlyBridge(config)
        monkeypatch.setattr(bridge, "_start_own", lambda vllm: started.append(vllm.settings["dtype"]))
        monkeypatch.setattr(bridge, "connect", lambda *_: None)
        assert bridge.prepare().dtype == served_dtype_of(options, stored_config(options))
    assert started == ["float16", "float32"]


def half_config(model, directory, **changes):
    return config_of(URL, model, **{"dtype": "auto", "device": "cpu", "run_dir": directory} | changes)


def sending_adapters(model, directory, dtype, monkeypatch, head_dtype="float32"):
    """Return a `lora_only` bridge to a server that computes in `dtype`."""
    server = SimpleNamespace(identify=lambda: SimpleNamespace(dtype=dtype, head_dtype=head_dtype), close=lambda: None)
    bridge = LoraOnlyBridge(half_config(model, directory, weight_bridge_mode="lora_only", start_vllm="never"))
    monkeypatch.setattr(bridge, "_connect_found", lambda: server)
    return bridge


def broadcasting(model, directory, dtype, monkeypatch, head_dtype="float32"):
    """Return a broadcast bridge to a server that computes in `dtype`."""
    client = SimpleNamespace(url=URL, close=lambda: None)
    bridge = BroadcastBridge(half_config(model, directory, num_inference_nodes=1))
    info = SimpleNamespace(dtype=dtype, head_dtype=head_dtype)
    monkeypatch.setattr(broadcast, "connect_server", lambda *_: (client, info))
    return bridge


@pytest.mark.parametrize("bridge_to", [sending_adapters, broadcasting])
@pytest.mark.parametrize(("served", "fits"), [("float16", True), (None, True), ("bfloat16", False)])
def test_a_server_of_another_dtype_is_refused_with_the_flag_to_change(
    half_model, tmp_path, monkeypatch, bridge_to, served, fits
):
    bridge = bridge_to(half_model, tmp_path, served, monkeypatch)
    if fits:
        assert bridge.prepare().dtype == torch.float16
    else:
        with pytest.raises(WrongDtype, match=r"computes in bfloat16, the trainer in float16.* with --dtype float16"):
            bridge.prepare()
    bridge.close()


@pytest.mark.parametrize("bridge_to", [sending_adapters, broadcasting])
@pytest.mark.parametrize(
    ("head_dtype", "said"), [("float32", None), (None, "does not say"), ("float16", "rounds the logits")]
)
def test_a_server_whose_head_is_not_known_to_be_fp32_is_warned_about_once(
    half_model, tmp_path, monkeypatch, caplog, bridge_to, head_dtype, said
):
    bridge = bridge_to(half_model, tmp_path, "float16", monkeypatch, head_dtype=head_dtype)
    bridge.prepare()
    warned = [record.getMessage() for record in caplog.records if "output head" in record.getMessage()]
    assert len(warned) == (said is not None)
    if said is not None:
        assert said in warned[0]
        assert "--head-dtype float32" in warned[0]
    bridge.close()


def test_a_started_server_that_serves_another_dtype_than_it_was_told_is_refused(half_model, tmp_path, monkeypatch):
    bridge = RestartBridge(half_config(half_model, tmp_path, weight_bridge_mode="none"))
    manager = SimpleNamespace(url=URL, close=lambda: None)
    asked = []
    monkeypatch.setattr(restart, "VllmManager", lambda vllm, **_: asked.append(vllm.settings["dtype"]) or manager)
    monkeypatch.setattr(bridge, "_serve", lambda *_: (SimpleNamespace(dtype="bfloat16", head_dtype=None), 0.0))
    bridge.prepare()
    with pytest.raises(WrongDtype, match="computes in bfloat16"):
        bridge.publish(1)
    assert asked == ["float16"]
    stored = load_policy(PolicyOptions(model_name=str(tmp_path / "served/policy-v1"), dtype="auto", device="cpu"))
    assert stored.dtype == torch.float16
