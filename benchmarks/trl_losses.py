"""Compares our losses with TRL's, value and gradient, on the same random batches: largest differences by loss.

    python benchmarks/trl_losses.py            # in TRL's environment under the cache directory, made on the first call

TRL's own `GRPOTrainer._compute_loss` runs on a stand-in for the trainer that returns the logprobs; its weights for the
sampler's mismatch come from the statement in TRL's source that computes them. Batches have ratios far from 1,
advantages of both signs, groups of one (advantage 0) and rows without a trained token. Such rows stay in TRL's mean
over sequences and leave ours, so where sequences are averaged TRL's figures are multiplied by all rows over those with
tokens.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from example_trainer.objective.losses import LossInputs, LossSettings, token_losses, token_weights

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-5
ROWS, LENGTH, LONGEST = 10, 14, 20
CAP, FLOOR = 3.0, 0.3
OURS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"aggregation": "sequence", "trl": {"loss_type": "grpo"}},
    "dr_grpo": {"aggregation": "constant", "trl": {"loss_type": "dr_grpo"}},
    "dapo": {"aggregation": "token", "trl": {"loss_type": "dapo"}},
    # The same where a batch is one micro-batch, as here.
    "bnpo": {"ours": "grpo", "aggregation": "token", "trl": {"loss_type": "bnpo"}},
    "cispo": {"aggregation": "token", "trl": {"loss_type": "cispo", "epsilon_high": 5.0}},
    "gspo": {"aggregation": "sequence", "trl": {"loss_type": "grpo", "importance_sampling_level": "sequence"}},
    # TRL's sum over a sequence is not divided by the longest answer.
    "luspo": {
        "aggregation": "constant",
        "trl": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        "factor": 1 / LONGEST,
    },
    "sapo": {"aggregation": "sequence", "trl": {"loss_type": "sapo"}},
    "vespo": {"aggregation": "token", "trl": {"loss_type": "vespo"}, "corrections": ("none",)},
}
CORRECTIONS = ("none", "token_truncate", "token_mask")
EXTRAS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "plain": ({"dual_clip": None}, {}),
    "dual clip": ({"dual_clip": 3.0}, {"delta": 3.0}),
    "reference": ({"dual_clip": None, "kl_coef": 0.05}, {"beta": 0.05}),
    "its correction": (
        {"dual_clip": None, "kl_coef": 0.05, "kl_bias_correction": True},
        {"beta": 0.05, "use_bias_correction_kl": True},
    ),
    "off-policy mask": ({"dual_clip": None, "off_policy_threshold": 0.1}, {"off_policy_mask_threshold": 0.1}),
}
"""Settings of the further terms: ours, TRL's."""


@dataclass(frozen=True)
class RandomBatch:
    """`[rows, length]` logprobs of four policies, advantages by row, and the mask of trained tokens."""

    logprobs: Tensor
    old: Tensor
    sampled: Tensor
    reference: Tensor
    advantages: Tensor
    mask: Tensor


def random_batch(seed: int) -> RandomBatch:
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return torch.randn(ROWS, LENGTH, generator=generator) * scale

    logprobs = -torch.rand(ROWS, LENGTH, generator=generator) * 4 - 0.01
    old = logprobs + normal(1.2)
    mask = torch.rand(ROWS, LENGTH, generator=generator) < 0.7
    mask[1] = mask[4] = False
    mask[0, 0] = True
    advantages = torch.randn(ROWS, generator=generator) * 2
    advantages[3] = advantages[7] = 0.0  # groups of one
    return RandomBatch(logprobs, old, old + normal(0.8), logprobs + normal(0.5), advantages, mask)


def our_loss(batch: RandomBatch, loss: str, correction: str, extra: Mapping[str, Any]) -> tuple[float, Tensor]:
    """Return our loss over the batch's flat list of trained tokens, and its gradient `[rows, length]`."""
    logprobs = batch.logprobs.clone().requires_grad_()
    counts = batch.mask.sum(1)
    trained = counts > 0
    inputs = LossInputs(
        logprobs=logprobs[batch.mask],
        entropies=torch.zeros(int(counts.sum())),
        rollout_logprobs=batch.sampled[batch.mask],
        proximal_logprobs=batch.old[batch.mask],
        reference_logprobs=batch.reference[batch.mask],
        advantages=batch.advantages[:, None].expand_as(batch.mask)[batch.mask],
        sequences=torch.arange(ROWS)[:, None].expand_as(batch.mask)[batch.mask],
    )
    settings = LossSettings(
        loss_type=OURS[loss].get("ours", loss),
        old_logprobs="recomputed",
        mismatch_correction=correction,  # type: ignore[arg-type]
        tis_cap=CAP,
        tis_floor=FLOOR,
        clip_eps_low=0.2,
        clip_eps_high=0.28,
        cispo_cap=5.0,
        **extra,
    )
    weights = token_weights(counts[trained], OURS[loss]["aggregation"], LONGEST)
    value = (token_losses(inputs, settings) * weights).sum()
    value.backward()
    assert logprobs.grad is not None
    return value.item(), logprobs.grad


