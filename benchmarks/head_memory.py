"""Peak memory of the loss stage: the chunked logprob head against a loss over full logits, at a real vocabulary.

The loss stage is all computation between the last hidden states and their gradient. Each size runs in a process of its
own that reports its peak resident set above the one at the start; the head's own weight and its gradient, which both
forms need, are counted separately. With a GPU the same is read from the allocator.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from example_trainer.modeling.kernels import compiled_passes
from example_trainer.modeling.logprobs import HeadPasses, token_logprobs

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20


def full_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Compute logprobs as most trainers do: all logits in fp32, then their log softmax."""
    logits = hidden.float() @ weight.float().t()
    return logits.log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor, passes: HeadPasses | None = None) -> Tensor:
    index = torch.arange(len(labels), device=hidden.device)
    ones = torch.ones(len(labels), device=hidden.device)
    return token_logprobs(hidden, weight, index, labels, ones, passes=passes)[0]


def compiled(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return chunked(hidden, weight, labels, compiled_passes())


Form = Callable[[Tensor, Tensor, Tensor], Tensor]

FORMS: dict[str, Form] = {"full logits": full_logits, "chunked": chunked}
COMPILED: dict[str, Form] = {"compiled": compiled}
"""Chunked as well, by the passes of `--kernels compile`; it takes a C++ compiler."""


class PeakMemory:
    """Peak memory of this process inside the block, in bytes above the memory at its start."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.bytes = 0

    def __enter__(self) -> Self:
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the kernel's high-water mark begins anew
            self._before = _status_bytes("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes = (torch.cuda.max_memory_allocated() if self._on_gpu else _status_bytes("VmHWM")) - self._before


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def measure(form: str, tokens: int, vocabulary: int, hidden_size: int) -> int:
    """Return the peak bytes of one loss stage, forward and backward, above hidden states, head and its gradient.

    What is compiled is compiled before.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    weight = torch.randn(vocabulary, hidden_size, device=device).requires_grad_()
    weight.grad = torch.zeros_like(weight)
    hidden = torch.randn(tokens, hidden_size, device=device).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), device=device)
    for _ in range(1 + (form in COMPILED)):
        with PeakMemory(device) as peak:
            (FORMS | COMPILED)[form](hidden, weight, labels).sum().backward()  # type: ignore[no-untyped-call]
    # Both forms hold a second gradient of the head until it is added to the first.
    return peak.bytes - weight.numel() * weight.element_size()


def measure_apart(form: str, tokens: int, vocabulary: int, hidden_size: int) -> int:
    """Measure in a fresh process, so that no earlier peak hides this one."""
    command = [sys.executable, "-m", "benchmarks.head_memory", "--form", form, "--tokens", str(tokens)]
    command += ["--vocabulary", str(vocabulary), "--hidden", str(hidden_size)]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    printed = subprocess.run(command, check=True, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True).stdout
    peak: int = json.loads(printed)
    return peak


def compare(tokens: list[int], vocabulary: int, hidden_size: int) -> None:
    print(f"vocabulary {vocabulary:,}, hidden size {hidden_size}")
    print(f"{'tokens':>8}{'full logits, MiB':>18}{'chunked, MiB':>14}{'chunked is less by':>20}")
    for count in tokens:
        full, ours = (measure_apart(form, count, vocabulary, hidden_size) for form in FORMS)
        print(f"{count:8,}{full / MIB:18,.0f}{ours / MIB:14,.0f}{full / ours:19.1f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--form", choices=[*FORMS, *COMPILED], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.form:
        print(json.dumps(measure(arguments.form, arguments.tokens[0], arguments.vocabulary, arguments.hidden)))
    else:
        compare(arguments.tokens, arguments.vocabulary, arguments.hidden)


if __name__ == "__main__":
    main()
