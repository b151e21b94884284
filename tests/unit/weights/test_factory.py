"""One configuration, one bridge: what each mode is made of."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from example_trainer.config import TrainingConfig
from example_trainer.weights.broadcast import BroadcastBridge
from example_trainer.weights.factory import make_bridge
from example_trainer.weights.lora_only import LoraHotswapBridge, ServersHotswapBridge
from example_trainer.weights.restart import RestartBridge
from example_trainer.weights.shared_vllm import SharedVllmBridge


def config(tmp_path, **changes):
    return TrainingConfig(**{"model_name": "some/model", "run_dir": tmp_path, **changes})


def test_shared_mode_takes_its_settings_from_the_configuration(tmp_path):
    bridge = make_bridge(
        config(
            tmp_path,
            weight_bridge_mode="shared_vllm",
            vllm_port=9123,
            drain_seconds=0.25,
            in_flight="recompute",
            sync_budget=0.1,
            max_staleness=3,
            wait_timeout=7,
            overlap_publish=True,
            train_layer_indices="1-2",
        )
    )
    assert isinstance(bridge, SharedVllmBridge)
    options = bridge._options
    assert options.server_url == "http://127.0.0.1:9123"
    assert (options.drain_seconds, options.in_flight) == (0.25, "recompute")
    assert (options.sync_budget, options.max_staleness, options.wait_timeout_seconds) == (0.1, 3, 7)
    assert options.forwards_from_masters
    assert options.policy.train_layer_indices == "1-2"


def test_mode_none_starts_its_own_server_in_the_run_directory(tmp_path):
    bridge = make_bridge(
        config(tmp_path, vllm_port=9124, vllm_restart_interval=5, vllm_quantization="fp8", vllm_tensor_parallel_size=2)
    )
    assert isinstance(bridge, RestartBridge)
    options = bridge._options
    assert (options.weights_dir, options.vllm.log_path) == (tmp_path / "served", tmp_path / "logs" / "vllm.log")
    assert options.vllm.served_model_name == options.vllm.tokenizer == "some/model"
    assert list(options.vllm.extra_arguments) == ["--tensor-parallel-size", "2", "--quantization", "fp8"]
    assert [bridge.should_publish(steps) for steps in (1, 4, 5)] == [False, False, True]


def test_lora_only_starts_a_server_that_keeps_a_version_for_each_step_of_staleness_and_two_more(tmp_path):
    settings = {"weight_bridge_mode": "lora_only", "lora_r": 12, "max_staleness": 3, "sync_check": "5"}
    bridge = make_bridge(config(tmp_path, vllm_port=9125, **settings))
    assert isinstance(bridge, LoraHotswapBridge)
    options = bridge._options
    assert options.server_url == "http://127.0.0.1:9125"
    assert (options.policy.adapter.r, options.versions_kept, options.sync_check_every) == (12, 5, 5)
    arguments = " ".join(options.vllm.extra_arguments)
    assert arguments.endswith("--enable-lora --max-lora-rank 16 --max-loras 5")
    assert bridge.should_publish(1)
    assert make_bridge(config(tmp_path, start_vllm="never", **settings))._options.vllm is None


def test_lora_restart_starts_its_own_servers_with_one_adapter_each(tmp_path):
    bridge = make_bridge(config(tmp_path, weight_bridge_mode="lora_restart", drain_seconds=2.0))
    assert isinstance(bridge, RestartBridge)
    options = bridge._options
    assert options.policy.adapter is not None
    assert list(options.adapter_arguments) == ["--enable-lora", "--max-lora-rank", "16", "--max-loras", "1"]
    assert options.vllm.drain_seconds == 2.0


@pytest.mark.parametrize("asked", ["0", "often", "-1"])
def test_a_sync_check_that_is_no_number_is_refused(tmp_path, asked):
    with pytest.raises(ValidationError, match="every, off, or a number"):
        config(tmp_path, sync_check=asked)


def test_with_several_inference_nodes_whole_weights_are_sent_to_each(tmp_path):
    settings = {"weight_bridge_mode": "shared_vllm", "num_inference_nodes": 2}
    bridge = make_bridge(config(tmp_path, vllm_port=9130, **settings))
    assert isinstance(bridge, BroadcastBridge)
    assert bridge._options.server_urls == ("http://127.0.0.1:9130", "http://127.0.0.1:9131")
    assert bridge._options.backend == "gloo"
    urls = ("http://a:1", "http://b:2")
    named = make_bridge(config(tmp_path, inference_urls=[*urls], broadcast_backend="nccl", **settings))
    assert (named._options.server_urls, named._options.backend) == (urls, "nccl")
    assert config(tmp_path, **settings).forwards_from_masters


def test_lora_only_sends_adapters_to_every_server_that_is_named(tmp_path):
    settings = {"weight_bridge_mode": "lora_only", "num_inference_nodes": 2}
    several = make_bridge(config(tmp_path, inference_urls=["http://a:1", "http://b:2"], **settings))
    assert isinstance(several, ServersHotswapBridge)
    assert [bridge._options.server_url for bridge in several._bridges] == ["http://a:1", "http://b:2"]
    assert len({bridge._options.adapters_dir for bridge in several._bridges}) == 2, "each server has files of its own"
    assert [bridge._options.vllm for bridge in several._bridges] == [None, None]
    shares = [bridge._options.sync_check_share for bridge in several._bridges]
    assert sum(shares) == pytest.approx(0.01), "the checks of all take as much time as those of one would"
    by_port = make_bridge(config(tmp_path, vllm_host="far", vllm_port=9130, **settings))
    assert [bridge._options.server_url for bridge in by_port._bridges] == ["http://far:9130", "http://far:9131"]
