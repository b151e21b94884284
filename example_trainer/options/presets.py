"""Presets: sets of defaults by name, which lie under YAML files and flags.

A preset only fills in what is said nowhere else, so `--preset dapo --clip-eps-high 0.2` is DAPO with another clip.
Parts of a guide that are the environment's (its group size) are here too, for the launcher to hand on. Importing this
module loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

from example_trainer.options.publish import LORA_MODES

PresetName = Literal[
    "recommended",
    "seed",
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "reinforce_with_baseline",
    "no_baseline",
    "cs336",
    "trl-note",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """Defaults under one name."""

    about: str
    settings: Mapping[str, Any]
    with_adapters: Mapping[str, Any] = field(default_factory=dict)
    """Besides, in the modes that train adapters."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the environment, by its own names."""


_COURSE_BATCH = {"batch_size": 2, "gradient_accumulation_steps": 128}

PRESETS: Mapping[str, Preset] = {
    "recommended": Preset(
        about="what recent systems have settled on: a low rate over fp32 masters, clip-higher, no division by the std",
        settings={
            "lr": 1e-6,
            "warmup_steps": 10,
            "optimizer": "adamw",
            "loss_type": "grpo",
            "loss_aggregation": "token",
            "advantage_norm": "none",
            "clip_eps_high": 0.28,
            "dual_clip": 3.0,
            "master_weights": "fp32",
            "batch_size": 4,
            "max_staleness": 8,
        },
        with_adapters={"lr": 1e-5, "lora_target_modules": ["all-linear"], "lora_dropout": 0.0},
        environment={"group_size": 8},
    ),
    "seed": Preset(
        about="the published Atropos trainer's choices, also where its guide is silent: sequence means, population "
        "std, weights optimised in their own dtype (its inverted clip is a fault and is not copied)",
        settings={
            "loss_type": "grpo",
            "loss_aggregation": "sequence",
            "advantage_norm": "group",
            "advantage_std": "population",
            "dual_clip": None,
            "master_weights": "none",
            "gradient_checkpointing": True,
            "pad_to": 64,
        },
    ),
    "grpo": Preset(
        about="GRPO as DeepSeek published it: sequence means, group std, symmetric clip, divergence from the start",
        settings={
            "loss_type": "grpo",
            "loss_aggregation": "sequence",
            "advantage_norm": "group",
            "dual_clip": None,
            "kl_coef": 1e-3,
            "kl_estimator": "k3",
        },
    ),
    "dr_grpo": Preset(
        about="Dr. GRPO: a constant denominator and no std, so that neither length nor difficulty biases the gradient",
        settings={"loss_type": "dr_grpo", "dual_clip": None},
    ),
    "dapo": Preset(
        about="DAPO: token means, clip-higher, no divergence; add --max-response-tokens with --mask-overlong or "
        "--overlong-penalty for its treatment of long answers",
        settings={"loss_type": "dapo", "dual_clip": None},
    ),
    "gspo": Preset(
        about="GSPO: one length-normalised ratio a sequence, with its narrow clip",
        settings={"loss_type": "gspo", "dual_clip": None},
    ),
    "cispo": Preset(
        about="CISPO: truncated importance weights on the gradient of every token",
        settings={"loss_type": "cispo", "dual_clip": None},
    ),
    "reinforce_with_baseline": Preset(
        about="REINFORCE with the group's mean as baseline and its std as scale, on policy",
        settings={"loss_type": "reinforce_with_baseline", "loss_aggregation": "sequence", "advantage_norm": "group"},
    ),
    "no_baseline": Preset(
        about="REINFORCE on the raw rewards, on policy",
        settings={"loss_type": "no_baseline", "loss_aggregation": "sequence"},
    ),
    "cs336": Preset(
        about="the CS336 course's loop: 200 steps of 256 answers, groups of 8, checkpoint_step_N and final_model",
        settings={
            "training_steps": 200,
            "lr": 1e-5,
            "optimizer": "adamw",
            "loss_type": "reinforce_with_baseline",
            "loss_aggregation": "sequence",
            "advantage_norm": "group",
            "epochs_per_batch": 1,
            "checkpoint_interval": 10,
            "checkpoint_names": "cs336",
            **_COURSE_BATCH,
        },
        environment={"group_size": 8, "steps_per_eval": 5},
    ),
    "trl-note": Preset(
        about="the TRL guide's configuration: 128 answers a batch in optimizer steps of 4 micro-batches of 4, groups "
        "of 4, a divergence that is held at 0.1",
        settings={
            "lr": 5e-6,
            "loss_type": "grpo",
            "loss_aggregation": "sequence",
            "advantage_norm": "group",
            "advantage_std": "population",
            "kl_coef": 0.05,
            "target_kl": 0.1,
            "batch_size": 4,
            "gradient_accumulation_steps": 32,
            "mini_batches": 8,
        },
        environment={"group_size": 4},
    ),
}


class PresetOptions(BaseModel):
    """A preset; it fills in what is said nowhere else before anything looks at the settings."""

    preset: PresetName | None = Field(None, description="Defaults by name, under files and flags.")

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or values.get("preset") not in PRESETS:
            return values  # an unknown name is refused with the others by the field itself
        return _under(PRESETS[values["preset"]], values)


def environment_settings(preset: str | None) -> dict[str, Any]:
    """What the preset asks of the environment."""
    return dict(PRESETS[preset].environment) if preset else {}


def _under(preset: Preset, given: Mapping[str, Any]) -> dict[str, Any]:
    filled = dict(preset.settings)
    if given.get("weight_bridge_mode") in LORA_MODES:
        filled |= preset.with_adapters
    if {"rollout_batch_size", "train_batch_size"} & {name for name, value in given.items() if value is not None}:
        # Sizes in the course's terms replace the preset's batch as a whole.
        for name in ("batch_size", "gradient_accumulation_steps", "mini_batches"):
            filled.pop(name, None)
    return filled | dict(given)
