"""Measures how much of ten small steps remains in bf16 weights, with rounding to nearest and with stochastic rounding.

AdamW at a rate of 1e-6, weights of a standard deviation of 0.02 and of 1e-3, 512 x 512. The update is compared with
that of fp32 weights, along its direction (length 1 keeps all of it) and by its cosine.

    python -m benchmarks.bf16_updates [--seeds 20]
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor

from example_trainer.modeling.optimizers import OptimizerSettings, make_optimizer

SHAPE = (512, 512)
STEPS = 10
RATE = 1e-6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    seeds = parser.parse_args().seeds
    print("| weights of | rounding | length along the exact update | cosine of one run | of the mean of all |")
    print("|---|---|---|---|---|")
    for scale in (0.02, 1e-3):
        torch.manual_seed(0)
        weight = (torch.randn(SHAPE) * scale).bfloat16()
        direction = torch.randn(SHAPE)
        gradients = [direction + 0.3 * torch.randn(SHAPE) for _ in range(STEPS)]
        exact = stepped(weight.float(), gradients, seed=0) - weight.float()
        runs = [stepped(weight, gradients, seed=seed).float() - weight.float() for seed in range(seeds)]
        show(scale, "stochastic", runs, exact)
        show(
            scale,
            "none: fp32 weights, cast at the end",
            [(weight.float() + exact).bfloat16().float() - weight.float()],
            exact,
        )
        show(scale, "to nearest", [nearest(weight, gradients).float() - weight.float()], exact)
    return 0


def show(scale: float, rounding: str, runs: list[Tensor], exact: Tensor) -> None:
    lengths = [float((run * exact).sum() / exact.square().sum()) for run in runs]
    spread = f"{min(lengths):.3f} to {max(lengths):.3f}" if len(runs) > 1 else f"{lengths[0]:.3f}"
    mean = f"{cosine(torch.stack(runs).mean(0), exact):.2f}" if len(runs) > 1 else ""
    print(f"| {scale:g} | {rounding} | {spread} | {cosine(runs[0], exact):.2f} | {mean} |")


def cosine(left: Tensor, right: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(left.flatten(), right.flatten(), dim=0))


def stepped(weight: Tensor, gradients: list[Tensor], *, seed: int) -> Tensor:
    """Return the weight after a step for each gradient with our AdamW, which rounds bf16 weights stochastically."""
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = make_optimizer([parameter], OptimizerSettings(name="adamw", lr=RATE, weight_decay=0.0, seed=seed))
    for gradient in gradients:
        parameter.grad = gradient.to(weight.dtype)
        optimizer.step()
    return parameter.detach()


def nearest(weight: Tensor, gradients: list[Tensor]) -> Tensor:
    """Return the weight after the same steps with torch's AdamW, which rounds to nearest."""
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([parameter], lr=RATE, weight_decay=0.0)
    for gradient in gradients:
        parameter.grad = gradient.to(weight.dtype)
        optimizer.step()
    return parameter.detach()


if __name__ == "__main__":
    sys.exit(main())
