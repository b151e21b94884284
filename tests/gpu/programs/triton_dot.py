"""Multiplies fp32 matrices in a process of its own, since Triton reads `TRITON_F32_DEFAULT` at its import.

The kernel calls `tl.dot` as vLLM's attention kernel does, without naming a precision. Prints the largest error against
fp64, over the largest value.
"""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl

SIZE = 64


@triton.jit
def product(left, right, out, size: tl.constexpr):
    at = tl.arange(0, size)[:, None] * size + tl.arange(0, size)[None, :]
    tl.store(out + at, tl.dot(tl.load(left + at), tl.load(right + at)))


def main() -> None:
    torch.manual_seed(0)
    left, right, out = (torch.randn(SIZE, SIZE, device="cuda") for _ in range(3))
    product[(1,)](left, right, out, SIZE)
    exact = left.double() @ right.double()
    sys.stdout.write(f"{float((out.double() - exact).abs().max() / exact.abs().max())}\n")


if __name__ == "__main__":
    main()
