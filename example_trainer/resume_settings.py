"""Settings at a resume: a run that would give a checkpoint's state another meaning, or other weights, is refused."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from atropos_api.common.option_flags import flag
from example_trainer.errors import CheckpointError
from example_trainer.memory.shapes import ADAPTED_BY_DEFAULT, local_shape
from example_trainer.modeling.base_fingerprint import base_fingerprint
from example_trainer.options.modes import MODES
from example_trainer.state import TrainerState

if TYPE_CHECKING:
    from example_trainer.config import TrainingConfig

logger = logging.getLogger(__name__)

FIXED_SETTINGS = (
    "optimizer",
    "lora_r",
    "lora_alpha",
    "lora_target_modules",
    "lora_layer_indices",
    "load_in_4bit",
    "train_layer_indices",
)
"""Settings that a resume must not change: the optimizer's state or the meaning of the weights depends on them."""


def refuse_changed_settings(
    state: TrainerState, config: TrainingConfig, method: Literal["grpo", "sft"] = "grpo"
) -> None:
    """Raise `CheckpointError` if the checkpoint has another method, optimizer or set of trained weights than a run."""
    if state.method != method:
        raise CheckpointError(
            f"the checkpoint of step {state.step} was written by atropos-{state.method}, which counts other steps; "
            "begin a run from its weights with --model-name"
        )
    _refuse_other_weights(state, config)
    refuse_other_base(state, config, base_fingerprint(config.model_name))
    for name in FIXED_SETTINGS:
        now = getattr(config, name)
        before = state.config.get(name, now)
        if _meant(name, before) != _meant(name, now):
            raise _changed(name, before, state, config)
    masters = state.config.get("master_weights", config.master_weights)
    # Without masters, an optimizer of bf16 weights rounds and keeps other state. With --dtype auto, loading detects it.
    steps_bf16 = {state.config.get("dtype"), config.dtype} == {"bfloat16"}
    if steps_bf16 and masters != config.master_weights and "none" in {masters, config.master_weights}:
        raise _changed("master_weights", masters, state, config)


def _meant(name: str, value: Any) -> Any:
    """Return a setting's value such that equal meanings are equal: modules are sorted, the default is spelled out."""
    return sorted(set(value or ADAPTED_BY_DEFAULT)) if name == "lora_target_modules" else value


def _changed(name: str, before: Any, state: TrainerState, config: TrainingConfig) -> CheckpointError:
    anew = "" if config.trains_adapter else " from its weights with --model-name"
    return CheckpointError(
        f"the checkpoint of step {state.step} was written {_as_flag(name, before)}, this run is "
        f"{_as_flag(name, getattr(config, name))}; resume {_as_flag(name, before)}, or start a new run{anew}"
    )


def _as_flag(name: str, value: Any) -> str:
    """Return a setting as words of a sentence, with the flag that gives it."""
    if value is None or value is False:
        return f"without {flag(name)}"
    words = value if isinstance(value, (list, tuple)) else () if value is True else (value,)
    return " ".join(["with", flag(name), *(str(word) for word in words)])


def _refuse_other_weights(state: TrainerState, config: TrainingConfig) -> None:
    """Raise `CheckpointError` for full weights where an adapter is trained, or the reverse, and for other sizes."""
    mode, model = str(state.config.get("weight_bridge_mode")), str(state.config.get("model_name"))
    kinds = {True: "an adapter", False: "full weights"}
    if mode in MODES and MODES[mode].trains_adapter != config.trains_adapter:
        held, wanted = kinds[not config.trains_adapter], kinds[config.trains_adapter]
        raise CheckpointError(
            f"the checkpoint of step {state.step} has {held} (--weight-bridge-mode {mode}), and "
            f"{config.weight_bridge_mode} trains {wanted}; resume with --weight-bridge-mode {mode}, or start a new run"
        )
    used_lora = state.config.get("use_lora")  # the flag of atropos-sft for the same choice
    if used_lora is not None and used_lora != config.trains_adapter:
        raise CheckpointError(
            f"the checkpoint of step {state.step} has {kinds[used_lora]}, and this run trains "
            f"{kinds[config.trains_adapter]}; resume {_as_flag('use_lora', used_lora)}, or start a new run"
        )
    before, now = local_shape(model), local_shape(config.model_name)
    if before is None or now is None or replace(before, name=now.name, stored_dtype=now.stored_dtype) == now:
        return
    raise CheckpointError(
        f"the checkpoint of step {state.step} has the weights of --model-name {model}, and {config.model_name} has "
        f"other sizes; resume with --model-name {model}, or start a new run"
    )


def refuse_other_base(state: TrainerState, config: TrainingConfig, base: str | None) -> None:
    """Raise `CheckpointError` if the model with the fingerprint `base` is not the one that the checkpoint needs.

    The model is needed for frozen weights, and for a reference policy that is the model at the run's start. If its
    weights have no fingerprint, here or when the checkpoint was written, names are compared, and a warning is logged.
    """
    frozen = "an adapter of" if config.trains_adapter else "some layers of" if config.train_layer_indices else None
    if frozen is None and not (config.kl_coef and config.ref_model is None):
        return
    before, now = state.config.get("model_name"), config.model_name
    has = f"has {frozen}" if frozen else "is held close by --kl-coef to"
    if None in {state.base, base}:
        if before not in {None, now}:
            logger.warning(
                "the checkpoint of step %d %s --model-name %s, this run has %s", state.step, has, before, now
            )
        return
    if state.base == base:
        return
    change = f"and {now} has other weights" if before != now else "whose weights have changed since"
    remedy = f"resume with --model-name {before}" if before != now else "put the former ones back"
    own = "" if frozen else f", name the reference with --ref-model {before}"
    raise CheckpointError(
        f"the checkpoint of step {state.step} {has} --model-name {before}, {change}; {remedy}{own}, or start a new run"
    )
