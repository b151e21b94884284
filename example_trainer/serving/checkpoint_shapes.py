"""Names and shapes of the tensors in a checkpoint, read from the files' headers without the data."""

from __future__ import annotations

from pathlib import Path

from example_trainer.errors import TrainerError
from example_trainer.weight_protocol.checkpoint_files import missing_bytes, read_header

Shapes = dict[str, tuple[int, ...]]

_PLAIN_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "I64", "I32", "BOOL"})


class CheckpointUnreadable(TrainerError):
    """The names and shapes of a checkpoint's tensors cannot be read, or do not fit the served model."""


def read_checkpoint_shapes(model: str, revision: str | None = None) -> Shapes:
    """Return the tensors of a model, given as a directory or, once it has been downloaded, by its name on the hub."""
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


def check_replacement(path: str, served: Shapes) -> Shapes | None:
    """Refuse a checkpoint that cannot replace the served weights, as far as the files' headers tell.

    So a mistyped path is found before anything is overwritten. Return the tensors of the served checkpoint that it
    lacks, None if that is not known; one that lacks some may be whole too, if the model ties them to others.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointUnreadable(f"{path!r} is not a directory on the server's machine")
    if not any(directory.glob("*.safetensors")):
        if any(directory.glob("*.bin")):
            return None
        raise CheckpointUnreadable(f"{path} holds neither *.safetensors nor *.bin files, so it is not a checkpoint")
    found = read_checkpoint_shapes(path)
    common = found.keys() & served.keys()
    if served and not common:
        raise CheckpointUnreadable(f"{path} holds none of the model's tensors; it holds {', '.join(sorted(found)[:3])}")
    for name in sorted(common):
        if found[name] != served[name]:
            detail = f"its {name} has shape {list(found[name])}, the model's {list(served[name])}"
            raise CheckpointUnreadable(f"{path} is a checkpoint of another model: {detail}")
    return {name: shape for name, shape in served.items() if name not in found} if served else None


def declared_shapes(model: str, revision: str | None) -> Shapes:
    """Return the tensors of a model, or nothing if its files cannot be read."""
    try:
        return read_checkpoint_shapes(model, revision)
    except CheckpointUnreadable:
        return {}


def _read_header(file: Path) -> Shapes:
    try:
        tensors = read_header(file)
        missing = missing_bytes(file, tensors)
    except (OSError, ValueError) as error:
        raise CheckpointUnreadable(f"{file} is not a safetensors file: {error}") from error
    if missing is not None:
        raise CheckpointUnreadable(f"{file} has {missing[0]} of {missing[1]} bytes: it is truncated")
    unknown = {tensor.dtype for tensor in tensors} - _PLAIN_DTYPES
    if unknown:
        raise CheckpointUnreadable(
            f"{file} holds tensors of type {', '.join(sorted(unknown))}: such weights are quantised"
        )
    return {tensor.name: tensor.shape for tensor in tensors}


def _downloaded(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(model, revision=revision, local_files_only=True, allow_patterns=["*.safetensors"])
        )
    except Exception as error:
        raise CheckpointUnreadable(f"the files of {model} are not in the local cache: {error}") from error
