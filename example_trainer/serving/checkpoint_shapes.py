"""Names and shapes of the tensors in a checkpoint, read from the files' headers without the data."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from example_trainer.errors import TrainerError

Shapes = dict[str, tuple[int, ...]]

_PLAIN_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "I64", "I32", "BOOL"})


class CheckpointUnreadable(TrainerError):
    """The model's files do not say what tensors they hold."""


def read_checkpoint_shapes(model: str, revision: str | None = None) -> Shapes:
    """The tensors of a model given as a directory or, once it has been downloaded, by its name on the hub."""
    directory = Path(model)
    if not directory.is_dir():
        directory = _downloaded(model, revision)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointUnreadable(
            f"{directory} holds no *.safetensors file; weights can be shared only from that format (convert the model "
            "with save_pretrained), or start without --share-weights"
        )
    shapes: Shapes = {}
    for file in files:
        shapes.update(_read_header(file))
    return shapes


def _read_header(file: Path) -> Shapes:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    unknown = {entry["dtype"] for entry in tensors.values()} - _PLAIN_DTYPES
    if unknown:
        raise CheckpointUnreadable(
            f"{file} holds tensors of type {', '.join(sorted(unknown))}: weights stored so are quantised"
        )
    return {name: tuple(entry["shape"]) for name, entry in tensors.items()}


def _downloaded(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(model, revision=revision, local_files_only=True, allow_patterns=["*.safetensors"])
        )
    except Exception as error:
        raise CheckpointUnreadable(f"the files of {model} are not in the local cache: {error}") from error
