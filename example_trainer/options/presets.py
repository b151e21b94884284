"""Presets, which are named sets of defaults, and the options of the CS336 course's `grpo_train_loop.py`.

YAML files and flags override a preset, so `--preset dapo --clip-eps-high 0.2` is DAPO with another clip. A preset may
also hold settings of the environment (its group size), which the launcher passes on.

The course's names for single settings are aliases in the option modules. `CourseOptions` handles options that need more
than another name: sizes that the course counts in sequences per rollout batch and per optimizer step, a switch that is
one of three values here, and options of the environment, which is a separate program. Importing this module loads no
torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from atropos_api.common.cliconfig import ConfigError
from atropos_api.common.option_flags import flag
from example_trainer.options.modes import MODES
from example_trainer.options.objective import PUBLISHED_FORMS, SEQUENCE_RATIO_LOSSES

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
    """A named set of defaults."""

    about: str
    settings: Mapping[str, Any]
    with_adapters: Mapping[str, Any] = field(default_factory=dict)
    """Additional settings in the modes that train adapters."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Settings of any environment, under its own names."""
    server: str | None = None
    """The environment that the launcher starts if none is named."""
    server_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `server` that other environments lack."""
    data_paths: tuple[str, str] = ("", "")
    """Files of its questions to train and to evaluate on, used if they exist."""
    dataset_name: str = ""
    """The Hugging Face data set that is used if they do not exist."""
    keeps_batch: bool = False
    """True if another `--gradient-accumulation-steps` divides the preset's batch differently; else it resizes it."""


_COURSE_BATCH = {"batch_size": 2, "gradient_accumulation_steps": 128}

