"""The addresses, ports and tokens of a run's programs: all are settled before any program starts.

`differing` separates the settings that are secret from those that may be written to a record.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atropos_api.common.cliconfig import ConfigError
from atropos_api.common.files import expand_home, write_private
from atropos_api.common.identity import EVERYWHERE, LOOPBACK_NAMES, host_in_url, is_this_host
from atropos_api.common.secrets import TOKEN_VARIABLE, TokenSource
from example_trainer.launcher.run_file import RunConfig, RunSettings
from example_trainer.launcher.teacher import TEACHER_SERVER, own_teacher
from example_trainer.memory.fit import ServerShares, with_changes
from example_trainer.memory.preflight import is_given, preflight, serves_on, trainer_gpu
from example_trainer.processes.ports import LOOPBACK, PortTaken, as_port, free_port, free_ports, require_free
from example_trainer.weight_protocol.manifest import given_token

EVERY_ADDRESS = "0.0.0.0"  # noqa: S104 - for servers on nodes of a cluster; the broker lists the one it is called from


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoints:
    """The addresses and ports of a run, settled before any program starts."""

    broker_url: str
    broker_port: int | None
    """None if this launch does not start the broker."""
    vllm_ports: tuple[int, ...]
    """Ports of the inference servers on this host, no matter which program starts them."""
    remote_urls: tuple[str, ...] = ()
    """Addresses of inference servers that this launch does not start."""
    teacher_port: int | None = None
    """Port of the teacher's server; None if this launch does not start it."""
    broker_host: str = LOOPBACK
    """This machine's address at which the broker listens."""
    server_host: str = LOOPBACK
    """The address at which each inference server listens; for a server that is placed, all addresses of its node."""

    @property
    def vllm_urls(self) -> tuple[str, ...]:
        """The addresses of the servers that are known before they start."""
        host = LOOPBACK if self.server_host in EVERYWHERE else host_in_url(self.server_host)
        return self.remote_urls or tuple(f"http://{host}:{port}" for port in self.vllm_ports if port)


def settle_endpoints(settings: RunSettings, held: ExitStack | None = None) -> Endpoints:
    """Choose the ports of the programs we start: those asked for (`PortTaken` if in use), or free ones; `held` keeps
    them from other programs.
    """
    with ExitStack() as own:  # keeps free ports until all are chosen, so that those of a dry run differ too
        endpoints = _choose_ports(settings, own if held is None else held)
    _refuse_shared_port(endpoints)
    return endpoints


def _refuse_shared_port(endpoints: Endpoints) -> None:
    """Raise `PortTaken` for a port that two programs have been given: the second one would fail once it listens."""
    given = [(endpoints.broker_host, endpoints.broker_port), (LOOPBACK, endpoints.teacher_port)]
    given += [(endpoints.server_host, port) for port in endpoints.vllm_ports]
    twice = next((port for host, port in given if port and given.count((host, port)) > 1), None)
    if twice is not None:
        raise PortTaken(
            f"port {twice} is asked for by two programs of this launch; give each its own with --api.port, --vllm.port "
            f"(which several servers count up from) and --{TEACHER_SERVER}.port"
        )


def _choose_ports(settings: RunSettings, held: ExitStack) -> Endpoints:
    config = settings.trainer
    given = config.model_fields_set
    host = _broker_host(settings)
    broker_port = None if "atropos_url" in given else _broker_port(settings, held, host)
    broker_url = config.atropos_url if broker_port is None else f"http://{host_in_url(host)}:{broker_port}"
    remote = config.remote_servers
    ports = () if remote else _vllm_ports(settings, held)
    return Endpoints(
        broker_url=broker_url,
        broker_port=broker_port,
        vllm_ports=ports,
        remote_urls=remote,
        teacher_port=_teacher_port(settings, held),
        broker_host=host,
        server_host=_server_host(settings),
    )


