"""A configuration gives the bridge of its mode, with its server's settings."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from example_trainer.config import TrainingConfig
from example_trainer.vllm_manager import VllmManager, VllmOptions
from example_trainer.weights.broadcast import BroadcastBridge
from example_trainer.weights.checkpoint_delivery import CheckpointDelivery
from example_trainer.weights.delivery import AdapterDelivery, BroadcastDelivery
from example_trainer.weights.factory import make_bridge
from example_trainer.weights.lora_only import LoraOnlyBridge, SeveralServersBridge
from example_trainer.weights.registered import RegisteredBridge
from example_trainer.weights.restart import RestartBridge
from example_trainer.weights.shared_vllm import SharedVllmBridge


def config(tmp_path, **changes):
    return TrainingConfig(**{"model_name": "some/model", "run_dir": tmp_path, **changes})


@pytest.mark.parametrize(
    ("mode", "nodes", "bridge"),
    [
        ("shared_vllm", 0, SharedVllmBridge),
        ("shared_vllm", 1, BroadcastBridge),
        ("lora_only", 0, LoraOnlyBridge),
        ("lora_only", 2, SeveralServersBridge),
        ("lora_restart", 0, RestartBridge),
        ("none", 0, RestartBridge),
    ],
)
def test_each_mode_has_its_bridge(tmp_path, mode, nodes, bridge):
    made = make_bridge(config(tmp_path, weight_bridge_mode=mode, num_inference_nodes=nodes))
    assert type(made) is bridge
    made.close()


def test_mode_none_starts_its_own_server_in_the_run_directory(tmp_path):
    bridge = make_bridge(config(tmp_path, vllm_restart_interval=5))
    assert bridge._weights_dir == tmp_path / "served"
    assert bridge._vllm.log_path == tmp_path / "logs" / "vllm.log"
    assert [bridge.should_publish(steps) for steps in (1, 4, 5)] == [False, False, True]


@pytest.mark.parametrize(
    ("mode", "own"),
    [
        ("none", "--policy-version 3"),
        ("lora_restart", "--policy-version 3 --enable-lora --max-lora-rank 16 --max-loras 1 --adapter weights"),
        ("lora_only", "--await-policy --enable-lora --max-lora-rank 16 --max-loras 5"),
    ],
)
def test_the_trainers_server_gets_the_settings_of_the_trainer(tmp_path, mode, own):
    """Each flag has its value; the order does not matter."""
    vllm = VllmOptions.of(
        config(
            tmp_path,
            weight_bridge_mode=mode,
            vllm_port=9124,
            max_staleness=3,
            drain_seconds=2.0,
            seed=7,
            vllm_quantization="fp8",
            vllm_tensor_parallel_size=2,
            vllm_head_dtype="auto",
            vllm_enable_sleep_mode=True,
            **({} if mode == "none" else {"lora_r": 12}),
        )
    )
    more = {"adapter": "weights"} if mode == "lora_restart" else {}
    command = VllmManager(vllm).command("weights", version=None if mode == "lora_only" else 3, **more)
    expected = (
        "--model weights --tokenizer some/model --served-model-name some/model --host 127.0.0.1 --port 9124 "
        "--dtype bfloat16 --max-model-len 4096 --gpu-memory-utilization 0.45 --seed 7 --drain-seconds 2.0 "
        f"--no-share-weights --bridge-dir {tmp_path}/logs --tensor-parallel-size 2 --quantization fp8 "
        "--head-dtype auto --enable-sleep-mode "
    )
    assert flags_of(command[len(vllm.program) :]) == flags_of((expected + own).split())


def flags_of(arguments):
    """Return the flags in order of their names, each with its value."""
    return sorted(" ".join(arguments).replace(" --", "\n--").splitlines())


def test_lora_only_starts_a_server_unless_it_is_told_not_to(tmp_path):
    settings = {"weight_bridge_mode": "lora_only"}
    assert make_bridge(config(tmp_path, **settings))._vllm is not None
    assert make_bridge(config(tmp_path, start_vllm="never", **settings))._vllm is None


@pytest.mark.parametrize("asked", ["0", "often", "-1"])
def test_a_sync_check_that_is_not_a_number_is_refused(tmp_path, asked):
    with pytest.raises(ValidationError, match="every, off, or a number"):
        config(tmp_path, sync_check=asked)


def test_the_servers_of_a_broadcast_are_those_named_or_count_up_from_the_port(tmp_path):
    settings = {"weight_bridge_mode": "shared_vllm", "num_inference_nodes": 2}
    assert config(tmp_path, vllm_port=9130, **settings).server_urls == (
        "http://127.0.0.1:9130",
        "http://127.0.0.1:9131",
    )
    urls = ("http://a:1", "http://b:2")
    assert config(tmp_path, inference_urls=[*urls], **settings).server_urls == urls
    assert config(tmp_path, **settings).forwards_from_masters


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"weight_bridge_mode": "lora_only"}, AdapterDelivery),
        ({"weight_bridge_mode": "shared_vllm"}, BroadcastDelivery),
        ({"weight_bridge_mode": "none", "restart_method": "reload"}, CheckpointDelivery),
    ],
)
def test_registered_servers_get_what_the_mode_sends_and_no_address_is_needed(tmp_path, settings, kind):
    registered = config(tmp_path, registered_servers=True, policy="math", num_inference_nodes=3, **settings)
    bridge = make_bridge(registered, registry=SimpleNamespace())
    assert isinstance(bridge, RegisteredBridge)
    assert isinstance(bridge._delivery, kind)
    assert bridge._members._policy_name == "math"
    assert registered.server_urls == ()


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"weight_bridge_mode": "lora_restart"}, "use --weight-bridge-mode lora_only"),
        ({"weight_bridge_mode": "none"}, "add --restart-method reload"),
        (
            {"weight_bridge_mode": "lora_only", "num_inference_nodes": 1, "inference_urls": ["http://a:1"]},
            "leave --inference-urls out",
        ),
    ],
)
def test_what_registered_servers_cannot_do_is_refused_with_the_way_out(tmp_path, settings, advice):
    with pytest.raises(ValidationError, match=advice):
        config(tmp_path, registered_servers=True, **settings)


def test_lora_only_sends_adapters_to_every_server_that_is_named(tmp_path):
    settings = {"weight_bridge_mode": "lora_only", "num_inference_nodes": 2}
    several = make_bridge(config(tmp_path, inference_urls=["http://a:1", "http://b:2"], **settings))
    assert [bridge._url for bridge in several._bridges] == ["http://a:1", "http://b:2"]
    assert len({bridge._adapters_dir for bridge in several._bridges}) == 2, "each server has files of its own"
    assert [bridge._vllm for bridge in several._bridges] == [None, None]
    shares = [bridge._check._share for bridge in several._bridges]
    assert sum(shares) == pytest.approx(0.01), "the checks of all servers take as much time as those of one"
    by_port = make_bridge(config(tmp_path, vllm_host="far", vllm_port=9130, **settings))
    assert [bridge._url for bridge in by_port._bridges] == ["http://far:9130", "http://far:9131"]