PRESETS: Mapping[str, Preset] = {
    "recommended": Preset(
        about="choices that recent systems share: a low rate over fp32 masters, clip-higher, no division by the std",
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
        about="the published Atropos trainer's choices, also those that its guide does not name: sequence means, "
        "population std, weights optimised in their own dtype (its inverted clip is a fault and is not copied)",
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
        about="GRPO as DeepSeek published it: sequence means, group std, symmetric clip, a KL term to the first policy",
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
        about="DAPO: token means, clip-higher, no KL term; add --max-response-tokens with --mask-overlong or "
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
        # Without a baseline, answers that are all right teach as much as others.
        environment={"ensure_scores_are_not_same": False},
    ),
    "cs336": Preset(
        about="the CS336 course's loop: 200 steps of 256 answers, groups of 8, checkpoint_step_N and final_model; the "
        "launcher starts gsm8k_server.py with the r1_zero prompt, on ./data/math/{train,test}.jsonl or else GSM8K",
        settings={
            "training_steps": 200,
            "lr": 1e-5,
            "optimizer": "adamw",
            "loss_type": "reinforce_with_baseline",
            "loss_aggregation": "sequence",
            "advantage_norm": "group",
            "dual_clip": None,
            "epochs_per_batch": 1,
            "checkpoint_interval": 10,
            "checkpoint_names": "cs336",
            **_COURSE_BATCH,
        },
        # The course's batch holds every group, also those whose scores are all equal.
        environment={
            "group_size": 8,
            "steps_per_eval": 5,
            "max_token_length": 1024,
            "ensure_scores_are_not_same": False,
        },
        server="gsm8k_server.py",
        server_settings={"prompt_template": "r1_zero", "eval_temperature": 1.0},
        data_paths=("./data/math/train.jsonl", "./data/math/test.jsonl"),
        dataset_name="openai/gsm8k:main",
        keeps_batch=True,
    ),
    "trl-note": Preset(
        about="the TRL guide's configuration: 128 answers a batch in optimizer steps of 4 micro-batches of 4, groups "
        "of 4, a KL term whose coefficient holds the divergence near 0.1",
        settings={
            "lr": 5e-6,
            "loss_type": "grpo",
            "loss_aggregation": "sequence",
            "advantage_norm": "group",
            "advantage_std": "population",
            "dual_clip": None,
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
    """The preset; it sets the options that are given nowhere else, before any other validation."""

    preset: PresetName | None = Field(None, description="Named set of defaults; files and flags override it.")

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or values.get("preset") not in PRESETS:
            return values  # the field's own validation refuses an unknown name
        return _under(PRESETS[values["preset"]], values)


def _under(preset: Preset, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given settings over the preset's, without those of the preset that a given one replaces."""
    filled = dict(preset.settings)
    mode = MODES.get(given.get("weight_bridge_mode", ""))
    if mode is not None and mode.trains_adapter:
        filled |= preset.with_adapters
    at_sequence_level = given.get("importance_sampling_level") == "sequence"
    loss_type = given.get("loss_type") or ("gspo" if at_sequence_level else None)
    if loss_type not in {None, filled.get("loss_type")}:
        # A loss type that the user gives comes with all settings of its paper, so the preset's are removed.
        for name in PUBLISHED_FORMS.get(str(loss_type), {}):
            filled.pop(name, None)
    named = {name for name, value in given.items() if value is not None}
    divides = (
        preset.keeps_batch and "gradient_accumulation_steps" in named and not {"batch_size", "mini_batches"} & named
    )
    if divides or {"rollout_batch_size", "train_batch_size"} & named:
        # Sizes in the course's terms replace all three batch settings of the preset.
        sizes = {name: filled.pop(name, None) for name in ("batch_size", "gradient_accumulation_steps", "mini_batches")}
        micro, accumulation = sizes["batch_size"], sizes["gradient_accumulation_steps"]
        if given.get("rollout_batch_size") is None and micro and accumulation:
            return filled | dict(given) | {"rollout_batch_size": micro * accumulation}
    return filled | dict(given)


ENVIRONMENT_OPTIONS: Mapping[str, str] = {
    "group_size": "env.group_size",
    "num_generations": "env.group_size",
    "eval_steps": "env.steps_per_eval",
    "data_path": "env.data_path",
    "val_data_path": "env.val_data_path",
}
"""Options of the course's script that belong to the environment here: the launcher passes them on."""


USUAL_ACCUMULATION = 32
"""Default number of micro-batches in an optimizer step; its greatest common divisor with the step's size is used."""


class CourseOptions(BaseModel):
    """Sizes and switches under the course script's names; they override the settings they stand for and are removed."""

    rollout_batch_size: int | None = Field(
        None,
        ge=1,
        exclude=True,
        description="Sequences in the batch of one step; with --train-batch-size it sets --batch-size, "
        "--gradient-accumulation-steps and --mini-batches.",
    )
    train_batch_size: int | None = Field(
        None,
        ge=1,
        exclude=True,
        description="Sequences in one optimizer step, which has --gradient-accumulation-steps micro-batches.",
    )
    use_std_normalization: bool | None = Field(
        None, exclude=True, description="true: --advantage-norm group; false: --advantage-norm none."
    )

    importance_sampling_level: Literal["token", "sequence"] | None = Field(
        None, exclude=True, description="TRL's name for the level of the ratio. sequence: --loss-type gspo."
    )

    @model_validator(mode="before")
    @classmethod
    def _translate(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        given = {name: value for name, value in values.items() if value is not None or name not in _OWN}
        if given.pop("importance_sampling_level", None) == "sequence":
            given["loss_type"] = _at_sequence_level(given.get("loss_type", "grpo"))
        normalised = given.pop("use_std_normalization", None)
        if normalised is not None:
            given["advantage_norm"] = "group" if _is_true(normalised) else "none"
        rollout, train = given.pop("rollout_batch_size", None), given.pop("train_batch_size", None)
        if rollout is None and train is None:
            return given
        return given | _sizes(given, _positive("rollout_batch_size", rollout), _positive("train_batch_size", train))

    @field_validator("loss_type", mode="before", check_fields=False)
    @classmethod
    def _accept_spelling(cls, value: object) -> object:
        return "grpo" if value == "grpo_clip" else value


def refuse_two_sizes(typed: Collection[str]) -> None:
    """Raise `ConfigError` if a command line gives a size in the course's terms and also one that follows from it."""
    course = [flag(name) for name in ("rollout_batch_size", "train_batch_size") if name in typed]
    own = [flag(name) for name in ("batch_size", "mini_batches") if name in typed]
    if course and own:
        raise ConfigError(f"{own[0]} follows from {' and '.join(course)}; give the one or the other")


def hand_on_environment_options(argv: Sequence[str]) -> list[str]:
    """Return `argv` with the environment's options renamed: `--group-size 4` becomes `--env.group_size 4`."""
    return [_prefixed(argument) or argument for argument in argv]


def find_environment_option(argv: Sequence[str]) -> tuple[str, str] | None:
    """Return the first option in `argv` that belongs to the environment, and its name there."""
    return next(((argument, name) for argument in argv if (name := _prefixed(argument))), None)


_OWN = frozenset(CourseOptions.model_fields)


def _prefixed(argument: str) -> str | None:
    flag, equals, value = argument.partition("=")
    name = ENVIRONMENT_OPTIONS.get(flag.removeprefix("--").replace("-", "_")) if flag.startswith("--") else None
    return f"--{name}{equals}{value}" if name else None


def _sizes(given: Mapping[str, Any], rollout: int | None, train: int | None) -> dict[str, int]:
    """Return this trainer's sizes for a rollout batch and a training batch; if one is unset, it equals the other."""
    rollout = rollout or train or 1
    train = train or rollout
    asked = _positive("gradient_accumulation_steps", given.get("gradient_accumulation_steps"))
    accumulation = asked or math.gcd(train, USUAL_ACCUMULATION)
    epochs = _positive("epochs_per_batch", given.get("epochs_per_batch")) or 1
    if train % accumulation:
        raise ValueError(
            f"--train-batch-size {train} does not split into --gradient-accumulation-steps {accumulation} "
            "micro-batches of equal size; choose sizes that divide"
        )
    if (epochs * rollout) % train or (train < rollout and rollout % train):
        raise ValueError(
            f"--train-batch-size {train}: {epochs} passes over --rollout-batch-size {rollout} do not split into "
            "optimizer steps of that size; choose sizes that divide"
        )
    if train > rollout:
        # One optimizer step over several passes: the weights do not change between them, so each pass gives the same
        # gradient and their mean is that of one pass.
        micro = next(size for size in range(max(1, rollout // accumulation), 0, -1) if rollout % size == 0)
        return {
            "batch_size": micro,
            "gradient_accumulation_steps": rollout // micro,
            "mini_batches": 1,
            "epochs_per_batch": epochs * rollout // train,
        }
    micro = train // accumulation
    return {
        "batch_size": micro,
        "gradient_accumulation_steps": rollout // micro,
        "mini_batches": rollout // train,
        "epochs_per_batch": epochs,
    }


def _positive(name: str, value: Any) -> int | None:
    if value is None:
        return None
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1:
        raise ValueError(f"--{name.replace('_', '-')} {value}: a whole number of at least 1 is needed")
    return number


def _at_sequence_level(loss_type: str) -> str:
    """Return the loss whose ratio is a sequence's: that of `grpo` is `gspo`."""
    if loss_type in SEQUENCE_RATIO_LOSSES:
        return loss_type
    if loss_type == "grpo":
        return "gspo"
    raise ValueError(f"--importance-sampling-level sequence: --loss-type {loss_type} has a ratio a token; use gspo")


def _is_true(value: Any) -> bool:
    text = str(value).lower()
    if text not in {"true", "false", "1", "0", "yes", "no"}:
        raise ValueError(f"--use-std-normalization {value}: true or false is needed")
    return text in {"true", "1", "yes"}