def _broker_host(settings: RunSettings) -> str:
    """Return the address at which programs reach the broker; raise `ConfigError` if they would lack its token."""
    if settings.placement.is_ray:
        return _own_address(settings.placement.head)
    asked = str(settings.section("api").get("host") or LOOPBACK)
    if asked in LOOPBACK_NAMES:
        return "::1" if asked == "::1" else LOOPBACK
    if "atropos_url" not in settings.trainer.model_fields_set:
        token = broker_token(settings)
        if not (token.value or token.file):
            raise ConfigError(
                f"--api.host {asked}: the broker can be reached from outside, so its callers need a token; set "
                f"{TOKEN_VARIABLE}, or name a file that holds one with --api.token-file"
            )
    if asked in EVERYWHERE:
        return LOOPBACK
    try:
        free_port(asked)
    except OSError as error:
        raise ConfigError(f"--api.host {asked}: {error.strerror}; name an address of this machine") from error
    return asked


def _own_address(head: tuple[str, int]) -> str:
    """Return the address by which this machine reaches the cluster's head, and is reached from there."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(head)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"--placement-address {head[0]}:{head[1]}: {error.strerror}; name the head as HOST:PORT"
        ) from error


def fit_to_gpu(settings: RunSettings) -> tuple[RunSettings, str | None]:
    """Return the settings with what `--fit auto` chose, and a line about it; raise `DoesNotFit` as `preflight` does."""
    config = settings.trainer
    given = _memory_settings(settings.section("vllm")) if config.servers_outlive_publish else {}
    starts_server = not config.remote_servers and config.local_servers > 0 and "gpu_memory_utilization" not in given
    servers = _server_shares(settings, divides=starts_server)
    if settings.placement.gives_whole_gpus:
        given["start_vllm"] = "never"  # no server takes memory of the trainer's GPU
    choice = preflight(with_changes(config, given), starts_server=starts_server, servers=servers)
    return replace(settings, trainer=with_changes(config, choice.changes)), choice.sentence


def _server_shares(settings: RunSettings, *, divides: bool) -> ServerShares:
    """Return the division of the trainer's GPU among the servers on it, as `launcher.programs` gives them their shares.

    `divides` is false if each server of the policy has a share of its own, which is not made from the trainer's.
    """
    config, teacher = settings.trainer, own_teacher(settings)
    policy = servers_on_one_gpu(config)
    parts = policy + (teacher is not None and not teacher.has_own_share)
    shares = ServerShares(policy_part=policy / parts if divides else policy)
    gpu = trainer_gpu(config)
    if teacher is None or not is_given(gpu, teacher.gpu_beside(config.vllm_gpu), os.environ, "--teacher.gpu"):
        return shares
    own = {**teacher.vllm, **settings.flags[TEACHER_SERVER].values}
    if "gpu_memory_utilization" in own:
        return replace(shares, teacher_share=_memory_settings(own).get("gpu_memory_utilization", 0.0))
    part = 1.0 if teacher.gpu is not None else 1.0 / parts
    if divides and serves_on(gpu, config, os.environ):
        return replace(shares, teacher_part=part)
    return replace(shares, teacher_share=part * config.gpu_memory_utilization)


def servers_on_one_gpu(config: RunConfig) -> int:
    """Return the number of the policy's servers that divide the memory of one GPU."""
    divide = config.vllm_gpu is None and not config.remote_servers and config.placement == "local"
    return max(1, config.local_servers) if divide else 1


