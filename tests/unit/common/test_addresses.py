"""A mistyped address is reported at once with the likely correction, not after minutes of waiting."""

from __future__ import annotations

import pytest

from atropos_api.common.cliconfig import ConfigError, load_config
from atropos_api.common.identity import require_address, require_host
from environments.sdk.config import APIServerConfig, BaseEnvConfig
from example_trainer.config import TrainingConfig


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost:8000",
        "https://broker.example/prefix/t/token",
        "http://127.0.0.1",
        "http://[::1]:8000",
        "http://host_with_underscore:1/v1",
        "http://user:password@host:8000",
    ],
)
def test_an_address_is_taken(url: str) -> None:
    assert require_address(url) == url


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("localhost:8002", "begins with http:// or https://; did you mean http://localhost:8002?"),
        ("10.0.0.3:8002/v1", "did you mean http://10.0.0.3:8002/v1?"),
        ("ftp://host", "did you mean http://host?"),
        ("", "begins with http:// or https://"),
        ("http://", "names a host and maybe a port"),
        ("http://:8000", "names a host and maybe a port"),
        ("http://host:99999", "names a host and maybe a port"),
        ("http://host:0", "names a host and maybe a port"),
        ("http://host:8o00", "names a host and maybe a port"),
        ("http://two words:1", "names a host and maybe a port"),
        ("http://broker..svc:8000", "names a host and maybe a port"),
        (f"http://{'b' * 64}.svc:8000", "names a host and maybe a port"),
        ("http://http://host", "names a host and maybe a port"),
    ],
)
def test_a_text_that_is_not_an_address_is_reported_with_a_proposal(url: str, told: str) -> None:
    with pytest.raises(ValueError, match="an address") as caught:
        require_address(url)
    assert told in str(caught.value)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "gpu-7.cluster.example.", "my_host", "a"])
def test_a_host_is_taken(host: str) -> None:
    assert require_host(host) == host


def test_the_servers_of_a_host_with_an_ipv6_address_are_at_urls_with_brackets() -> None:
    config = TrainingConfig(
        model_name="m", vllm_host="::1", vllm_port=9001, num_inference_nodes=2, weight_bridge_mode="lora_only"
    )
    assert config.vllm_url == "http://[::1]:9001"
    assert config.server_urls == ("http://[::1]:9001", "http://[::1]:9002")
    assert all(map(require_address, config.server_urls))


def test_a_slash_at_the_end_of_a_servers_address_is_left_out() -> None:
    """Environments asked for http://gpu:9001//generate, which no server has."""
    config = TrainingConfig(
        model_name="m",
        weight_bridge_mode="lora_only",
        num_inference_nodes=1,
        inference_urls=["http://gpu:9001/"],
    )
    assert config.server_urls == ("http://gpu:9001",)


@pytest.mark.parametrize("host", ["http://host", "host:9001", "host/path", "", "two words", "-x", "[::1]"])
def test_a_text_that_is_not_a_host_is_reported(host: str) -> None:
    with pytest.raises(ValueError, match="without scheme and port"):
        require_host(host)


@pytest.mark.parametrize(
    "argv",
    [
        ("--atropos-url", "localhost:8002"),
        ("--vllm-host", "http://localhost"),
        ("--num-inference-nodes", "1", "--inference-urls", "localhost:9001"),
    ],
)
def test_the_trainer_judges_its_addresses_before_it_waits(argv: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=f"^{argv[-2]}"):
        load_config(TrainingConfig, ["--model-name", "m", *argv], prog="p", description="d")


def test_an_environment_judges_its_addresses_too_but_may_have_none_yet() -> None:
    assert APIServerConfig(base_url="").base_url == ""
    with pytest.raises(ValueError, match=r"did you mean http://localhost:9001/v1\?"):
        APIServerConfig(base_url="localhost:9001/v1")
    with pytest.raises(ValueError, match=r"did you mean http://localhost:8000\?"):
        BaseEnvConfig(rollout_server_url="localhost:8000")
