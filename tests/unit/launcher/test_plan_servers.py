"""The plan of a launch with several inference servers: their GPUs, shares, addresses and caches; and its broker."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from atropos_api.common.cliconfig import ConfigError, load_config
from atropos_api.config import BrokerConfig
from example_trainer.config import TrainingConfig
from example_trainer.launcher import programs
from example_trainer.processes.ports import PortTaken

from .test_plan import OWN_ENVIRONMENT, names, plan


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_several_servers_are_started_told_to_the_trainer_and_shared_out_to_the_environments(tmp_path: Path) -> None:
    first = _free_port()
    made = plan(tmp_path, *OWN_ENVIRONMENT, "--num-inference-nodes", "2", "--vllm-port", str(first))
    assert names(made) == ["broker", "vllm", "vllm-2", "environment", "trainer"]
    servers = [made.settings_of(name)["vllm"] for name in made.servers]
    assert [server["port"] for server in servers] == [first, first + 1]
    assert [(server["await_policy"], server["share_weights"]) for server in servers] == [(True, False)] * 2
    assert servers[0]["gpu_memory_utilization"] * 2 == 0.45, "the share of one is divided"
    assert servers[0]["seed"] != servers[1]["seed"], "otherwise they would sample the same"
    told = made.settings_of("trainer")["trainer"]
    assert told["inference_urls"] == [f"http://127.0.0.1:{first + index}" for index in range(2)]
    assert "vllm_config_path" not in told
    sampled = made.settings_of("environment")["openai"]
    assert [server["base_url"] for server in sampled] == [f"{url}/v1" for url in told["inference_urls"]]
    homes = {spec.environment["LOGDIR"] for spec in made.children if spec.name in made.servers}
    assert len(homes) == 2, "each keeps a token of its own"
    with socket.create_server(("127.0.0.1", first + 1)), pytest.raises(PortTaken, match=f"port {first + 1} is taken"):
        plan(tmp_path, *OWN_ENVIRONMENT, "--num-inference-nodes", "2", "--vllm-port", str(first))


def test_servers_are_started_at_an_address_of_this_host_however_it_is_written(tmp_path: Path) -> None:
    made = plan(tmp_path, *OWN_ENVIRONMENT, "--num-inference-nodes", "1", "--vllm-host", "127.0.0.2")
    server, trainer = made.settings_of("vllm")["vllm"], made.settings_of("trainer")["trainer"]
    assert server["host"] == "127.0.0.2"
    assert trainer["inference_urls"] == [f"http://127.0.0.2:{server['port']}"]


@pytest.mark.parametrize(
    ("mode", "own"),
    [
        (["lora_only"], {"enable_lora": True}),
        (["shared_vllm"], {"share_weights": False}),
        (["none", "--restart-method", "reload"], {"share_weights": False}),
    ],
)
def test_registered_servers_and_those_who_follow_them_are_told_the_broker_and_no_address(
    tmp_path: Path, mode: list[str], own: dict[str, bool]
) -> None:
    flags = ("--registered-servers", "--policy", "math", "--num-inference-nodes", "2", "--weight-bridge-mode", *mode)
    made = plan(tmp_path, *OWN_ENVIRONMENT, *flags)
    assert names(made) == ["broker", "vllm", "vllm-2", "environment", "trainer"]
    told = made.settings_of("trainer")["trainer"]
    assert told["policy"] == "math"
    assert not {"vllm_host", "vllm_port", "inference_urls", "vllm_config_path"} & told.keys()
    for name in made.servers:
        server = made.settings_of(name)["vllm"]
        asked = {"broker_url": told["atropos_url"], "policy": "math", "await_policy": True} | own
        assert {key: server[key] for key in asked} == asked
    assert made.settings_of("environment")["openai"]["policy"] == "math"
    assert "base_url" not in made.settings_of("environment")["openai"]
    assert names(plan(tmp_path, *OWN_ENVIRONMENT, *flags, "--start-vllm", "never")) == [
        "broker",
        "environment",
        "trainer",
    ]


def test_several_servers_on_gpus_of_their_own_have_a_whole_share_each(tmp_path: Path) -> None:
    made = plan(tmp_path, *OWN_ENVIRONMENT, "--num-inference-nodes", "2", "--vllm-gpu", "3")
    assert [made.settings_of(name)["vllm"]["gpu_memory_utilization"] for name in made.servers] == [0.45, 0.45]
    servers = [spec for spec in made.children if spec.name in made.servers]
    assert [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in servers] == ["3", "4"]


def test_each_rank_of_a_server_has_a_gpu_of_its_own(tmp_path: Path) -> None:
    run = ("--num-inference-nodes", "2", "--vllm-gpu", "1", "--vllm-tensor-parallel-size", "2")
    made = plan(tmp_path, *OWN_ENVIRONMENT, *run)
    servers = [spec for spec in made.children if spec.name in made.servers]
    assert [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in servers] == ["1,2", "3,4"]
    assert {made.settings_of(name)["vllm"]["tensor_parallel_size"] for name in made.servers} == {2}


def test_a_servers_cache_on_a_shared_gpu_is_given_in_bytes_unless_its_section_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def cache(config: TrainingConfig, *, share: float, beside_server: bool) -> int:
        asked.append((Path(config.model_name).name, round(share, 3), beside_server))
        return 7 << 30

    monkeypatch.setattr(programs, "cache_on_shared_gpu", cache)
    made = plan(tmp_path, *OWN_ENVIRONMENT, "--num-inference-nodes", "2")
    assert [made.settings_of(name)["vllm"]["kv_cache_memory_bytes"] for name in made.servers] == [7 << 30] * 2
    assert {(share, beside) for _, share, beside in asked} == {(0.225, True)}
    own = plan(tmp_path, *OWN_ENVIRONMENT, "--num-inference-nodes", "2", "--vllm.gpu-memory-utilization", "0.3")
    assert not any("kv_cache_memory_bytes" in own.settings_of(name)["vllm"] for name in own.servers)


def test_servers_get_gpus_among_those_that_the_launcher_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = (*OWN_ENVIRONMENT, "--num-inference-nodes", "2", "--vllm-gpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,MIG-77b0")
    made = plan(tmp_path, *run, "1")
    servers = [spec for spec in made.children if spec.name in made.servers]
    assert [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in servers] == ["5", "MIG-77b0"]
    with pytest.raises(ConfigError, match="--vllm-gpu 3: CUDA_VISIBLE_DEVICES=4,5,MIG-77b0 leaves 3 GPUs"):
        plan(tmp_path, *run, "2")


@pytest.mark.parametrize(
    ("where", "urls"),
    [
        (["--inference-urls", "http://a:1", "http://b:2"], ["http://a:1", "http://b:2"]),
        (["--vllm-host", "serving", "--vllm-port", "7"], ["http://serving:7", "http://serving:8"]),
    ],
)
def test_servers_that_run_elsewhere_are_used_and_not_started(tmp_path: Path, where: list[str], urls: list[str]) -> None:
    made = plan(tmp_path, *OWN_ENVIRONMENT, "--num-inference-nodes", "2", "--openai.timeout", "9", *where)
    assert names(made) == ["broker", "environment", "trainer"]
    assert made.settings_of("trainer")["trainer"]["inference_urls"] == urls
    sampled = made.settings_of("environment")["openai"]
    assert [(server["base_url"], server["timeout"]) for server in sampled] == [(f"{url}/v1", "9") for url in urls]


def test_a_broker_that_begins_with_a_fresh_store_keeps_it_when_it_is_started_again(tmp_path: Path) -> None:
    run_file = tmp_path / "fresh.yaml"
    run_file.write_text("trainer: {model_name: m}\napi: {fresh: true}\n")
    for argv in (["--api.fresh"], ["--config", str(run_file)]):
        broker = plan(tmp_path, *argv).child("broker")
        assert broker is not None
        assert broker.restart_flags == ("--no-fresh",)
        config = load_config(BrokerConfig, ["--fresh", *broker.restart_flags], prog="run-api", description="")
        assert config.fresh is False
    usual = plan(tmp_path).child("broker")
    assert usual is not None
    assert usual.restart_flags == ()
