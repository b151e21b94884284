"""The options of the CS336 course's `grpo_train_loop.py`, in the terms of this trainer.

That script's names for single settings are aliases in `config`. What is here needs more than another name: sizes that
the course counts in sequences a rollout and sequences an optimizer step, a switch that is one of three values here,
and options that belong to the environment, which is a program of its own. Importing this module loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, Field, field_validator, model_validator

ENVIRONMENT_OPTIONS: Mapping[str, str] = {
    "group_size": "env.group_size",
    "eval_steps": "env.steps_per_eval",
    "data_path": "env.data_path",
    "val_data_path": "env.val_data_path",
}
"""Options of the course's script that are the environment's here: the launcher hands them on."""


USUAL_ACCUMULATION = 32
"""Micro-batches of an optimizer step whose number is not given, as far as its size divides."""


class CourseOptions(BaseModel):
    """Sizes and switches as the course's script spells them; they win over what they stand for, and are gone then."""

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
        description="Sequences in one optimizer step; its micro-batches are --gradient-accumulation-steps in number.",
    )
    use_std_normalization: bool | None = Field(
        None, exclude=True, description="true: --advantage-norm group; false: --advantage-norm none."
    )

    @model_validator(mode="before")
    @classmethod
    def _translate(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        given = {name: value for name, value in values.items() if value is not None or name not in _OWN}
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


def hand_on_environment_options(argv: Sequence[str]) -> list[str]:
    """`argv` with the environment's options under their prefixed names: `--group-size 4` as `--env.group_size 4`."""
    return [_prefixed(argument) or argument for argument in argv]


def find_environment_option(argv: Sequence[str]) -> tuple[str, str] | None:
    """The first option in `argv` that is the environment's, and its name there."""
    return next(((argument, name) for argument in argv if (name := _prefixed(argument))), None)


_OWN = frozenset(CourseOptions.model_fields)


def _prefixed(argument: str) -> str | None:
    flag, equals, value = argument.partition("=")
    name = ENVIRONMENT_OPTIONS.get(flag.removeprefix("--").replace("-", "_")) if flag.startswith("--") else None
    return f"--{name}{equals}{value}" if name else None


def _sizes(given: Mapping[str, Any], rollout: int | None, train: int | None) -> dict[str, int]:
    """Our sizes for a rollout batch and a training batch; unset, either is as large as the other."""
    rollout = rollout or train or 1
    train = train or rollout
    accumulation = int(given.get("gradient_accumulation_steps", math.gcd(train, USUAL_ACCUMULATION)))
    epochs = int(given.get("epochs_per_batch", 1))
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
        # One optimizer step over several passes: the weights stand still meanwhile, so each pass gives the same
        # gradient and their mean is that of one pass.
        return {
            "batch_size": max(1, rollout // accumulation),
            "gradient_accumulation_steps": rollout // max(1, rollout // accumulation),
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


def _is_true(value: Any) -> bool:
    text = str(value).lower()
    if text not in {"true", "false", "1", "0", "yes", "no"}:
        raise ValueError(f"--use-std-normalization {value}: true or false is needed")
    return text in {"true", "1", "yes"}
