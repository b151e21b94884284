"""Counts the copies of the weights in a shared run: memory of trainer and server together, by `--master-weights`.

One server of a model of some 80M random parameters in bf16, its weights shared; for each kind of masters a trainer in a
process of its own loads, publishes, trains one step with AdamW and publishes again. Memory is proportional (`Pss` in
`smaps_rollup`), so that what both processes map counts once. The trainer's figure leaves out its memory before loading
(the imports). `none` must add no copy: under a tenth of the served bytes, also at its peak while loading.

    python benchmarks/sync/copies.py [--masters fp32 host none]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from harness import server

from example_trainer.modeling.optimizers import OptimizerSettings, make_optimizer
from example_trainer.weights import logprob_parity
from example_trainer.weights.shared_vllm import SharedVllmBridge
from example_trainer.weights.testing import config_of

MEBIBYTE = 1 << 20
SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
NO_COPY = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--masters", nargs="+", choices=("fp32", "host", "none"), default=["fp32", "none"])
    parser.add_argument("--train", nargs=3, metavar=("MASTERS", "MODEL", "URL"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    logging.getLogger().setLevel(logging.ERROR)
    if asked.train:
        train(*asked.train)
        return
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        make_model(model)
        flags = ("--share-weights", "--dtype", "bfloat16", "--skip-tokenizer-init")
        with server(model, directory, *flags) as running:
            weights = (model / "model.safetensors").stat().st_size
            print(f"served: {weights / MEBIBYTE:.0f} MiB of bf16 weights; all figures in MiB")
            print("masters  trainer: loaded   peak while loading   after a step     both processes after a step")
            for masters in asked.masters:
                command = [sys.executable, __file__, "--train", masters, str(model), running.url]
                told = subprocess.run(command, cwd=directory, stdout=subprocess.PIPE, text=True, check=True).stdout
                tell(masters, json.loads(told.splitlines()[-1]), weights)


def tell(masters: str, seen: dict[str, float], weights: int) -> None:
    columns = [seen[name] / MEBIBYTE for name in ("loaded", "peak", "stepped", "both")]
    copies = max(seen["loaded"], seen["peak"]) / weights
    holds = "met" if copies <= NO_COPY else "NOT MET"
    must = f" (must be at most {NO_COPY}: {holds})" if masters == "none" else ""
    print(
        "{:8} {:15.0f} {:20.0f} {:14.0f} {:31.0f}".format(masters, *columns)
        + f"   copies beside the served one: {copies:.2f}{must}",
        flush=True,
    )


def make_model(directory: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(Qwen2Config(**SHAPE), dtype=torch.bfloat16)
    model.save_pretrained(directory)


def train(masters: Any, model: str, url: str) -> None:
    """Load, publish, step and publish in a process of its own; print the memory it took."""
    vars(logprob_parity).update(_PROMPT_LENGTHS=(4,), _OUTPUTS_PER_PROMPT=1)  # agreement is not what is measured here
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401  the imports belong to what was there before

    before, anonymous = own("pss"), own_anonymous()
    manifest = str(Path.cwd() / "vllm_bridge_config.json")
    changes = {"dtype": "bfloat16", "master_weights": masters, "vllm_config_path": manifest, "wait_timeout": 60.0}
    bridge = SharedVllmBridge(config_of(url, model, **changes))
    peak = peak_during(bridge.prepare) - anonymous
    told: dict[str, int] = {"loaded": own_anonymous() - anonymous, "peak": peak}
    policy = bridge._policy  # noqa: SLF001  as prepare() set it
    assert policy is not None
    version = bridge.highest_version() + 1
    bridge.publish(version)
    optimizer = make_optimizer(policy.masters.values(), OptimizerSettings(name="adamw", lr=1e-5))
    tokens = torch.arange(32).view(1, 32)
    policy.module(input_ids=tokens, labels=tokens).loss.backward()
    policy.collect_gradients()
    with policy.changing():
        optimizer.step()
    bridge.publish(version + 1)
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator merely keeps is not a copy
    told |= {"stepped": own_anonymous() - anonymous, "both": own("pss") - before + pss_of_server(url)}
    bridge.close()
    print(json.dumps(told))


def own(kind: str) -> int:
    return int(getattr(psutil.Process().memory_full_info(), kind))


def own_anonymous() -> int:
    """Return the anonymous resident memory of this process, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this kernel does not tell anonymous memory")


def peak_during(work: Callable[[], object]) -> int:
    """Return the peak of this process's anonymous memory during `work`, sampled every 2 ms."""
    done, seen = threading.Event(), [own_anonymous()]

    def look() -> None:
        while not done.is_set():
            seen.append(own_anonymous())
            time.sleep(0.002)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return max(seen)


def pss_of_server(url: str) -> int:
    """Return the proportional memory of the server's processes."""
    port = url.rpartition(":")[2]
    found = [each for each in psutil.process_iter() if "--share-weights" in _command(each) and port in _command(each)]
    family = {each.pid: each for parent in found for each in (parent, *parent.children(recursive=True))}
    return int(sum(each.memory_full_info().pss for each in family.values()))


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


if __name__ == "__main__":
    main()
