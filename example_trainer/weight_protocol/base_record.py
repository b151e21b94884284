"""The record in a dequantised base: trainer and server compare its digest, so that both compute with the same base.

A trainer whose base is stored in 4 bits writes the values that it computes with as a Hugging Face checkpoint. Its
server loads that directory in place of the model, and reports the digest at `/bridge/info`. The file is separate
because launcher, server and trainer all need it, and the launcher loads no torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from atropos_api.common.files import expand_home

BASE_DIRECTORY = Path("served") / "base"
"""Place of the dequantised base in a run directory."""
RECORD_NAME = "dequantised_base.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseRecord:
    """The origin of a dequantised base, and the digest of its packed weights."""

    digest: str
    model: str
    """Name or directory of the model that was quantised."""
    dtype: str

    def write(self, directory: Path) -> None:
        text = json.dumps(asdict(self), indent=2) + "\n"
        (directory / RECORD_NAME).write_text(text, encoding="utf-8")


def read_base_record(directory: str | Path) -> BaseRecord | None:
    """Return the record in a model directory; None for a hub name, or a directory without a readable record."""
    try:
        return BaseRecord(**json.loads((expand_home(directory) / RECORD_NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
