"""The placement that a launch asks for, the roles to be placed, and the settings that do not fit it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from atropos_api.common.cliconfig import ConfigError
from atropos_api.common.identity import LOOPBACK_NAMES
from example_trainer.launcher.placement.roles import LocalPlacement, Placement, Role
from example_trainer.launcher.placement.settings import PlacementSettings, SeatResources
from example_trainer.launcher.programs import TRAINER, server_name
from example_trainer.launcher.run_dir import RunDir
from example_trainer.launcher.run_file import RunSettings
from example_trainer.launcher.teacher import own_teacher
from example_trainer.processes.gpus import count_gpus

_PASSED = ("HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "VLLM_TARGET_DEVICE", "WANDB_MODE")
"""Variables that programs on other nodes are given without being named: none of them holds a secret."""


def open_placement(settings: RunSettings, run: RunDir) -> Placement:
    """Return the placement that was asked for, connected; raise `ConfigError` if it is not there."""
    if not settings.placement.is_ray:
        return LocalPlacement()
    try:
        from example_trainer.launcher.placement.ray_placement import connect
    except ImportError as error:
        raise ConfigError(
            f"--placement ray needs the package ray ({error}); install it on each node: pip install 'atropos-grpo[ray]'"
        ) from error
    return connect(settings.placement, run)


def check_fits(settings: RunSettings) -> None:
    """Raise `ConfigError` for settings that name ports, GPUs or addresses of one machine alone."""
    config = settings.trainer
    refused = {
        "--placement ray needs --registered-servers: servers on other nodes are known by the broker's registry": (
            not config.registered_servers
        ),
        "--teacher.model_name starts a server beside the launcher, which --placement ray does not; start the teacher's "
        "server by itself and name it with --teacher.base_url": own_teacher(settings) is not None,
        "--vllm-gpu numbers the GPUs of one machine; under --placement ray the placement gives each server its own "
        "(placement: vllm: gpus)": config.vllm_gpu is not None,
        "--vllm-port and --vllm.port name a port of one machine; under --placement ray each server takes a free one of "
        "its node": "vllm_port" in config.model_fields_set or "port" in settings.section("vllm"),
        "--api.host and --vllm.host name the loopback interface, which other nodes do not reach; under --placement ray "
        "leave them out": any(str(settings.section(name).get("host")) in LOOPBACK_NAMES for name in ("api", "vllm")),
        f"--atropos-url {config.atropos_url} names the loopback interface, where programs on other nodes find no "
        "broker; name an address of its machine": (
            "atropos_url" in config.model_fields_set and urlsplit(config.atropos_url).hostname in LOOPBACK_NAMES
        ),
    }
    for sentence, applies in refused.items():
        if applies:
            raise ConfigError(sentence)
    for name in [role.name for role in roles_of(settings) if not role.cpus and not role.gpus]:
        raise ConfigError(f"placement: {name} has no CPU and no GPU, and Ray places nothing without; give it cpus: 0.1")


def roles_of(settings: RunSettings, *, has_gpus: bool | None = None) -> list[Role]:
    """Return the roles of a launch: the trainer, servers and environments; none under a local placement.

    Nodes are assumed to be machines like this one, unless `has_gpus` says whether they have GPUs.
    """
    if not settings.placement.is_ray:
        return []
    config, given = settings.trainer, settings.placement
    on_gpu = config.device != "cpu" and (count_gpus(os.environ) > 0 if has_gpus is None else has_gpus)

    def role(name: str, asked: SeatResources, *, gpus: int = 0, seats: int = 1, is_reached: bool = False) -> Role:
        by_default = float(gpus) if on_gpu else 0.0
        wanted = by_default if asked.gpus is None else asked.gpus
        return Role(name=name, cpus=asked.cpus, gpus=wanted, seats=seats, is_reached=is_reached)

    servers = config.local_servers
    return [
        role(TRAINER, given.trainer, gpus=1, seats=config.world_size, is_reached=True),
        *(role(server_name(index), given.vllm, gpus=config.vllm_tensor_parallel_size) for index in range(servers)),
        *(role(entry.name, given.environment) for entry in settings.environments),
    ]


def passed_variables(settings: PlacementSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the launcher's variables that programs on other nodes are given: those listed, and nothing else."""
    missing = [name for name in settings.variables if name not in environ]
    if missing:
        raise ConfigError(
            f"placement: variables: {missing[0]} is not set where the launcher runs; set it or leave it out"
        )
    return {name: environ[name] for name in (*_PASSED, *settings.variables) if name in environ}
