"""The record in a dequantised base: trainer and server compare its digest, so that both compute with the same base.

A trainer whose base is stored in 4 bits writes the values that it computes with as a Hugging Face checkpoint. Its
server loads that directory in place of the model, and reports the digest at `/bridge/info`. The record has the sizes of
the other files, because the copy of a run directory may have been interrupted. The module is separate because launcher,
server and trainer all need it, and the launcher loads no torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from atropos_api.common.files import expand_home

BASE_DIRECTORY = Path("served") / "base"
"""Place of the dequantised base in a run directory."""
RECORD_NAME = "dequantised_base.json"
_SIZES = "file_bytes"


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseRecord:
    """The origin of a dequantised base, and the digest of its packed weights."""

    digest: str
    model: str
    """Name or directory of the model that was quantised."""
    dtype: str

    def write(self, directory: Path) -> None:
        """Write the record beside the files of a complete base, with their sizes."""
        sizes = {path.name: path.stat().st_size for path in sorted(directory.iterdir())}
        text = json.dumps(asdict(self) | {_SIZES: sizes}, indent=2) + "\n"
        (directory / RECORD_NAME).write_text(text, encoding="utf-8")


def read_base_record(directory: str | Path) -> BaseRecord | None:
    """Return the record in a model directory.

    It is None for a hub name, and for a directory without a readable record or without all files that it names.
    """
    place = expand_home(directory)
    try:
        content = json.loads((place / RECORD_NAME).read_text(encoding="utf-8"))
        sizes = content.pop(_SIZES).items()
        record = BaseRecord(**content)
        return record if all((place / name).stat().st_size == size for name, size in sizes) else None
    except (OSError, ValueError, TypeError, AttributeError, LookupError):
        return None
