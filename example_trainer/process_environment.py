"""What the environment variables of a starter say: `accelerate launch` and `torchrun` tell their programs that way.

They lie under files and flags. Importing this module loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping

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
    if int(environment.get("WORLD_SIZE", "1")) > 1:
        settings["world_size"] = int(environment["WORLD_SIZE"])
        settings["trainer_rank"] = int(environment.get("RANK", "0"))
    return settings


def _flag(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "").lower() in {"1", "true", "yes"}
