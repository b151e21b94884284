"""The addresses and ports of a run's programs, settled before any of them starts."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from example_trainer.running.ports import LOOPBACK, as_port, free_port, free_ports, require_free
from example_trainer.running.run_file import RunConfig, RunSettings

THIS_HOST = frozenset({LOOPBACK, "localhost", "::1"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """Addresses and ports, settled before any program starts."""

    broker_url: str
    broker_port: int | None
    """None: the broker is somebody else's."""
    vllm_ports: tuple[int, ...]
    """Of the inference servers on this host, whoever starts them."""
    remote_urls: tuple[str, ...] = ()
    """Of inference servers that are somebody else's."""

    @property
    def vllm_urls(self) -> tuple[str, ...]:
        return self.remote_urls or tuple(f"http://{LOOPBACK}:{port}" for port in self.vllm_ports)


def settle_places(settings: RunSettings, held: ExitStack | None = None) -> Places:
    """Ports for the programs we start: those asked for, if they are free, else free ones; held for the launch."""
    config = settings.trainer
    given = config.model_fields_set
    broker_port = None if "atropos_url" in given else _broker_port(settings, held)
    broker_url = config.atropos_url if broker_port is None else f"http://{LOOPBACK}:{broker_port}"
    remote = remote_servers(config)
    ports = () if remote else _vllm_ports(settings, held)
    return Places(broker_url=broker_url, broker_port=broker_port, vllm_ports=ports, remote_urls=remote)


def broadcasts(config: RunConfig) -> bool:
    """True where whole weights are sent to servers that share no memory with the trainer."""
    return config.weight_bridge_mode == "shared_vllm" and config.num_inference_nodes > 0


def remote_servers(config: RunConfig) -> tuple[str, ...]:
    """The addresses of servers that are not the launcher's to start; none where it starts its own."""
    count = config.num_inference_nodes
    if not broadcasts(config):
        return (f"http://{config.vllm_host}:{config.vllm_port}",) if count else ()
    if config.inference_urls:
        return tuple(config.inference_urls)
    ports = range(config.vllm_port, config.vllm_port + count)
    return () if config.vllm_host in THIS_HOST else tuple(f"http://{config.vllm_host}:{port}" for port in ports)


def _broker_port(settings: RunSettings, held: ExitStack | None) -> int:
    asked = settings.section("api").get("port")
    if asked is None:
        return free_port(held=held)
    return require_free(as_port(asked, "--api.port"), flag="--api.port", held=held)


def _vllm_ports(settings: RunSettings, held: ExitStack | None) -> tuple[int, ...]:
    """Of as many servers as there are to be on this host: counted up from the one that is asked for, or any."""
    config = settings.trainer
    count = config.num_inference_nodes if broadcasts(config) else 1
    asked, flag = settings.section("vllm").get("port"), "--vllm.port"
    # Somebody else's environments were told the documented port.
    if asked is None and ("vllm_port" in config.model_fields_set or not settings.environments):
        asked, flag = config.vllm_port, "--vllm-port"
    if asked is None:
        return free_ports(count, held=held)
    first = as_port(asked, flag)
    return tuple(require_free(as_port(first + index, flag), flag=flag, held=held) for index in range(count))
