"""Options of advantages and loss.

Part of `TrainingConfig`; importing it loads no torch.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from example_trainer.options.naming import aliases

LossType = Literal["grpo", "gspo", "reinforce_with_baseline", "no_baseline"]


class ObjectiveOptions(BaseModel):
    """Advantages and loss."""

    loss_type: LossType = Field("grpo", description="The policy-gradient loss.")
    importance_sampling: Literal["clip", "truncated"] = Field(
        "clip",
        description="Correction for the age of the rollouts: PPO's pessimistic clip, or importance "
        "weights truncated at --tis-cap (keeps learning when batches are several steps old).",
    )
    clip_eps: float = Field(
        0.2,
        gt=0.0,
        description="Clip the probability ratio to [1-eps, 1+eps].",
        json_schema_extra=aliases("cliprange"),
    )
    clip_eps_high: float | None = Field(
        None, gt=0.0, description="Another epsilon for the upper side; unset: --clip-eps."
    )
    dual_clip: float | None = Field(
        3.0, gt=1.0, description="Bound on the ratio where the advantage is negative; None: off."
    )
    tis_cap: float = Field(2.0, gt=0.0, description="Cap of truncated importance weights.")
    log_ratio_clamp: float = Field(20.0, gt=0.0, description="Log-ratios are clamped to this before exp.")
    loss_aggregation: Literal["token", "sequence", "constant"] = Field(
        "token",
        description="Average over all trained tokens of the step, over sequences of token means, "
        "or over sequences of token sums divided by --seq-len.",
    )
    advantage_norm: Literal["none", "group", "batch"] = Field(
        "group", description="Divide centred rewards by the std of the group, the batch, or not."
    )
    advantage_std: Literal["sample", "population"] = Field(
        "sample",
        description="sample: n-1 form plus 1e-4; population: n form with a floor of 1e-8.",
    )
    shuffle_advantages: bool = Field(
        False,
        description="Diagnostic control run: permute the advantages inside each batch. Such a run "
        "must not learn; if it does, the reward curve proves nothing.",
    )
