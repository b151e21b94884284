"""Whether a second inference server finds room beside the first, and when a dead one's GPU memory is free again."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable

import psutil

_SPARE = 1.25

_SPARE_BYTES = 1 << 30

_ASK_SECONDS = 10.0


def has_room(beside: Iterable[psutil.Process], *, gpu: int | None, gpu_share: float | None) -> bool:
    """Whether a server like the one that these processes are could run beside it, in host memory and on its GPU."""
    needed_bytes = _resident_bytes(beside) * _SPARE + _SPARE_BYTES
    return needed_bytes < psutil.virtual_memory().available and _gpu_has_room(gpu, gpu_share or 1.0)


def holds_gpu_memory(pids: Iterable[int], gpu: int | None) -> bool:
    """Whether the driver still counts memory of one of these processes on the GPU; no where there is no GPU."""
    users = {int(line) for line in _ask_driver("--query-compute-apps=pid", gpu) if line.isdigit()}
    return not users.isdisjoint(pids)


def _gpu_has_room(gpu: int | None, share: float) -> bool:
    lines = _ask_driver("--query-gpu=memory.free,memory.total", gpu)
    if not lines:
        return True  # a machine without a GPU
    free, total = (float(part) for part in lines[0].split(","))
    return free > share * total


def _ask_driver(query: str, gpu: int | None) -> list[str]:
    """The lines of nvidia-smi's answer; none where there is no such program or GPU."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-i", str(gpu or 0)]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in told.stdout.splitlines()]


def _resident_bytes(processes: Iterable[psutil.Process]) -> int:
    total = 0
    for process in processes:
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue
    return total
