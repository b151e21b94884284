"""Batches in files, as `--save-batches` writes them and `atropos replay` reads them.

A file is the batch in the columns form (docs/reference/columns.md), or as JSON where columns cannot say it.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from atropos_api.common.errors import AtroposError
from atropos_api.wire import Batch
from atropos_api.wire.columns import MAGIC, pack_body
from atropos_api.wire.columns_groups import NotColumnar, decode_batch, encode_group
from example_trainer.errors import BadBatch

SUFFIX = ".atb"


def batch_path(directory: Path, number: int, *, rank: int = 0, world_size: int = 1) -> Path:
    """Where batch `number` lies; each rank of a trainer has its own slice of it."""
    slice_name = f".rank-{rank}" if world_size > 1 else ""
    return directory / f"batch-{number}{slice_name}{SUFFIX}"


def write_batch(path: Path, batch: Batch) -> None:
    """Write beside its place and rename, so that a file of that name is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.part")
    beside.write_bytes(encode_batch(batch))
    os.replace(beside, path)  # noqa: PTH105 - the atomic one, by its name


def read_batch(path: Path) -> Batch:
    """The batch in `path`; raises `BadBatch` with what is wrong with the file."""
    try:
        body = path.read_bytes()
    except OSError as error:
        raise BadBatch(f"{path} cannot be read: {error.strerror}; --save-batches writes such files") from error
    try:
        return decode_batch(body, arrays=True) if body.startswith(MAGIC) else msgspec.json.decode(body, type=Batch)
    except (AtroposError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadBatch(f"{path} holds no batch ({error}); --save-batches writes such files") from error


def encode_batch(batch: Batch) -> bytes:
    """The batch as one body."""
    head = msgspec.json.encode({"number": batch.number, "run_id": batch.run_id})
    try:
        return pack_body(head, [encode_group(group) for group in batch.groups])
    except NotColumnar:
        return msgspec.json.encode(batch)