def trl_loss(batch: RandomBatch, loss: str, correction: str, extra: Mapping[str, Any]) -> tuple[float, Tensor]:
    """Return the loss and its gradient from TRL's code."""
    from trl import GRPOTrainer

    logprobs = batch.logprobs.clone().requires_grad_()
    trainer = stand_in(logprobs, OURS[loss]["trl"], correction, extra)
    mask = batch.mask.to(torch.int64)
    inputs: dict[str, Tensor] = {
        "prompt_ids": torch.zeros(ROWS, 1, dtype=torch.long),
        "prompt_mask": torch.ones(ROWS, 1, dtype=torch.long),
        "completion_ids": torch.zeros(ROWS, LENGTH, dtype=torch.long),
        "completion_mask": mask,
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old,
        "sampling_per_token_logps": batch.sampled,
        "ref_per_token_logps": batch.reference,
        "num_items_in_batch": mask.sum(),
    }
    if correction != "none":
        inputs["importance_sampling_ratio"] = trl_mismatch_weights(trainer, inputs)
    value = GRPOTrainer._compute_loss(trainer, None, inputs)  # noqa: SLF001 - what is compared
    value.backward()
    assert logprobs.grad is not None
    factor = 1.0 if OURS[loss]["aggregation"] == "token" else ROWS / int((batch.mask.sum(1) > 0).sum())
    factor *= OURS[loss].get("factor", 1.0)
    return value.item() * factor, logprobs.grad * factor


def stand_in(logprobs: Tensor, form: Mapping[str, Any], correction: str, extra: Mapping[str, Any]) -> SimpleNamespace:
    """Return the attributes of a trainer that `_compute_loss` reads, with a model that returns the given logprobs."""
    from trl import GRPOTrainer

    corrects = correction != "none"
    settings: dict[str, Any] = {
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.0,
        "off_policy_mask_threshold": None,
        "top_entropy_quantile": 1.0,
        "aux_loss_enabled": False,
        "use_vllm": corrects,
        "vllm_importance_sampling_correction": corrects,
        "vllm_importance_sampling_mode": correction,
        "vllm_importance_sampling_clip_max": CAP,
        "vllm_importance_sampling_clip_min": FLOOR,
        "max_completion_length": LONGEST,
        "current_gradient_accumulation_steps": 1,
        "model": SimpleNamespace(training=True),
        "accelerator": SimpleNamespace(
            num_processes=1, sync_gradients=True, gather=lambda value: value, reduce=lambda value, **_: value
        ),
        "_entropy_bonus_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "get_off_policy_mask": GRPOTrainer.get_off_policy_mask,
        "get_gamma_weights": GRPOTrainer.get_gamma_weights,
        "_get_per_token_logps_and_entropies": lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
    }
    arguments = {"delta": extra.get("delta"), "steps_per_generation": 1}
    arguments |= {"use_bias_correction_kl": extra.get("use_bias_correction_kl", False)}
    arguments |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    arguments |= {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    return SimpleNamespace(args=SimpleNamespace(**arguments), **(settings | dict(form) | dict(extra)))


def trl_mismatch_weights(trainer: SimpleNamespace, inputs: Mapping[str, Tensor]) -> Tensor:
    """Run the statement of TRL's rollout code that computes `vllm_importance_sampling_ratio`."""
    import math

    from trl import GRPOTrainer

    method = GRPOTrainer._generate_and_score_completions  # noqa: SLF001 - what is compared
    source = textwrap.dedent(inspect.getsource(method))
    statements = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.If))
    makes_it = next(
        node for node in statements if any(ast.unparse(part).startswith("per_token_logps_diff") for part in node.body)
    )
    scope: dict[str, Any] = {
        "self": trainer,
        "torch": torch,
        "math": math,
        "tool_mask": None,
        "completion_mask": inputs["completion_mask"],
        "old_per_token_logps": inputs["old_per_token_logps"],
        "sampling_per_token_logps": inputs["sampling_per_token_logps"],
    }
    exec(compile(ast.Module(body=[makes_it], type_ignores=[]), "trl", "exec"), scope)
    weights: Tensor = scope["vllm_importance_sampling_ratio"]
    return weights


def compare(batches: int) -> list[dict[str, Any]]:
    """Return the largest absolute differences of value and gradient over random batches, for each combination."""
    rows = []
    for loss in OURS:
        for correction in OURS[loss].get("corrections", CORRECTIONS):
            for name, (ours, theirs) in EXTRAS.items():
                values, gradients, size = 0.0, 0.0, 0.0
                for seed in range(batches):
                    batch = random_batch(seed)
                    value, gradient = our_loss(batch, loss, correction, ours)
                    expected, wanted = trl_loss(batch, loss, correction, theirs)
                    values = max(values, abs(value - expected))
                    gradients = max(gradients, float((gradient - wanted).abs().max()))
                    size = max(size, float(wanted.abs().max()))
                rows.append(
                    {
                        "loss": loss,
                        "correction": correction,
                        "with": name,
                        "value": values,
                        "gradient": gradients,
                        "largest_gradient": size,
                    }
                )
    return rows


def run_inside(python: Path, batches: int) -> list[dict[str, Any]]:
    """Run `compare` in TRL's environment."""
    environ = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [str(python), __file__, "--inside", "--batches", str(batches)]
    printed = subprocess.run(command, check=True, env=environ, stdout=subprocess.PIPE, text=True).stdout
    found: list[dict[str, Any]] = json.loads(printed.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "atropos")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        print(json.dumps(compare(arguments.batches)))
        return
    from compare_trl import peer_python

    rows = run_inside(peer_python(arguments.cache), arguments.batches)
    heads = ("max |value - TRL|", "max |gradient - TRL|", "largest gradient")
    print(f"{'loss':9}{'correction':16}{'with':17}{heads[0]:>19}{heads[1]:>22}{heads[2]:>18}")
    for row in rows:
        print(
            f"{row['loss']:9}{row['correction']:16}{row['with']:17}"
            f"{row['value']:19.1e}{row['gradient']:22.1e}{row['largest_gradient']:18.2f}"
        )
    worst = max(max(row["value"], row["gradient"]) for row in rows)
    print(f"largest difference {worst:.1e}, allowed {TOLERANCE:.0e}")
    sys.exit(worst > TOLERANCE)


if __name__ == "__main__":
    main()
