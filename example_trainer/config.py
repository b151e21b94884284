"""`TrainingConfig`: every setting of the trainer, in one flat pydantic model.

The command line, the run file's `trainer:` section and the launcher all build this model; no other place defines a
default. A flag listed in the published documentation keeps the documented default. Combinations that cannot work are
refused here, with the reason, before any part starts. `settings_from` reads the environment variables in which
`accelerate launch` and `torchrun` pass rank, device and precision; files and flags override them. This module does not
import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import model_validator

from atropos_api.common.cliconfig import ConfigError
from example_trainer.options.conflicts import reason_to_refuse
from example_trainer.options.names_elsewhere import TRAINING_NAMES
from example_trainer.options.training_options import TrainingOptions


class TrainingConfig(TrainingOptions):
    """All settings of one trainer process, flat, validated together."""

    names_elsewhere: ClassVar[Mapping[str, str]] = TRAINING_NAMES

    @model_validator(mode="after")
    def _refuse_what_cannot_work(self) -> TrainingConfig:
        if reason := reason_to_refuse(self):
            chosen = f" (--preset {self.preset} is set; files and flags override its settings)" if self.preset else ""
            raise ValueError(f"{reason}{chosen}")
        return self


MIXED_PRECISION = {"fp16": "float16", "bf16": "bfloat16"}


def settings_from(environment: Mapping[str, str]) -> dict[str, object]:
    """Return rank, number of processes, device and dtype as far as the environment variables set them.

    The GPU of a process is chosen from `LOCAL_RANK` later, when the processes connect.
    """
    settings: dict[str, object] = {}
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision in MIXED_PRECISION:
        settings["dtype"] = MIXED_PRECISION[precision]
    elif precision not in ("", "no"):
        raise ConfigError(
            f"$ACCELERATE_MIXED_PRECISION is {precision!r}, in which nothing is trained here; start with "
            "--mixed_precision bf16, fp16 or no"
        )
    for engine in ("DEEPSPEED", "MEGATRON_LM"):
        if _flag(environment, f"ACCELERATE_USE_{engine}"):
            raise ConfigError(
                f"$ACCELERATE_USE_{engine}: it is not used here; start accelerate launch without it: the processes of "
                "--num_processes N divide weights and optimizer states among them (FSDP)"
            )
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
        raise ConfigError(f"${name} is {given!r}, not a number; unset it, or start with torchrun or accelerate launch")
    return int(given)


def _flag(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "").lower() in {"1", "true", "yes"}
