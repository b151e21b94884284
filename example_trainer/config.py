"""`TrainingConfig`: every setting of the trainer, in one flat pydantic model.

The command line, the run file's `trainer:` section and the launcher all build this model; nothing
else holds a default. A flag that the published documentation tables keeps the documented default.
Combinations that cannot work are refused here, with the reason, and not by the part that would
stumble over them later. `settings_from` reads the variables by which `accelerate launch` and `torchrun`
tell their programs rank, device and precision; they lie under files and flags. It loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import model_validator

from atropos_api.common.cliconfig import ConfigError
from example_trainer.options.conflicts import reason_to_refuse
from example_trainer.options.training_options import TrainingOptions


class TrainingConfig(TrainingOptions):
    """All settings of one trainer process, flat, validated together."""

    @model_validator(mode="after")
    def _refuse_what_cannot_work(self) -> TrainingConfig:
        if reason := reason_to_refuse(self):
            raise ValueError(reason)
        return self


MIXED_PRECISION = {"fp16": "float16", "bf16": "bfloat16"}


def settings_from(environment: Mapping[str, str]) -> dict[str, object]:
    """Rank, number of processes, device and dtype as far as the variables set them.

    Which GPU of its host a process takes follows from `LOCAL_RANK` when the processes meet.
    """
    settings: dict[str, object] = {}
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision in MIXED_PRECISION:
        settings["dtype"] = MIXED_PRECISION[precision]
    if _flag(environment, "ACCELERATE_USE_CPU"):
        settings["device"] = "cpu"
    world_size = _number(environment, "WORLD_SIZE", 1)
    if world_size > 1:
        settings["world_size"] = world_size
        settings["trainer_rank"] = _number(environment, "RANK", 0)
    return settings


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    given = environment.get(name, str(default))
    if not given.isdecimal():
        raise ConfigError(f"${name} is {given!r}, not a number; torchrun and accelerate launch set it, else unset it")
    return int(given)


def _flag(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "").lower() in {"1", "true", "yes"}
