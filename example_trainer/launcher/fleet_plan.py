"""The number of a launch's inference servers, as far as it is known before any of them starts.

`limits_of` tells how many there can be, or why their number is fixed; `FleetRecord` is the number that was asked for
last, which a resumed run goes on with; `server_id` is the name under which each of them registers at the broker.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from example_trainer.launcher.run_dir import RunDir, write_json
from example_trainer.launcher.run_file import RunConfig, RunSettings
from example_trainer.launcher.teacher import own_teacher
from example_trainer.memory.preflight import is_given, trainer_gpu
from example_trainer.processes.child import ChildSpec
from example_trainer.processes.gpus import count_gpus, serves_from_gpu

MOST_SERVERS: Final = 64
"""The most servers of a launcher where no GPU limits them."""

AddedServer = tuple[ChildSpec, Mapping[Path, Mapping[str, Any]]]
"""A server that is planned while the others run, and the content of its settings file, by path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetLimits:
    """The numbers of inference servers that a launcher can run."""

    planned: int
    """The number that the run's settings ask for."""
    least: int
    most: int
    limit: str = ""
    """The reason why there cannot be more than `most`."""
    fixed: str = ""
    """The reason why the number cannot change; empty if it can."""

    def describe(self, wanted: int) -> str:
        counts = f"inference servers: {wanted} wanted, {self.planned} planned"
        if self.fixed:
            return f"{counts}; atropos scale cannot change it: {self.fixed}"
        return f"{counts}; atropos scale takes {self.least} to {self.most}{f': {self.limit}' if self.limit else ''}"


def limits_of(settings: RunSettings, environ: Mapping[str, str]) -> FleetLimits:
    """Return how many servers the launcher can run with these settings on this machine."""
    config = settings.trainer
    planned = 0 if config.remote_servers else config.local_servers
    if fixed := _why_fixed(config):
        return FleetLimits(planned=planned, least=planned, most=planned, fixed=fixed)
    if config.placement != "local" or not serves_from_gpu(environ):  # a cluster's nodes decide what there is room for
        return FleetLimits(planned=planned, least=1, most=max(planned, MOST_SERVERS))
    if config.vllm_gpu is None:
        limit = f"they divide the memory of the trainer's GPU by --num-inference-nodes {planned}; give that a higher "
        limit += "number, or give the servers GPUs of their own with --vllm-gpu"
        return FleetLimits(planned=planned, least=1, most=planned, limit=limit)
    gpus, size = count_gpus(environ), config.vllm_tensor_parallel_size
    taken = _next_taken(settings, range(config.vllm_gpu + planned * size, gpus), environ)
    most = ((gpus if taken is None else taken) - config.vllm_gpu) // size
    until = "" if taken is None else f" up to the trainer's or teacher's, which is {taken}"
    limit = f"of {gpus} GPUs those from --vllm-gpu {config.vllm_gpu} on are theirs{until}, {size} each"
    return FleetLimits(planned=planned, least=1, most=max(planned, most), limit=limit)


def _next_taken(settings: RunSettings, gpus: Iterable[int], environ: Mapping[str, str]) -> int | None:
    """Return the first of these GPUs that the trainer or the teacher's server has; None if they have none of them."""
    teacher = own_teacher(settings)
    of_teacher = None if teacher is None else teacher.gpu
    for gpu in gpus:
        if gpu == trainer_gpu(settings.trainer):
            return gpu
        if of_teacher is not None and is_given(gpu, of_teacher, environ, "--teacher.gpu"):
            return gpu
    return None


def _why_fixed(config: RunConfig) -> str:
    if not config.registered_servers:
        return config.mode.why_servers_fixed
    if config.start_vllm == "never":
        return (
            "with --start-vllm never the launcher starts none: add one by vllm_api_server --broker-url, and take one "
            "out by atropos drain"
        )
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetRecord:
    """The number of servers that is wanted, as the run directory keeps it over the launcher's restarts."""

    planned: int
    wanted: int
    request: int = 0
    """The number of the broker's request that asked for it."""

    @classmethod
    def read(cls, run: RunDir, limits: FleetLimits, *, resumes: bool) -> FleetRecord:
        """Return the last number of a run that is resumed, unless its settings ask for another one than before."""
        fresh = cls(planned=limits.planned, wanted=limits.planned)
        if not resumes or limits.fixed:
            return fresh
        try:
            found = cls(**json.loads(run.fleet_record.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return fresh
        if found.planned != limits.planned:
            return cls(planned=limits.planned, wanted=limits.planned, request=found.request)
        wanted = min(max(found.wanted, limits.least), limits.most)
        return cls(planned=found.planned, wanted=wanted, request=found.request)

    def write(self, run: RunDir) -> None:
        write_json(run.fleet_record, asdict(self))


def server_id(settings: RunSettings, run: RunDir, index: int) -> str:
    """Return the name under which the launcher's server with this index registers; no other launcher uses it."""
    first = settings.section("vllm").get("server_id") or f"{run.fleet_id}.vllm"
    return str(first) if index == 0 else f"{first}-{index + 1}"
