"""The place at which trainer and servers of a broadcast meet, and the members that cannot meet there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from urllib.parse import urlsplit

import torch
import torch.distributed

from atropos_api.common.identity import split_address
from example_trainer.errors import PublishFailed
from example_trainer.options.publish import THIS_HOST
from example_trainer.options.training_options import TrainingOptions
from example_trainer.processes.ports import LOOPBACK, free_port
from example_trainer.weight_protocol.transfer import is_loopback


def meeting_address(config: TrainingOptions, environ: Mapping[str, str]) -> tuple[str, int | None]:
    """Return the host and port at which the servers meet the trainer; None for any free port.

    `MASTER_PORT` is taken by the ranks' own group if there are several, and by torchrun if it has started this process.
    """
    if config.broadcast_address is not None:
        return split_address(config.broadcast_address)
    port_is_taken = config.world_size > 1 or "TORCHELASTIC_RUN_ID" in environ
    port = None if port_is_taken else environ.get("MASTER_PORT")
    return environ.get("MASTER_ADDR", LOOPBACK), int(port) if port else None


def port_at(address: str, held: ExitStack) -> int:
    """Return a port of that address on which no process listens; no other gets it until `held` is closed."""
    try:
        return free_port(address, held=held)
    except OSError:  # an address that leads here without being this machine's own
        return free_port("0.0.0.0", held=held)  # noqa: S104 - no socket listens on it


def refuse_unreachable(address: str, urls: Sequence[str]) -> None:
    """Raise `PublishFailed` if a server on another host is to meet the trainer on this host's loopback interface."""
    if is_loopback(address) and (far := [url for url in urls if urlsplit(url).hostname not in THIS_HOST]):
        raise PublishFailed(
            f"the server at {far[0]} cannot meet the trainer at {address}, which is the loopback interface; set "
            "--broadcast-address to an address of this host that it reaches"
        )


def refuse_nccl(device: torch.device) -> None:
    """Raise `PublishFailed` if the trainer's torch has no NCCL, or the trainer no GPU."""
    reasons = {
        "this build of torch has no NCCL": not torch.distributed.is_nccl_available(),
        f"the trainer's device is {device}": device.type != "cuda",
    }
    for reason, holds in reasons.items():
        if holds:
            raise PublishFailed(f"--broadcast-backend nccl: {reason}; use --broadcast-backend gloo")


def refuse_shared_gpu(own: str | None, gpus: Mapping[str, Sequence[str | None]]) -> None:
    """Raise `PublishFailed` if two members of a group of NCCL use one GPU, which NCCL cannot do.

    `gpus` has the GPU of each worker of each server, by the server's address.
    """
    holders = {own: "the trainer"} if own is not None else {}
    for url, gpu in ((url, gpu) for url, found in gpus.items() for gpu in found):
        if gpu is None:
            raise PublishFailed(f"--broadcast-backend nccl: the server at {url} has no GPU; use gloo")
        if gpu in holders:
            raise PublishFailed(
                f"--broadcast-backend nccl: the server at {url} and {holders[gpu]} use one GPU ({gpu}), which NCCL "
                "refuses; give each a GPU of its own (--vllm-gpu), or use --broadcast-backend gloo"
            )
        holders[gpu] = f"the server at {url}"