def _memory_settings(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the `vllm` section that override the trainer's and determine the server's memory."""
    found: dict[str, Any] = {}
    for name, read in (("gpu_memory_utilization", float), ("max_model_len", int)):
        with suppress(KeyError, ValueError, TypeError):  # the server's own parser refuses a value that is not a number
            found[name] = read(section[name])
    return found


def _server_host(settings: RunSettings) -> str:
    """Return the address at which servers of this launch listen: loopback unless another of this host is asked for.

    A server that is placed listens everywhere: the broker lists the address that its node is reached at.
    """
    if settings.placement.is_ray:
        return EVERY_ADDRESS
    asked = str(settings.section("vllm").get("host") or settings.trainer.vllm_host)
    return asked if is_this_host(asked) else LOOPBACK


def _broker_port(settings: RunSettings, held: ExitStack, host: str) -> int:
    asked = settings.section("api").get("port")
    if asked is None:
        return free_port(host, held=held)
    return require_free(as_port(asked, "--api.port"), flag="--api.port", host=host, held=held)


def _vllm_ports(settings: RunSettings, held: ExitStack) -> tuple[int, ...]:
    """Return a port for each inference server on this host: counted up from the one asked for, or any free ones."""
    config = settings.trainer
    count = config.local_servers
    if settings.placement.is_ray:
        return (0,) * count  # each takes a free port of its node, and registers
    asked, flag = settings.section("vllm").get("port"), "--vllm.port"
    # Environments that this launch does not start use the documented port.
    if asked is None and ("vllm_port" in config.model_fields_set or not settings.environments):
        asked, flag = config.vllm_port, "--vllm-port"
    if asked is None:
        return free_ports(count, held=held)
    first = as_port(asked, flag)
    return tuple(require_free(as_port(first + index, flag), flag=flag, held=held) for index in range(count))


def _teacher_port(settings: RunSettings, held: ExitStack) -> int | None:
    own = own_teacher(settings)
    if own is None:
        return None
    asked = {**own.vllm, **settings.flags[TEACHER_SERVER].values}.get("port")
    if asked is None:
        return free_port(held=held)
    flag = f"--{TEACHER_SERVER}.port"
    return require_free(as_port(asked, flag), flag=flag, held=held)


def broker_token(settings: RunSettings) -> TokenSource:
    """Return the token with which the programs of this launch, and the launcher itself, authenticate to the broker."""
    config, api = settings.trainer, settings.section("api")
    if (
        config.atropos_token is None
        and config.atropos_token_file is None
        and (api.get("token") or api.get("token_file"))
    ):
        file = api.get("token_file")
        return TokenSource.settle(api.get("token"), Path(str(file)) if file else None, {}, flag="--api.token-file")
    token = TokenSource.settle(config.atropos_token, config.atropos_token_file, os.environ, flag="--atropos-token-file")
    reached = settings.placement.is_ray and "atropos_url" not in config.model_fields_set
    return TokenSource(settings.placement.own_token) if reached and not (token.value or token.file) else token


def save_own_token(settings: RunSettings, path: Path) -> Path | None:
    """Write the broker's token to a file for this user alone if the launcher made it, and return the file's path."""
    token = broker_token(settings).value
    if token != settings.placement.own_token:
        return None
    write_private(path, f"{token}\n")
    return path


def token_variables(token: TokenSource) -> dict[str, str]:
    """Return the token's variable, or its file's, and empty the other: an inherited value must not contradict it."""
    if token.file is not None:
        return {TOKEN_VARIABLE: "", f"{TOKEN_VARIABLE}_FILE": str(expand_home(token.file).absolute())}
    return {TOKEN_VARIABLE: token.value, f"{TOKEN_VARIABLE}_FILE": ""} if token.value else {}


def bridge_token(settings: RunSettings) -> str:
    """Return one token for all servers and the trainer: the one given to either, else the inherited one, else a new
    one.
    """
    given = settings.trainer.bridge_token or settings.section("vllm").get("bridge_token")
    return given_token(None if given is None else str(given), os.environ) or secrets.token_hex(16)


def differing(whole: Mapping[str, Any], public: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `whole` that `public` lacks or has differently, to be merged over it; lists are whole."""
    found: dict[str, Any] = {}
    for key, value in whole.items():
        shown = public.get(key)
        if isinstance(value, Mapping) and isinstance(shown, Mapping):
            if deeper := differing(value, shown):
                found[key] = deeper
        elif key not in public or value != shown:
            found[key] = value
    return found
