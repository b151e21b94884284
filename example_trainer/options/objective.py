"""Options of advantages and loss: they are part of `TrainingConfig`; importing this module loads no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Literal, get_args

from pydantic import BaseModel, Field, field_validator, model_validator

from atropos_api.common.option_flags import aliases

LossType = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "luspo",
    "gmpo",
    "cispo",
    "sapo",
    "vespo",
    "gpg",
    "dppo",
    "m2po",
    "reinforce_with_baseline",
    "no_baseline",
]

CLIPPED_LOSSES = frozenset({"grpo", "dr_grpo", "dapo", "gspo", "luspo"})
"""Losses with PPO's clipped surrogate; they differ in denominators, advantages and the level of the ratio."""
SEQUENCE_RATIO_LOSSES = frozenset({"gspo", "luspo"})
"""The losses among them whose ratio is a whole sequence's: the geometric mean of its tokens' ratios."""
WHOLE_SEQUENCE_LOSSES = SEQUENCE_RATIO_LOSSES | {"gmpo", "vespo"}
"""The losses in which a token's ratio acts on all tokens of its sequence."""

PUBLISHED_FORMS: Mapping[str, Mapping[str, object]] = {
    "dr_grpo": {"loss_aggregation": "constant", "advantage_norm": "none"},
    "dapo": {"loss_aggregation": "token", "clip_eps_high": 0.28},
    "gspo": {"loss_aggregation": "sequence", "clip_eps": 3e-4, "clip_eps_high": 4e-4},
    "luspo": {"loss_aggregation": "constant", "clip_eps": 2e-3, "clip_eps_high": 2.5e-3},
    "gmpo": {"loss_aggregation": "sequence", "clip_eps": 0.4, "clip_eps_high": 0.4},
    "cispo": {"loss_aggregation": "token"},
    "sapo": {"loss_aggregation": "sequence"},
    "vespo": {"loss_aggregation": "token"},
    "gpg": {"loss_aggregation": "token", "advantage_norm": "none"},
    "dppo": {"loss_aggregation": "token", "clip_eps": 0.15, "clip_eps_high": 0.15, "cispo_cap": 20.0},
    "m2po": {"loss_aggregation": "token"},
}
"""Settings, besides the surrogate, that a loss type takes from its paper unless the user sets them."""

NAMES_ELSEWHERE: Mapping[str, str] = {
    "bnpo": "dapo, or grpo: TRL's bnpo divides by the tokens of one micro-batch, and here the whole step's are counted",
    "clip_cov": "m2po or dppo, which also mask few tokens",
    "dppo_kl": "dppo, whose divergence is the total variation",
    "dppo_tv": "dppo",
    "geo_mean": "gmpo",
    "kl_cov": "m2po or dppo, which also mask few tokens",
    "vanilla": "grpo",
}
"""Names of losses in TRL and verl that are unknown here, each with the nearest name that is known."""

IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""A user's own part of the objective, named as `package.module:function`."""


def refuse_file(value: str) -> None:
    """Raise `ValueError` if a user's own part is named by a file, `losses.py:mine`, as rewards may be."""
    module, colon, function = value.rpartition(":")
    if colon and module.endswith(".py"):
        named = f"{PurePath(module).stem}:{function}"
        raise ValueError(f"{value} names a file; write {named}, and start in the file's folder, which is searched")


