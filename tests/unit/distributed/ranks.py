"""Ranks for tests: processes joined over gloo that run the same function."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from example_trainer.distributed.ranks import joined_ranks

TIMEOUT_SECONDS = 200.0
FORKS = multiprocessing.get_context("forkserver")
"""A process that imports torch once and is forked; forks of the test itself would inherit its threads' locks."""
FORKS.set_forkserver_preload(["example_trainer.testing", "transformers.models.qwen2.modeling_qwen2", "peft"])


def run_ranks(
    world_size: int, meeting: Path, task: Callable[..., Any], *arguments: Any, tensor_parallel_size: int = 1
) -> list[Any]:
    """Return the results of `task(ranks, *arguments)` on `world_size` ranks; they meet by a new file at `meeting`."""
    results = FORKS.Queue()
    places = [(rank, world_size, tensor_parallel_size, f"file://{meeting}") for rank in range(world_size)]
    processes = [FORKS.Process(target=_rank, args=(*place, results, task, arguments)) for place in places]
    for process in processes:
        process.start()
    try:
        found = dict(results.get(timeout=TIMEOUT_SECONDS) for _ in processes)
    finally:
        for process in processes:
            process.join(timeout=10.0)
            process.kill()
    if faults := [fault for _, fault in found.values() if fault]:
        raise AssertionError("\n".join(faults))
    return [found[rank][0] for rank in range(world_size)]


def _rank(
    rank: int,
    world_size: int,
    tensor_parallel_size: int,
    init_method: str,
    results: Any,
    task: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        with joined_ranks(
            rank,
            world_size,
            init_method,
            device="cpu",
            timeout_seconds=TIMEOUT_SECONDS,
            tensor_parallel_size=tensor_parallel_size,
        ) as ranks:
            results.put((rank, (_portable(task(ranks, *arguments)), None)))
    except BaseException:
        results.put((rank, (None, traceback.format_exc())))
        raise


def _portable(value: Any) -> Any:
    """Convert tensors to arrays: a queue passes tensors by file descriptors, which end with their process."""
    if isinstance(value, torch.Tensor):
        value = value.detach().float() if value.dtype == torch.bfloat16 else value.detach()  # numpy has no bf16
        return value.numpy().copy()
    if isinstance(value, dict):
        return {key: _portable(item) for key, item in value.items()}
    return [_portable(item) for item in value] if isinstance(value, (list, tuple)) else value
