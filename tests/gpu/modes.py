"""One run of each weight sync mode through the real vLLM: start, publishes, proof, decode rate, copies of the weights.

The same code runs on a GPU (`test_vllm_modes.py`) and on a CPU (`tests/integration/weights/test_four_modes.py`). What
vLLM and the bridges need is imported when a run begins, as these are not installed where torch alone is.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
PUBLISHES = {"shared_vllm": 5, "lora_only": 5, "none": 5, "lora_restart": 2}
"""Publishes of a run; each restarts the server in `lora_restart`, which takes up to a minute on a GPU."""
REQUESTS, SAMPLES, TOKENS = 8, 8, 128
PROMPT = list(range(5, 31))
MAX_MODEL_LENGTH = 512
NO_TOKENIZER = ("--skip-tokenizer-init",)
SERVER_SHARE = 0.3
"""Share of the GPU's memory for a server: during a replacement two of them run next to the trainer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeFigures:
    """The outcome of one run of a mode."""

    served: bool
    """True if after every publish the tokens were stamped with its version."""
    largest_difference: float
    """Largest difference between the logprobs of trainer and server, over all publishes."""
    tokens_per_second: float
    copies: float
    """Copies of the weights that server and trainer hold together; counted in `shared_vllm` alone, else 0."""


def run_mode(mode: str, model: Path, directory: Path, *, dtype: str) -> ModeFigures:
    """Start a server, publish again and again, and prove each publish; weights change between publishes."""
    with _bridge_of(mode, model, directory, dtype) as (bridge, url):
        held = memory_taken()
        policy = bridge.prepare()
        first = bridge.highest_version() + 1
        served, differences, copies = True, [], 0.0
        for version in range(first, first + PUBLISHES[mode]):
            if version > first:
                with policy.changing():
                    _change(policy, seed=version)
            bridge.publish(version)
            if version == first and mode == "shared_vllm":
                weights = sum(each.nbytes for each in policy.served.values())
                copies = 1 + (memory_taken() - held) / weights
            served = served and _versions(url, tokens=4) == {version}
            differences.append(_difference(policy, url, version))
        return ModeFigures(
            served=served,
            largest_difference=max(differences),
            tokens_per_second=_decode_rate(url),
            copies=copies,
        )


def memory_taken() -> int:
    """Return the memory of the GPU that is in use, or without one the anonymous memory of this process, in bytes."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free
    ctypes.CDLL(None).malloc_trim(0)  # memory that the allocator merely keeps is not a copy
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon:")).split()[1])


@contextlib.contextmanager
def _bridge_of(mode: str, model: Path, directory: Path, dtype: str) -> Iterator[tuple[Any, str]]:
    """Yield the bridge of a mode, without masters in `shared_vllm`, and the address of its server."""
    sys.path.insert(0, str(ROOT / "benchmarks" / "sync"))
    from harness import free_port, trainer

    from example_trainer.options.modes import MODES

    directory.mkdir(parents=True, exist_ok=True)
    changes: dict[str, Any] = {"dtype": dtype, "max_model_len": MAX_MODEL_LENGTH}
    if torch.cuda.is_available():
        changes["gpu_memory_utilization"] = SERVER_SHARE
    with contextlib.ExitStack() as stack:
        if MODES[mode].server_outlives_publish:
            url = stack.enter_context(_server_of(mode, model, directory, dtype))
        else:
            url = f"http://127.0.0.1:{free_port()}"
        masters = "none" if mode == "shared_vllm" else "fp32"
        method = "reload" if mode == "none" else "restart"
        config = trainer(
            url, model, str(directory), mode=mode, master_weights=masters, restart_method=method, **changes
        )
        bridge = _make_bridge(config)
        stack.callback(bridge.close)
        yield bridge, url


@contextlib.contextmanager
def _server_of(mode: str, model: Path, directory: Path, dtype: str) -> Iterator[str]:
    """Run a server for a mode whose server outlives a publish; yield its address."""
    from harness import SERVE_ADAPTERS, server

    flags = ["--dtype", dtype, *NO_TOKENIZER]
    flags += ["--share-weights"] if mode == "shared_vllm" else list(SERVE_ADAPTERS)
    flags += ["--gpu-memory-utilization", str(SERVER_SHARE)] if torch.cuda.is_available() else []
    with server(model, str(directory), *flags) as running:
        yield running.url


def _make_bridge(config: Any) -> Any:
    """Return the mode's bridge; a server that it starts itself needs no tokenizer either."""
    from example_trainer.vllm_manager import VllmOptions
    from example_trainer.weights.factory import make_bridge
    from example_trainer.weights.restart import RestartBridge

    if config.mode.server_outlives_publish:
        return make_bridge(config)
    return RestartBridge(config, VllmOptions.of(config).with_settings(skip_tokenizer_init=True))


@torch.no_grad()
def _change(policy: Any, *, seed: int) -> None:
    """Move every trained weight by about an optimizer step, so that no publish repeats another."""
    noise = torch.Generator(policy.device).manual_seed(seed)
    for master in policy.masters.values():
        moved = torch.randn(master.shape, generator=noise, device=master.device, dtype=master.dtype)
        master.add_(moved, alpha=1e-3)


def _generate(url: str, body: dict[str, Any]) -> dict[str, Any]:
    import httpx

    answer = httpx.post(f"{url}/generate", json=body, timeout=300)
    answer.raise_for_status()
    told: dict[str, Any] = answer.json()
    return told


def _versions(url: str, *, tokens: int) -> set[int]:
    body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "compact": True}
    return {span[2] for spans in _generate(url, body)["policy_versions"] for span in spans}


def _difference(policy: Any, url: str, version: int) -> float:
    """Return the largest logprob difference on the probe of the bridges' own proof; a large one does not raise."""
    import httpx

    from example_trainer.weights.logprob_parity import Difference, prove

    any_difference = Difference(maximum=float("inf"), mean=float("inf"))
    boot_id = httpx.get(f"{url}/bridge/info", timeout=60).json()["boot_id"]
    agreement = prove(
        policy,
        lambda body: _generate(url, body),
        version=version,
        boot_id=boot_id,
        max_model_len=MAX_MODEL_LENGTH,
        limit=any_difference,
    )
    return agreement.difference.maximum


def _decode_rate(url: str) -> float:
    """Return tokens a second over two rounds of concurrent requests, after one to warm up."""
    body = {"prompt": PROMPT, "n": SAMPLES, "max_tokens": TOKENS, "ignore_eos": True, "compact": True}
    with ThreadPoolExecutor(REQUESTS) as pool:
        list(pool.map(lambda _: _generate(url, body), range(REQUESTS)))
        started = time.monotonic()
        answers = list(pool.map(lambda _: _generate(url, body), range(2 * REQUESTS)))
    tokens = sum(len(output) for answer in answers for output in answer["token_ids"])
    return tokens / (time.monotonic() - started)