class ObjectiveOptions(BaseModel):
    """Advantages and loss."""

    loss_type: LossType | str = Field(
        "grpo",
        description="The policy-gradient loss. Those that are named after a paper also set its aggregation, norm and "
        "clip, dppo --cispo-cap too, unless these are given. package.module:function is a loss of your own.",
    )
    importance_sampling: Literal["clip", "truncated", "masked"] = Field(
        "clip",
        description="Correction for the age of the rollouts by one ratio, policy to sampler: PPO's pessimistic clip, "
        "or importance weights truncated at --tis-cap, or set to 0 beyond it (both also learn from batches some "
        "steps old).",
    )
    clip_eps: float = Field(
        0.2,
        gt=0.0,
        description="Clip the probability ratio to [1-eps, 1+eps]; in gmpo its logarithm to [-eps, +eps]; in dppo mask "
        "tokens whose probability has moved by more than eps.",
        json_schema_extra=aliases("cliprange", "clip_range", "clip_eps_low", "epsilon", "epsilon_low"),
    )
    clip_eps_high: float | None = Field(
        None,
        gt=0.0,
        description="Another epsilon for the upper side; unset: --clip-eps.",
        json_schema_extra=aliases("epsilon_high"),
    )
    dual_clip: float | None = Field(
        3.0,
        gt=1.0,
        description="Bound on the ratio where the advantage is negative; None: off.",
        json_schema_extra=aliases("delta"),
    )
    cispo_cap: float = Field(5.0, gt=0.0, description="Upper bound of the weights of --loss-type cispo and dppo.")
    sapo_temperature_pos: float = Field(
        1.0, gt=0.0, description="Temperature of the gate of --loss-type sapo where the advantage is positive."
    )
    sapo_temperature_neg: float = Field(
        1.05, gt=0.0, description="Temperature of that gate elsewhere; a higher one closes it nearer to ratio 1."
    )
    vespo_k_pos: float = Field(
        2.0,
        ge=0.0,
        description="Power k in the weight W^k exp(lambda (1-W)) of --loss-type vespo where the advantage is not "
        "negative; W is the product of a sequence's ratios.",
    )
    vespo_lambda_pos: float = Field(3.0, gt=0.0, description="Decay lambda in that weight, for the same advantages.")
    vespo_k_neg: float = Field(3.0, ge=0.0, description="Power k in that weight where the advantage is negative.")
    vespo_lambda_neg: float = Field(
        2.0, gt=0.0, description="Decay lambda in that weight where the advantage is negative."
    )
    m2_threshold: float = Field(
        0.04,
        gt=0.0,
        description="Bound of --loss-type m2po on the mean squared log-ratio, policy to sampler, of the tokens that "
        "their advantage pushes away from the sampler; those with the largest are masked.",
    )
    tis_cap: float = Field(
        2.0, gt=0.0, description="Upper bound of importance weights: of --importance-sampling or --mismatch-correction."
    )
    tis_floor: float = Field(0.0, ge=0.0, description="Lower bound of those importance weights; 0: none.")
    log_ratio_clamp: float = Field(20.0, gt=0.0, description="Log-ratios are clamped to this before exp.")
    old_logprobs: Literal["rollout", "recomputed"] = Field(
        "rollout",
        description="Denominator of the clipped ratio: the sampler's own logprobs, or the trainer's under the weights "
        "a batch begins with (one more forward where a batch has several optimizer steps).",
    )
    mismatch_correction: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = Field(
        "none",
        description="With --old-logprobs recomputed: weight the loss by the ratio of trainer to sampler, per token or "
        "as a sequence's geometric mean, and clamp the weight to --tis-floor and --tis-cap or mask values outside.",
    )
    off_policy_mask: float | None = Field(
        None,
        ge=0.0,
        description="Mask tokens of negative advantage in sequences whose mean log-ratio, sampler to policy, is "
        "above this; None: off.",
    )
    staleness_mask: int | None = Field(
        None,
        ge=0,
        description="Mask tokens whose policy version is more than this many steps old, each by its own version: the "
        "older part of an answer that was sampled across publishes; None: off.",
    )
    staleness_decay: float = Field(
        1.0,
        gt=0.0,
        le=1.0,
        description="Weight of a token's loss: this to the power of its version's age in steps; 1: no weight.",
    )
    kl_coef: float = Field(
        0.0,
        ge=0.0,
        description="Weight of the KL divergence from a reference policy; 0: none, and no reference is kept.",
        json_schema_extra=aliases("beta", "kl_beta"),
    )
    kl_estimator: Literal["k1", "k3"] = Field("k3", description="Estimator of that divergence at a sampled token.")
    kl_bias_correction: bool = Field(
        False,
        description="Multiply that estimate by the surrogate's ratio, so that its mean and gradient are those of the "
        "divergence on tokens that an older policy sampled.",
        json_schema_extra=aliases("use_bias_correction_kl"),
    )
    target_kl: float | None = Field(
        None, gt=0.0, description="Adapt --kl-coef after each batch so that the divergence approaches this value."
    )
    kl_adapt_rate: float = Field(
        0.1,
        gt=0.0,
        le=1.0,
        description="Rate of that adaptation per batch: the factor on the relative error, which is bounded to 0.2.",
    )
    ref_model: str | None = Field(
        None,
        description="Reference policy: a model directory of the same architecture; unset: the policy at the run's "
        "start, or the base without the adapter in adapter modes.",
    )
    ref_update_interval: int = Field(
        0,
        ge=0,
        description="Make the current policy the new reference every N steps; 0: never.",
        json_schema_extra=aliases("ref_model_sync_steps"),
    )
    entropy_coef: float = Field(
        0.0,
        description="Bonus for the entropy of the policy at each trained token.",
        json_schema_extra=aliases("entropy_coeff"),
    )
    distill: Literal["none", "forward_kl", "reverse_kl"] = Field(
        "none",
        description="Learn from a teacher's logprobs where groups carry them: pull the distribution towards the "
        "teacher's, or credit each sampled token with log teacher - log sampler.",
    )
    distill_coef: float = Field(1.0, gt=0.0, description="Weight of the term that --distill adds.")
    distill_temperature: float | None = Field(
        None,
        gt=0.0,
        description="Temperature of the teacher's probabilities; unset: that at which each rollout was sampled.",
    )
    loss_aggregation: Literal["token", "sequence", "constant"] = Field(
        "token",
        description="Average over all trained tokens of the step, over sequences of token means, "
        "or over sequences of token sums divided by --max-response-tokens (--seq-len if that is unset).",
    )
    advantage_norm: Literal["none", "group", "batch"] = Field(
        "group",
        description="Divide centred rewards by the std of the group or of the batch; none: do not divide.",
        json_schema_extra=aliases("scale_rewards"),
    )
    advantage_std: Literal["sample", "population"] = Field(
        "sample",
        description="sample: n-1 form plus 1e-4; population: n form with a floor of 1e-8.",
    )
    max_response_tokens: int | None = Field(
        None, ge=1, description="Longest answer the environments allow, in tokens; at this length it was cut off."
    )
    overlong_buffer: int = Field(
        0, ge=0, description="Tokens before that limit over which --overlong-penalty grows from 0."
    )
    overlong_penalty: float = Field(
        0.0, ge=0.0, description="Penalty subtracted from the reward of an answer at the limit."
    )
    mask_overlong: bool = Field(
        False, description="Do not train on answers that were cut off; they still count in the baseline."
    )
    shuffle_advantages: bool = Field(
        False,
        description="Diagnostic control run: permute the advantages inside each batch. Such a run "
        "must not learn; if it does, the reward curve proves nothing.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in_published_form(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or not isinstance(values.get("loss_type"), str):
            return values
        form = dict(PUBLISHED_FORMS.get(values["loss_type"], {}))
        if "clip_eps" in form and "clip_eps" in values:
            form.pop("clip_eps_high")  # a paper's upper bound is used only with its lower one, else --clip-eps is both
        return {**form, **values}

    @field_validator("advantage_norm", mode="before")
    @classmethod
    def _accept_switch(cls, value: object) -> object:
        return {"true": "group", "false": "none"}.get(str(value).lower(), value)  # TRL's scale_rewards may be a switch

    @field_validator("loss_type")
    @classmethod
    def _check_loss_type(cls, value: str) -> str:
        if value in NAMES_ELSEWHERE:
            raise ValueError(f"{value} is not a loss type here; use {NAMES_ELSEWHERE[value]}")
        refuse_file(value)
        known = get_args(LossType)
        if value in known or IMPORT_PATH.fullmatch(value):
            return value
        raise ValueError(f"{value} is not a loss type; use one of {', '.join(known)}, or package.module:function")

    @property
    def has_own_loss(self) -> bool:
        return ":" in self.loss_type
